"""What to do about a translation that is refused or changes the training."""
