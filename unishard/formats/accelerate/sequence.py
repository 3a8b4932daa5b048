"""What `parallelism_config` says of sequences that several ranks share: context parallelism, which Accelerate has only
with FSDP2, and sequence parallelism, which it has only with DeepSpeed.

Sources, of accelerate 1.15.0: parallelism_config.py, utils/dataclasses.py and accelerator.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from unishard.config.nested import Native
from unishard.contract.entries import DocumentValues, Key, KeyEffect, Read, Unreadable, left_out
from unishard.contract.field_rows import asked
from unishard.contract.key_rows import degree, drops, integer, one_of
from unishard.contract.rules import SCRIPT, Fit, Rule
from unishard.formats.accelerate.entries import TOOL, kind_of

BLOCK = "parallelism_config"
AXES = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
"""What ranks are split by; their sizes multiply to the number of ranks."""
_METHODS = {"cp": "allgather", "sp": "ulysses"}
_NAMES = {"cp": "context", "sp": "sequence"}
REQUIRED_ENGINE = {
    "cp": f"{TOOL} has context parallelism only with FSDP2; write distributed_type: FSDP and fsdp_version: 2",
    "sp": f"{TOOL} has sequence parallelism only with DeepSpeed; write distributed_type: DEEPSPEED, or "
    "parallelism_config_cp_size for FSDP2",
}
WEIGHED = (
    "the loss is the mean over all tokens, as under Trainer; a script that takes the mean of each rank's part weighs "
    "tokens otherwise where labels are ignored"
)
_FIELDS = ("parallel.sequence.size", "parallel.sequence.method")


def name_of(axis: str) -> str:
    """The key of an axis."""
    return f"{BLOCK}_{axis}_size"


def dotted(name: str) -> str:
    """The key of the block by its name without prefix."""
    return f"{BLOCK}.{BLOCK}_{name}"


def block(**values: Any) -> Native:
    """The block with these keys, by their names without prefix."""
    return {BLOCK: {f"{BLOCK}_{name}": value for name, value in values.items()}}


def size_of(value: Any) -> int:
    """The size of an axis; 1 where it cannot be read, which its own key says."""
    try:
        return int(integer(1)(value))
    except Unreadable:
        return 1


def around(document: Mapping[str, Any], version: int) -> Mapping[str, Any]:
    """What other keys of a document say, for the rows here: the sizes of data parallelism and the version of FSDP."""
    block = document.get(BLOCK)
    sizes = block if isinstance(block, Mapping) else {}
    axis_sizes = {dotted(f"{axis}_size"): sizes[name_of(axis)] for axis in AXES[:2] if name_of(axis) in sizes}
    return {**axis_sizes, "fsdp_config.fsdp_version": version, _ENGINE: kind_of(document).engine}


_ENGINE = "engine"


def _size(axis: str) -> Key:
    def read(value: Any, document: DocumentValues) -> KeyEffect:
        size = integer(1)(value)
        if size == 1:
            return KeyEffect(Fit.IGNORED, "is off")
        if fault := _fault(axis, document):
            return KeyEffect(Fit.UNSUPPORTED, fault)
        fields = {"parallel.sequence.size": size, "parallel.sequence.method": _METHODS[axis]}
        return KeyEffect(Fit.APPROXIMATE, WEIGHED, fields)

    return Key(read, _FIELDS, Fit.APPROXIMATE, WEIGHED)


def _fault(axis: str, document: DocumentValues) -> str:
    """Why Accelerate refuses this, or would train something else; empty if it does not."""
    engine = ("fsdp", 2) if axis == "cp" else ("deepspeed", document.get("fsdp_config.fsdp_version"))
    if (document.get(_ENGINE), document.get("fsdp_config.fsdp_version")) != engine:
        return REQUIRED_ENGINE[axis]
    sizes = {each: size_of(1 if (size := document.get(dotted(f"{each}_size"))) is None else size) for each in AXES}
    if sizes["cp"] > 1 and sizes["sp"] > 1:
        return f"{TOOL} has only one of context and sequence parallelism; set the other to 1"
    ranks, total = document.topology.world_size if document.topology else 1, math.prod(sizes.values())
    if ranks > 1 and total != ranks:
        return f"makes {total} ranks of the {ranks} that there are; all sizes must multiply to num_processes"
    return ""


def _beside(axis: str, note: str, read: Read) -> Key:
    """A key that counts where its axis is on."""

    def switched(value: Any, document: DocumentValues) -> KeyEffect:
        size = document.get(dotted(f"{axis}_size"))
        if size is None or size_of(size) == 1:
            return KeyEffect(Fit.IGNORED, f"belongs to {_NAMES[axis]} parallelism")
        return read(value, document)

    return Key(switched, (), Fit.IGNORED, note)


def _passed_around(value: Any, document: DocumentValues) -> KeyEffect:
    method = one_of({"allgather": "allgather", "alltoall": "alltoall"})(value)
    if method == "allgather":
        return left_out("keys and values are gathered")
    return KeyEffect(Fit.EQUIVALENT, _GATHERED, copy_verbatim=True)


def _only(choice: str) -> Read:
    def read(value: Any, document: DocumentValues) -> KeyEffect:
        one_of({choice: choice})(value)
        return left_out("the only one that there is")

    return read


_GATHERED = "keys and values are gathered at once, not passed from rank to rank: the same math, other traffic"
_ANY_LENGTH = "sequences may have any length; parallel.sequence.pad_to pads them"
_NO_EXPERTS = (
    f"{TOOL} does not know this key and ignores it; for experts over ranks write parallel.expert, with which each rank "
    "keeps its own batch"
)
TENSOR = degree(
    "parallel.tensor.size",
    f"by the plan of the model's class, with which the script loads the model for {TOOL}: the same math",
)
_OWN_KERNEL = "attention is computed by torch, whatever kernel the model names: the same math"

KEYS: Mapping[str, Key] = {
    dotted(name): key
    for name, key in {
        "cp_size": _size("cp"),
        "cp_backend": _beside("cp", "names the only backend", _only("torch")),
        "cp_comm_strategy": _beside("cp", _GATHERED, _passed_around),
        "sp_size": _size("sp"),
        "tp_size": TENSOR,
        "sp_backend": _beside("sp", "names the only backend", _only("deepspeed")),
        "sp_seq_length": _beside("sp", _ANY_LENGTH, lambda value, document: left_out(_ANY_LENGTH)),
        "sp_seq_length_is_variable": _beside("sp", _ANY_LENGTH, lambda value, document: left_out(_ANY_LENGTH)),
        "ep_size": drops(_NO_EXPERTS, unknown=True),
        "sp_attn_implementation": _beside("sp", _OWN_KERNEL, lambda value, document: left_out(_OWN_KERNEL)),
    }.items()
}
"""By dotted key."""

BY_SCRIPT: Mapping[str, Rule] = asked(
    Fit.NEEDS_INPUT,
    SCRIPT,
    {
        "parallel.sequence.keys": "split these tensors of a batch",
        "parallel.sequence.pad_to": "pad sequences to a multiple of it in the collator",
    },
)
"""Rows of what no key of the file says."""
