"""A unishard file as text, with comments for the people who will read it."""

from __future__ import annotations

from typing import Any

from ruamel.yaml.comments import CommentedMap, CommentedSeq

from unishard.config import Section
from unishard.config.nested import Native
from unishard.formats.documents import yaml_text
from unishard.formats.reading import ReadDocument

__all__ = ["plain", "text_of"]

_SCRIPTS = ("training.micro_batch_size", "optimizer.name", "optimizer.lr", "scheduler.name")
"""What tools leave to the training script when their config does not say it."""


def text_of(document: Native, reading: ReadDocument) -> str:
    """YAML of the document, with a comment wherever a decision is needed, and a header that names what was left to the
    script.
    """
    commented = _commented(document)
    for path, undecided in reading.undecided.items():
        *above, name = path.split(".")
        section: Any = commented
        for key in above:
            section = section[key]
        section.yaml_add_eol_comment(f"needs your decision: the value comes from {undecided.who}", name)
    return _header(reading) + yaml_text(commented)


def plain(value: Any) -> Any:
    """A value as YAML holds it."""
    match value:
        case Section():
            return value.model_dump(exclude_unset=True)
        case list() | tuple():
            return [plain(item) for item in value]
    return value


def _header(reading: ReadDocument) -> str:
    left = [path for path in _SCRIPTS if path not in reading.decided]
    if reading.format == "unishard" or not left:
        return ""
    return (
        f"# Not said by the {reading.format} config, since the training script decides it there: {', '.join(left)}.\n"
        "# Write them here, or hand the optimizer to unishard.prepare; otherwise the defaults hold.\n"
    )


def _commented(value: Any, depth: int = 0) -> Any:
    if isinstance(value, dict):
        return CommentedMap({key: _commented(item, depth + 1) for key, item in value.items()})
    if isinstance(value, list):
        items = CommentedSeq([_commented(item, depth + 1) for item in value])
        items.fa.set_flow_style()
        return items
    return value
