"""What the ranks that share samples (`parallel.sequence`) send each other. Imports no torch."""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

from unishard.config import Config
from unishard.contract.footprint import Collective
from unishard.contract.model_shape import ITEMSIZE
from unishard.tools.plan.activations import Activations


class AttentionSizes(NamedTuple):
    """Those of a model whose layers all have the same attention."""

    layers: int
    heads: int
    """Of queries."""
    key_heads: int
    dim: int
    """Of a head."""


def exchanged_in(sizes: AttentionSizes, cfg: Config, part: int) -> tuple[Collective, ...]:
    """The collectives of attention in an optimizer step, see `unishard.sequence.attention`.

    Args:
        sizes: Those of the model.
        cfg: Its `parallel.sequence` is on.
        part: Positions of a sample that a rank has.
    """
    section, training = cfg.parallel.sequence, cfg.training
    group, recomputes = section.size, cfg.activation_checkpointing != "none"
    positions = sizes.layers * training.gradient_accumulation_steps * training.micro_batch_size * part
    nbytes_of_head = positions * sizes.dim * ITEMSIZE[cfg.precision.compute]
    if section.method == "ulysses" or (section.method == "auto" and sizes.heads % group == 0):
        # queries and outputs, keys and values; the same for their gradients
        nbytes = 2 * (sizes.heads + _repeated(sizes, group)) * nbytes_of_head
        forward = Collective("all_to_all", "activations", "forward", nbytes, group)
        return (forward, forward._replace(phase="backward", nbytes=nbytes * (2 if recomputes else 1)))
    nbytes = 2 * sizes.key_heads * nbytes_of_head * group
    forward = Collective("all_gather", "activations", "forward", nbytes, group)
    again = (forward._replace(phase="backward"),) if recomputes else ()
    return (forward, *again, Collective("all_to_all", "activations", "backward", nbytes, group))


def traced_in(activations: Activations, cfg: Config) -> tuple[Collective, ...]:
    """The collectives in an optimizer step whose micro-batch was run without data."""
    group, micro_batches = cfg.parallel.sequence.size, cfg.training.gradient_accumulation_steps
    return tuple(
        Collective(kind, "activations", phase, nbytes * micro_batches, group)
        for kind, phase, nbytes in activations.exchanged
    )


def _repeated(sizes: AttentionSizes, group: int) -> int:
    """Key heads that are sent: repeated where they do not divide."""
    if sizes.key_heads % group == 0:
        return sizes.key_heads
    repeated = sizes.key_heads * (group // gcd(sizes.key_heads, group))
    return repeated if sizes.heads % repeated == 0 else sizes.heads
