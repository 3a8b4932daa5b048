"""Expert parallelism: each rank of a group has some experts of a mixture, and tokens go to the ranks with theirs."""

from unishard.parallel.experts.slices import ExpertSlices

__all__ = ["ExpertSlices"]
