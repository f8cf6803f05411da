"""The steps that train, evaluate and predict on a batch: forward pass, gradients, metrics, and compiled functions."""
