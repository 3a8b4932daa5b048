"""Sequences that several ranks share: what DeepSpeed's keys say, and how it says the fields.

DeepSpeed itself makes the groups only where both sizes are there (0.19.8, __init__.py); a script that passes `mpu`, as
transformers and Accelerate do, makes them itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.config import Config
from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.contract.entries import DocumentValues, Key, KeyEffect, Unreadable
from unishard.contract.field_rows import asked, row, when_default
from unishard.contract.key_rows import integer
from unishard.contract.rules import SCRIPT, Fit, Rule, is_, unless
from unishard_arguments.deepspeed.facts import DATA_SIZE, SHARING, dropped, sharing
from unishard_deepspeed.keys.values import dtype

_WEIGHED = (
    "the loss is the mean over all tokens, as under Trainer; a script that takes the mean of each rank's part weighs "
    "tokens otherwise where labels are ignored"
)
_REDUCES = "seq_parallel_communication_data_type"
_ALONE = "only used with sequence parallelism"


def _shared(value: Any, document: DocumentValues) -> KeyEffect:
    if value in (None, 0) or integer(1)(value) == 1:
        return dropped("is off")
    fields = {"parallel.sequence.size": integer(1)(value), "parallel.sequence.method": "ulysses"}
    return KeyEffect(Fit.APPROXIMATE, _WEIGHED, fields)


def _groups(value: Any, document: DocumentValues) -> KeyEffect:
    size, ranks = integer(1)(value), document.topology.world_size if document.topology else 1
    if sharing(document) > 1 and ranks > 1 and size * sharing(document) != ranks:
        raise Unreadable(
            f"must be ranks / {SHARING}, got {size} for {ranks} ranks and {sharing(document)}; correct one of them"
        )
    return dropped("follows from the number of ranks")


def _reduced(value: Any, document: DocumentValues) -> KeyEffect:
    if sharing(document) == 1 or value is None:
        return dropped(_ALONE)
    return KeyEffect(fields={"precision.reduce": dtype(value)})


KEYS: Mapping[str, Key] = {
    SHARING: Key(_shared, ("parallel.sequence.size", "parallel.sequence.method"), Fit.APPROXIMATE, _WEIGHED),
    DATA_SIZE: Key(_groups, (), Fit.IGNORED, "follows from the number of ranks"),
    _REDUCES: Key(_reduced, ("precision.reduce",), note="fp32 if it is absent; only with sequence_parallel_size"),
}


def _sizes(cfg: Config, topology: Topology) -> Native:
    """The sizes, and the dtype of reductions, which without its key would be fp32."""
    size, world = cfg.parallel.sequence.size, topology.world_size
    if size == 1:
        return {}
    known = {DATA_SIZE: world // size} if world > 1 and world % size == 0 else {}
    return {SHARING: size, **known, _REDUCES: cfg.precision.reduce}


RULES: Mapping[str, Rule] = {
    "parallel.sequence.size": row(
        Fit.APPROXIMATE,
        f"{SHARING}, {DATA_SIZE}",
        "the script registers UlyssesSPAttentionHF for the model, reads the loader through UlyssesSPDataLoaderAdapter, "
        "and weighs each rank's loss by its tokens",
        when_default("parallel.sequence.size"),
        to=_sizes,
    ),
    "parallel.sequence.method": row(
        Fit.EQUIVALENT,
        SHARING,
        "DeepSpeed has only Ulysses, whose size must divide the heads: the same math, other traffic",
        unless(*is_("parallel.sequence.method", "ulysses")),
    ),
    **asked(
        Fit.NEEDS_INPUT,
        SCRIPT,
        {
            "parallel.sequence.keys": "split these tensors of a batch",
            "parallel.sequence.pad_to": "pad sequences to a multiple of it in the collator",
        },
    ),
}
