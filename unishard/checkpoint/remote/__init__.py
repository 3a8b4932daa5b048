"""Copies of checkpoints in an object store: `checkpoint.copy_to`, and URLs on the command line."""
