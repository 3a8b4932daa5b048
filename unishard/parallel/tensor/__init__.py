"""Tensor parallelism: each rank of a group has a part of the weights, and they compute each sample together.

A plan says which modules are cut and how. What is left are ordinary modules with smaller weights, whose forward has a
collective before or behind it; the activations between modules are then parts too::

    hidden ── copy ──▶ q_proj, k_proj, v_proj (colwise) ──▶ own heads ──▶ o_proj (rowwise) ── sum ──▶ hidden

A gradient of a whole parameter is the same on all ranks of a group, or each of them has a part of it, as of its heads.
"""

from unishard.parallel.tensor.slices import TensorSlices

__all__ = ["TensorSlices"]
