"""A mapping is a table: one `Rule` for each leaf of the config.

A backend describes its engine with such a table, and a format of another tool describes its documents with one. From
the same rows come the native config, the document, the report, `unishard explain`, MAPPING.md and docs/formats/, so
all of them agree.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from operator import attrgetter
from typing import NamedTuple

from unishard.config import Config
from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.config.unused import why_unused

Setting = Callable[[Config, Topology], Native]
Holds = Callable[[Config], bool]

NO_KEY = "none"
"""Stands, among a format's keys, where it has none for a field."""
SCRIPT = "your training script"
"""Stands there where the format has none and the script must do it."""


class Fit(StrEnum):
    """How well a field or a key is kept. In order: of several, the last counts.

    Backends need the first three and the last.
    """

    EXACT = "exact"
    """Same maths, same collectives."""
    EQUIVALENT = "equivalent"
    """Same maths to rounding; other collectives or memory, or unishard's loop does it around the engine."""
    APPROXIMATE = "approximate"
    """Same purpose, another trade-off; the note says how it differs. An error under `strict: true` and `--strict`."""
    IGNORED = "ignored"
    """Left out, and nothing is lost: it concerns only a launcher, a log, time or memory, or is off."""
    NEEDS_INPUT = "needs input"
    """Needs your decision: only the training script knows it, or must do it."""
    UNSUPPORTED = "unsupported"
    """Refused; the note says why, and what instead."""

    @property
    def severity(self) -> int:
        """Position in the order."""
        return list(Fit).index(self)


def worst(*fits: Fit) -> Fit:
    """Of several, the one that counts; exact where there is none."""
    return max(fits, key=lambda fit: fit.severity, default=Fit.EXACT)


class When(NamedTuple):
    """A case in which a rule fits differently."""

    case: str
    """The condition in words, for MAPPING.md."""
    holds: Holds
    fit: Fit
    note: str
    """How it differs; for `unsupported`: why, and after a semicolon what instead."""


def unless(case: str, holds: Holds, note: str = "") -> When:
    """A case in which the field has nothing to decide, so that nothing can be lost."""
    return When(case, holds, Fit.EXACT, note)


def equivalent(case: str, holds: Holds, note: str) -> When:
    """A case in which a rule fits with other collectives, memory or rounding."""
    return When(case, holds, Fit.EQUIVALENT, note)


def approximate(case: str, holds: Holds, note: str) -> When:
    """A case in which a rule makes another trade-off."""
    return When(case, holds, Fit.APPROXIMATE, note)


def needs_input(case: str, holds: Holds, note: str) -> When:
    """A case that the training script decides, or must see to."""
    return When(case, holds, Fit.NEEDS_INPUT, note)


def unsupported(case: str, holds: Holds, note: str) -> When:
    """A case that is refused."""
    return When(case, holds, Fit.UNSUPPORTED, note)


def is_(path: str, value: str) -> tuple[str, Holds]:
    """The case in which a field has a value, by which it is called; for `unless` and the others, behind a star."""
    field = attrgetter(path)
    return value, lambda cfg: bool(field(cfg) == value)


PURE: tuple[str, Holds] = ("pure", lambda cfg: cfg.precision.pure)
"""The case in which the master weights have the dtype of compute."""
HYBRID: tuple[str, Holds] = ("hybrid", lambda cfg: cfg.sharding.hybrid)


def sharded(cfg: Config) -> bool:
    """Whether the ranks hold shards of the model's state."""
    return cfg.sharding.strategy != "no_shard"


def mixed(cfg: Config) -> bool:
    """Whether the model computes in another dtype than fp32."""
    return cfg.precision.compute != "fp32"


class Rule(NamedTuple):
    """What one backend, or one format, makes of one field."""

    fit: Fit
    key: str
    """The native keys or calls, in words; `SCRIPT` where the training script must do it, and `NO_KEY` where nothing
    does."""
    note: str = ""
    to: Setting = lambda cfg, topology: {}
    """The nested fragment of native config, or of the document, that the field decides; fragments are merged."""
    when: tuple[When, ...] = ()
    """Exceptions, the first that holds counts."""
    auto: bool = False
    """Whether a format has the word `auto` for a value that the training script decides; otherwise the key is
    omitted."""

    def outcome(self, path: str, cfg: Config) -> tuple[Fit, str]:
        """The fit and the note for this config; exact, with the reason, where the field at `path` decides nothing."""
        why = why_unused(cfg, path)
        if why is not None:
            return Fit.EXACT, why
        for case in self.when:
            if case.holds(cfg):
                return case.fit, case.note
        return self.fit, self.note


def done_by_unishard(note: str, *when: When) -> Rule:
    """A rule for a field that unishard's own loop honors, the same way around every engine."""
    return Rule(Fit.EXACT, "unishard's loop", note, when=when)
