"""Faults of one rank or one disk: `make faults` plays them as docs/reliability.md lists them."""
