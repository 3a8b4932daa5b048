"""Measures every cell of the conformance suite on both engines, and writes docs/parity.csv and docs/parity.md."""
