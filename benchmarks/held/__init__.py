"""Bytes that a rank holds for each parameter, beside those of `unishard plan`."""
