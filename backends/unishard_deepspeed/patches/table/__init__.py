"""The rows of `PATCHES`: only data."""
