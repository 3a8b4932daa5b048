"""Sequence parallelism: a group of ranks shares a sample, and each has a part of its positions.

The engine does not know of it: parameters are sharded over all ranks, and gradients are averaged over all of them, as
ever. What is here is data and attention::

    batch of a group   ── batches.py ──▶  this rank's positions, labels already shifted
    forward            ── forward.py ──▶  documents of the whole sequence; the loss of the whole micro-batch
    attention          ── attention.py ─▶ all-to-all of heads (Ulysses), or all-gather of keys and values
    first micro-batch  ── proof.py ────▶  nothing else in the model mixes positions
"""

from __future__ import annotations
