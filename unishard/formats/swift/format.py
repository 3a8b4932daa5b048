"""Reads and writes ms-swift's YAML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unishard.config.nested import Native, merge
from unishard.config.topology import Topology
from unishard.contract.entries import Entry, KeyEffect, Undecided
from unishard.contract.render import Rendered
from unishard.contract.rules import Fit
from unishard.formats.hf.dialects import swift
from unishard.formats.hf.format import ScriptFormat
from unishard.formats.hf.loop import DEEPSPEED as DEEPSPEED_ARGUMENT
from unishard.formats.hf.loop import FSDP as FSDP_ARGUMENT
from unishard.formats.hf.shipped import shipped
from unishard.formats.launching import Launch
from unishard.formats.reading import ReadDocument
from unishard.formats.source import Source

_CONFIG = "fsdp_config"
_HPZ = "zero_hpz_partition_size"
_SWITCHES = ("bf16", "fp16")
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp16"}
_PRECISION = {"precision.compute", "precision.reduce", "precision.accumulate"}
_MODELS = "torch_dtype, or the dtype in the model's config.json"


class SwiftFormat(ScriptFormat):
    """YAML and JSON of `swift sft` and the like."""

    name = "swift"
    tool = "ms-swift 4.6"
    switched_on = ("gradient_checkpointing", "bf16")

    def silent(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """A rate and a schedule of its own, recomputed activations, and 16 samples an update."""
        return swift(data)

    def launch(self, reading: ReadDocument) -> Launch:
        """Processes that a file names; others stand in the environment (NPROC_PER_NODE)."""
        return Launch(processes=reading.source.data.get("nproc_per_node"))

    def entries(self, source: Source, topology: Topology | None) -> Sequence[Entry]:
        """What the arguments say, with the engines' configs that ms-swift brings along, and what it assumes."""
        written = source.data
        found = super().entries(source._replace(data=_unfolded(written)), topology)
        entries = [
            _as_written(entry, written)
            for entry in found
            if not (entry.assumed and entry.path[0] in written and _of_engine(entry))
        ]
        return entries if _computes(written) or any(key in written for key in _SWITCHES) else _without_a_dtype(entries)

    def write(self, reading: ReadDocument, topology: Topology) -> Rendered:
        """The arguments that train; ms-swift takes what FSDP gets as one mapping."""
        said = super().write(reading, topology)
        document = dict(said.document)
        if FSDP_ARGUMENT in document:
            config = document.pop(_CONFIG, {})
            document[FSDP_ARGUMENT] = {FSDP_ARGUMENT: "full_shard auto_wrap", _CONFIG: config}
        return Rendered(document, said.fields)


FORMAT = SwiftFormat()


def _computes(data: Mapping[str, Any]) -> str:
    """The switch that the dtype of the model turns on (base_args/model_args.py); empty where the model's own config
    says the dtype.
    """
    return _DTYPES.get(str(data.get("torch_dtype")).removeprefix("torch."), "")


def _without_a_dtype(entries: Sequence[Entry]) -> list[Entry]:
    """The entries where only the model's own config says in which dtype it computes."""
    open_ = KeyEffect(Fit.NEEDS_INPUT, f"the value comes from {_MODELS}", {"precision.compute": Undecided(_MODELS)})
    kept = [entry for entry in entries if not (entry.assumed and _PRECISION & entry.effect.fields.keys())]
    left = [entry._replace(effect=_open(entry.effect)) for entry in kept]
    return [*left, Entry(("torch_dtype",), None, open_, assumed=True)]


def _open(effect: KeyEffect) -> KeyEffect:
    if not _PRECISION & effect.fields.keys():
        return effect
    fields = {path: value for path, value in effect.fields.items() if path not in _PRECISION}
    note = f"the value comes from {_MODELS}"
    return KeyEffect(
        Fit.NEEDS_INPUT, note, {**fields, "precision.compute": Undecided(_MODELS)}, copy_verbatim=effect.copy_verbatim
    )


def _of_engine(entry: Entry) -> bool:
    return entry.path in ((DEEPSPEED_ARGUMENT,), (FSDP_ARGUMENT,)) and not entry.effect.fields


def _unfolded(data: Mapping[str, Any]) -> Native:
    """The arguments, with what stands behind the names `zero3` and `fsdp2`, and what goes into DeepSpeed's config."""
    found, configs = dict(data), shipped("swift")
    if (switch := _computes(data)) and not any(key in data for key in _SWITCHES):
        found[switch] = True
    named = found.get(DEEPSPEED_ARGUMENT)
    if isinstance(named, str) and named in configs:
        found[DEEPSPEED_ARGUMENT] = configs[named]
    if isinstance(found.get(DEEPSPEED_ARGUMENT), Mapping) and isinstance(size := found.get(_HPZ), int):
        found[DEEPSPEED_ARGUMENT] = merge(found[DEEPSPEED_ARGUMENT], {"zero_optimization": {_HPZ: size}})
    named = found.get(FSDP_ARGUMENT)
    config = configs.get(named) if isinstance(named, str) else named
    if isinstance(config, Mapping) and FSDP_ARGUMENT in config:
        found |= {FSDP_ARGUMENT: config[FSDP_ARGUMENT], _CONFIG: config.get(_CONFIG, {})}
    return found


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _as_written(entry: Entry, data: Mapping[str, Any]) -> Entry:
    """The entry at the place where the document says it."""
    top = entry.path[0]
    if top in _SWITCHES and top not in data:
        return entry._replace(assumed=True)
    if top == _CONFIG and top not in data:
        nested = isinstance(data.get(FSDP_ARGUMENT), Mapping)
        return entry._replace(path=(FSDP_ARGUMENT, *entry.path)) if nested else entry._replace(assumed=True)
    if entry.path == (FSDP_ARGUMENT,) and FSDP_ARGUMENT in _mapping(data.get(FSDP_ARGUMENT)):
        return entry._replace(path=(FSDP_ARGUMENT, FSDP_ARGUMENT))
    if entry.path in ((DEEPSPEED_ARGUMENT,), (FSDP_ARGUMENT,)) and isinstance(data.get(top), str):
        return entry._replace(value=data[top], assumed=False)
    return entry
