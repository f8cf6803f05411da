"""A directory of checkpoints: its contents, retention and locking."""
