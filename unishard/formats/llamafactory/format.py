"""Reads and writes LLaMA-Factory's YAML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.contract.entries import Entry, Key, left_out
from unishard.contract.render import AUTO, FieldResult, RenderedDocument
from unishard.contract.rules import NO_KEY, Fit
from unishard.formats.files.source import Source
from unishard.formats.hf.dialects import DIALECT, LLAMAFACTORY, MODE, SHARING
from unishard.formats.hf.format import ScriptFormat, is_whole
from unishard.formats.hf.loop import DEEPSPEED
from unishard.formats.hf.quantizing import with_llamafactorys_words
from unishard.formats.hf.scheduling import SCHEDULE
from unishard.formats.llamafactory.shipped import shipped_config, told
from unishard.formats.llamafactory.stages import SAID_WHOLE, in_stages, with_stages
from unishard.formats.reading.document import ReadDocument

_SWITCHES = {(DEEPSPEED, name, "enabled") for name in ("bf16", "fp16")}
_RECOMPUTES = "activation_checkpointing"
_SWITCH = "disable_gradient_checkpointing"
_OFFLOADED = "offload.activations"


class LlamaFactoryFormat(ScriptFormat):
    """YAML of `llamafactory-cli train`."""

    name = "llamafactory"
    tool = "LLaMA-Factory 0.9"
    own: Mapping[str, Key] = {**DIALECT, **{name: in_stages(SCHEDULE[name]) for name in SAID_WHOLE}}
    loads: Mapping[str, Native] = {"bf16": {"pure_bf16": True}}

    def silent(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Every layer is checkpointed unless the config forbids it."""
        return LLAMAFACTORY

    def entries(self, source: Source, topology: Topology | None) -> Sequence[Entry]:
        """What the arguments say, with the configs of DeepSpeed that LLaMA-Factory brings along."""
        config = shipped_config(source)
        if config is None:
            return _pure(super().entries(source, topology), source.data)
        entries = super().entries(source._replace(data={**source.data, DEEPSPEED: config}), topology)
        return told(_pure(entries, source.data), source.data[DEEPSPEED], self.tool)

    def write(self, reading: ReadDocument, topology: Topology) -> RenderedDocument:
        """The arguments that train, with LLaMA-Factory's own switch for checkpointed layers."""
        rendered = with_llamafactorys_words(super().write(reading, topology), reading.config)
        rendered = with_stages(_with_sharing(rendered, reading), reading)
        off = reading.config.activation_checkpointing == "none"
        silent = off and reading.decides(_RECOMPUTES) and is_whole(rendered.document)
        if _RECOMPUTES not in rendered.fields and not silent:
            return rendered
        document = {
            key: value for key, value in rendered.document.items() if not key.startswith("gradient_checkpointing")
        }
        document[_SWITCH] = off
        words = {path: word for path, word in rendered.fields.items() if not _replaced(path, word)}
        result = rendered.fields.get(_RECOMPUTES, FieldResult(Fit.EXACT, "", ""))
        if _OFFLOADED in rendered.fields and reading.config.offload.activations != "none":
            words[_OFFLOADED] = FieldResult(Fit.APPROXIMATE, NO_KEY, "activations stay on the device: the same losses")
        return RenderedDocument(document, {**words, _RECOMPUTES: result._replace(key=_SWITCH, keys=(_SWITCH,))})


def _replaced(path: str, word: FieldResult) -> bool:
    """Whether transformers' words for recomputation say it, in place of which LLaMA-Factory has a switch."""
    return path in (_RECOMPUTES, _OFFLOADED) or any(key.startswith("gradient_checkpointing") for key in word.keys)


def _with_sharing(rendered: RenderedDocument, reading: ReadDocument) -> RenderedDocument:
    """The document with the ranks that share samples."""
    section = reading.config.parallel.sequence
    if not section.on:
        return rendered
    mode = "zigzag-ring" if section.method == "allgather" else "ulysses"
    words = {
        "parallel.sequence.size": FieldResult.held(SHARING, note=_FORK),
        "parallel.sequence.method": FieldResult.held(MODE, fit=Fit.EQUIVALENT, note="the same math, other traffic"),
    }
    return RenderedDocument({**rendered.document, SHARING: section.size, MODE: mode}, {**rendered.fields, **words})


_FORK = "only 360-LLaMA-Factory knows the key"


def _pure(entries: Sequence[Entry], data: Mapping[str, Any]) -> Sequence[Entry]:
    """With `pure_bf16`, "auto" of DeepSpeed's bf16 and fp16 says nothing: both stay off, and the weights are loaded in
    bf16.
    """
    if str(data.get("pure_bf16")).lower() != "true":
        return entries
    silent = left_out("pure_bf16 decides instead")
    return [
        entry._replace(effect=silent) if entry.path in _SWITCHES and entry.value == AUTO else entry for entry in entries
    ]


FORMAT = LlamaFactoryFormat()
