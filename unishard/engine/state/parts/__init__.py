"""The parts of a checkpoint, each of which saves, checks and restores itself.

A new kind of state is a file here, and an entry in `of_run.py`.
"""
