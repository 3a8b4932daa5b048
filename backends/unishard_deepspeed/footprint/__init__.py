"""Bytes that a rank holds and sends. Imports no torch."""
