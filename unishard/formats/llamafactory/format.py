"""Reads and writes LLaMA-Factory's YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.config.topology import Topology
from unishard.formats.hf.script import ScriptFormat
from unishard.formats.hf.script_defaults import LLAMAFACTORY
from unishard.formats.reading import ReadDocument
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
