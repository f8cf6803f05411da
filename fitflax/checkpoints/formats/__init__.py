"""File formats of a single checkpoint: writing, reading and verification."""
