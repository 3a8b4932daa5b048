"""Reads and writes the files of `accelerate config`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.contract.entries import Entry, Path
from unishard.contract.render import FieldResult, Rendered
from unishard.contract.rules import Fit
from unishard.formats.accelerate.deepspeed import OF_THE_FILE
from unishard.formats.accelerate.entries import TOOL, block_of
from unishard.formats.accelerate.keys import KEYS
from unishard.formats.accelerate.reading import entries_of, ranks_of
from unishard.formats.accelerate.rules import FSDP_RULES
from unishard.formats.accelerate.script import launch_of
from unishard.formats.accelerate.writing import expressed, for_trainer, text_of
from unishard.formats.format import Format
from unishard.formats.launching import Launch
from unishard.formats.reading import ReadDocument
from unishard.formats.source import Source

__all__ = ["FORMAT"]


class AccelerateFormat(Format):
    """Files of `accelerate config`."""

    name = "accelerate"
    tool = TOOL
    keys = KEYS
    rules = FSDP_RULES
    fills_auto = True

    def ranks(self, source: Source) -> Topology | None:
        """Processes and machines that the file names."""
        return ranks_of(source.data)

    def launch(self, reading: ReadDocument) -> Launch:
        """Processes, machines, ports and GPUs that the file names."""
        return launch_of(reading.source.data, reading.topology)

    def for_trainer(self, source: Source) -> tuple[Mapping[str, Any], Path | None]:
        """What its launcher hands to the Trainer."""
        return for_trainer(source)

    def entries(self, source: Source, topology: Topology | None) -> Sequence[Entry]:
        """What a file says. Opens the file that `deepspeed_config_file` names."""
        return entries_of(source, topology)

    def write(self, reading: ReadDocument, topology: Topology) -> Rendered:
        """A file for `accelerate launch --config_file`, and what became of each field.

        What the source leaves to its training script stays with it.

        Raises:
            ConfigError: Accelerate does not know the engine.
        """
        return _with_absent_file(expressed(reading, topology), reading)

    def wants(self, document: Native) -> str:
        """The number of processes, without which `accelerate launch` refuses a file with an engine."""
        return "" if "num_processes" in document or document.get("distributed_type") == "NO" else _NO_RANKS

    def render(self, document: Native, reading: ReadDocument) -> str:
        """YAML in the order of `accelerate config`."""
        return text_of(document)


FORMAT = AccelerateFormat()

_NO_RANKS = (
    "accelerate launch refuses a file without num_processes; add --world-size N, or start it with "
    "`accelerate launch --num_processes N --config_file FILE`"
)

_BLOCK, _FILE = "deepspeed_config", "deepspeed_config_file"


def _with_absent_file(said: Rendered, reading: ReadDocument) -> Rendered:
    """The document, pointing to DeepSpeed's file as before if that is not there and its values are undecided."""
    open_ = [field for field in OF_THE_FILE if field in reading.undecided and reading.undecided[field].required]
    if reading.format != FORMAT.name or len(open_) < len(OF_THE_FILE):
        return said
    beside = {key: value for key, value in said.document.items() if key not in (_BLOCK, "mixed_precision")}
    name = block_of(reading.source.data, _BLOCK)[_FILE]
    words = dict.fromkeys(open_, FieldResult(Fit.EXACT, f"{_BLOCK}.{_FILE}", ""))
    return Rendered({**beside, _BLOCK: {_FILE: name}}, {**said.fields, **words})
