"""What became of each key: said, written, and what that means there."""
