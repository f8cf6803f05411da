"""Restoring: finds and reads a checkpoint, and fits it to the model."""
