"""Reads and writes LLaMA-Factory's YAML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unishard.config.topology import Topology
from unishard.formats.hf.script import ScriptFormat
from unishard.formats.hf.script_defaults import LLAMAFACTORY
from unishard.formats.hf.shipped import shipped_config, told
from unishard.formats.hf.switches import DEEPSPEED
from unishard.formats.llamafactory.shipped import SHIPPED
from unishard.formats.reading import ReadDocument
from unishard.formats.source import Source
from unishard.mapping.entries import Entry
from unishard.mapping.express import Expressed

__all__ = ["FORMAT"]

_RECOMPUTES = "activation_checkpointing"


class LlamaFactoryFormat(ScriptFormat):
    """YAML of `llamafactory-cli train`."""

    name = "llamafactory"
    tool = "LLaMA-Factory 0.9"

    def silent(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Every layer is checkpointed unless it is told not to."""
        return LLAMAFACTORY

    def entries(self, source: Source, topology: Topology | None) -> Sequence[Entry]:
        """What the arguments say, with the configs of DeepSpeed that LLaMA-Factory brings along."""
        config = shipped_config(source, SHIPPED)
        if config is None:
            return super().entries(source, topology)
        found = super().entries(source._replace(data={**source.data, DEEPSPEED: config}), topology)
        return told(found, source.data[DEEPSPEED], self.tool)

    def write(self, reading: ReadDocument, topology: Topology) -> Expressed:
        """The arguments that train, with LLaMA-Factory's own switch for checkpointed layers."""
        said = super().write(reading, topology)
        if _RECOMPUTES not in reading.decided or _RECOMPUTES in reading.undecided:
            return said
        document = {key: value for key, value in said.document.items() if not key.startswith("gradient_checkpointing")}
        document["disable_gradient_checkpointing"] = reading.config.activation_checkpointing == "none"
        word = said.fields[_RECOMPUTES]._replace(key="disable_gradient_checkpointing")
        return Expressed(document, {**said.fields, _RECOMPUTES: word})


FORMAT = LlamaFactoryFormat()
