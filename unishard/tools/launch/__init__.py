"""Starts the ranks of a script: with torchrun on this host, as a Slurm job, or on Ray. Training does not need it."""
