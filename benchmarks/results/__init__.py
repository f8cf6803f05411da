"""Reproduces published results with a hand-written script and with `fit`, from the same initial parameters and in the same order."""
