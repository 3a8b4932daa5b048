"""The rows of `PRIVATE_API`: only data."""
