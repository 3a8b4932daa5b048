"""A row: all that unishard knows of one key of DeepSpeed's JSON."""

from __future__ import annotations

from enum import Enum, auto
from typing import Any, NamedTuple

from unishard.contract.entries import NOTHING
from unishard_deepspeed.keys.values import ANY, Values


class Use(Enum):
    """What becomes of a key under `native.deepspeed`."""

    LOG = auto()
    """Taken; affects only logs and timers."""
    SAME = auto()
    """Taken; affects time, memory or the shape of collectives, and results only by rounding."""
    OTHER = auto()
    """Taken; may train something else than another engine does."""
    DECIDED = auto()
    """Refused, because a field of the config decides it."""
    REFUSED = auto()
    """Refused, because it would break what unishard promises, or is of no use in it."""
    REMOVED = auto()
    """Refused: a key of older versions, an error in DeepSpeed 0.19.8 even where it switches something off."""


class Row(NamedTuple):
    """What unishard knows of one key."""

    use: Use
    text: str = ""
    """The fields to set instead where they decide it; why, and what instead, where it is refused."""
    values: Values = ANY
    """What it takes."""
    constant: Any = NOTHING
    """What unishard writes, unless a field or `native.deepspeed` says otherwise."""
    why: str = ""
    """Why it writes that."""
    ignored: str = ""
    """Why nothing is lost without it where the config of another script has it; empty where a row in `arguments` reads
    it."""

    @property
    def complaint(self) -> str:
        """Why `native.deepspeed` cannot have the key; empty where it can."""
        return f"is decided by a field; set {self.text} instead" if self.use is Use.DECIDED else self.text


def log(values: Values, constant: Any = NOTHING, why: str = "") -> Row:
    """A row for logs and timers."""
    return Row(Use.LOG, "", values, constant, why)


def same(values: Values, constant: Any = NOTHING, why: str = "", ignored: str = "") -> Row:
    """A row for time, memory and the shape of collectives."""
    return Row(Use.SAME, "", values, constant, why, ignored)


def other(values: Values, constant: Any = NOTHING, why: str = "") -> Row:
    """A row for what only DeepSpeed computes."""
    return Row(Use.OTHER, "", values, constant, why)


def decided(fields: str, values: Values = ANY, constant: Any = NOTHING, why: str = "") -> Row:
    """A row for what fields of the config decide."""
    return Row(Use.DECIDED, fields, values, constant, why)


def refused(text: str, values: Values = ANY, constant: Any = NOTHING, why: str = "", ignored: str = "") -> Row:
    """A row for what `native.deepspeed` cannot have."""
    return Row(Use.REFUSED, text, values, constant, why, ignored)


def removed(instead: str = "remove it") -> Row:
    """A row for a key of older versions."""
    return Row(Use.REMOVED, f"was removed in DeepSpeed 0.19.8 (DeepSpeed issue 8489); {instead}")
