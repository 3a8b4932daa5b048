"""Recurrences that are linear in their state, of which each rank computes its positions, and one all-gather the rest.

Each run of positions is computed from a zero state, along with what it does to a state. What every run makes of both
says in which state each one begins, and that adds to its outputs. No tensor that is sent grows with the sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from unishard.sequence.context import SplitBatch
from unishard.sequence.runs import as_runs, gather_runs, joined_runs


def delta_rule(
    function: Callable[..., Any],
    split: SplitBatch,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Gated delta rules (GDN, KDA) over whole sequences, at this rank's positions. Collective in the group.

    The columns of a state, one for each dim of value, do not see each other. So columns that begin as the identity and
    get no values end as what a run does to a state, and what they put out is what a state adds.

    Args:
        function: Of transformers, or of the kernel in its place.
        split: The micro-batch.
        query: `[batch, positions, key heads, key dim]`.
        key: As `query`.
        value: `[batch, positions, heads, value dim]`.
        g: `[batch, positions, heads]`, or with the key dim: the logarithm of the decay.
        beta: `[batch, positions, heads]`.
        **options: Other arguments.

    Returns:
        `[batch, positions, heads, value dim]`, and the state in which each run ends that began with zeros.
    """
    query, key, value, g, beta = (as_runs(each, split) for each in (query, key, value, g, beta))
    width, dim = key.shape[-1], value.shape[-1]
    identity = functional.pad(torch.eye(width, device=value.device), (dim, 0))
    options |= {"initial_state": identity.expand(len(value), value.shape[2], -1, -1), "output_final_state": True}
    output, final = function(query, key, functional.pad(value, (0, width)), g=g, beta=beta, **options)
    first = beginnings(final[..., :dim], final[..., dim:], torch.matmul, split)
    added = torch.einsum("blhk,bhkv->blhv", output[..., dim:].float(), first)
    return joined_runs((output[..., :dim].float() + added).to(output.dtype), split), final[..., :dim]


def mamba2(
    function: Callable[..., Any],
    split: SplitBatch,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    **options: Any,
) -> Any:
    """The state space of Mamba2 over whole sequences, at this rank's positions. Collective in the group.

    All of a head's state decays by the same number, so a run multiplies a state by the decay from its beginning, and a
    state adds to an output what C reads of it after the decay until there.

    Args:
        function: Of transformers, or of the kernel in its place.
        split: The micro-batch.
        hidden_states: `[batch, positions, heads, dim]`.
        dt: `[batch, positions, heads]`.
        A: `[heads]`.
        B: `[batch, positions, groups, state size]`.
        C: As `B`.
        **options: Other arguments.

    Returns:
        As of the function: `[batch, positions, heads, dim]`, and with `return_final_states` the state in which each
        run ends that began with zeros.
    """
    hidden_states, dt, B, C = (as_runs(each, split) for each in (hidden_states, dt, B, C))
    asked, options["return_final_states"] = options.get("return_final_states"), True
    output, final = function(hidden_states, dt, A, B, C, **options)
    decay = _decay(dt, A, options)
    first = beginnings(final.float(), decay[:, -1], lambda by, state: by[..., None, None] * state, split)
    groups = C.shape[2]
    read = torch.einsum("blgn,bgrpn->blgrp", C.float(), torch.unflatten(first, 1, (groups, -1)))
    added = read.flatten(2, 3) * decay[..., None]
    output = joined_runs((output.float() + added).to(output.dtype), split).contiguous()  # models call view
    return (output, final) if asked else output


def _decay(dt: Tensor, A: Tensor, options: dict[str, Any]) -> Tensor:
    """Of a state from the beginning of a run until after each position, `[batch, positions, heads]`."""
    bias = options.get("dt_bias")
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    dt = functional.softplus(dt) if options.get("dt_softplus") else dt
    low, high = options.get("dt_limit", (0.0, float("inf")))
    return (A.float() * dt.clamp(low, high).float()).cumsum(1).exp()


def beginnings(
    final: Tensor, transition: Tensor, apply: Callable[[Tensor, Tensor], Tensor], split: SplitBatch
) -> Tensor:
    """The state in which each run of this rank begins. Collective in the group.

    Args:
        final: `[samples, ...]`, the state in which each run ends that began with zeros.
        transition: `[samples, ...]`, what each run does to a state.
        apply: Of a transition to a state; a run ends in `apply(transition, state) + final`.
        split: The micro-batch.
    """
    everyones = gather_runs(torch.cat([final.flatten(1), transition.flatten(1)], 1), split)
    of_state = final[0].numel()
    finals = torch.unflatten(everyones[..., :of_state], 2, final.shape[1:])
    transitions = torch.unflatten(everyones[..., of_state:], 2, transition.shape[1:])
    states = [torch.zeros_like(finals[:, 0])]
    for number in range(everyones.shape[1] - 1):
        states.append(apply(transitions[:, number], states[-1]) + finals[:, number])
    # Chosen of all states, so that every rank takes part in the backward of the gather; one by one, for a list would be
    # copied to the device.
    every = torch.stack(states, 1)
    return torch.stack([every[:, number] for number in split.layout.numbers(split.group.rank)], 1).flatten(0, 1)
