"""The commands of `python -m fitflax`, which the module `__main__` lists."""
