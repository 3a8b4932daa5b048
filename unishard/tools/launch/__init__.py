"""Starts the ranks of a script: with torchrun on this host, as a Slurm job, or on Kubernetes.

Training does not need it.
"""
