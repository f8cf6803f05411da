"""What happens to a batch: the forward pass, gradients, the steps that train, evaluate and predict, and their compiled form."""
