"""Tiny trainings on ranks, what is done to them, and what is counted and judged: for the programs here and for tests."""
