"""Kills saves and runs, damages files, and keeps what came of it for docs/integrity.md: `make integrity`."""
