"""Backends and formats: the protocol, the registry that finds them by entry point, and what is asked of a backend without an engine."""
