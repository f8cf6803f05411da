"""WHAT happens to a batch: the module's pure functions, the steps that train, evaluate and predict, and their compiled form."""
