"""The commands of `python -m fitflax`. Each module has `add_arguments(parser)`, and `run(options)`, which returns the exit status."""
