"""The rows of `PATCHES`: data alone."""
