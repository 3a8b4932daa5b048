"""What is logged, measured and traced of a training, and where it goes."""
