"""What a table of rules makes of a config: the native config or the document, and what became of each field."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from unishard.config import Config
from unishard.config.nested import Native, flat, merge, nested
from unishard.config.topology import Topology
from unishard.contract.rules import Fit, Rule

AUTO = "auto"
"""What transformers and Accelerate fill in from the training script."""
LEFT_OUT = "left out, which leaves it to the tool's default; write the value here"
"""The note of an undecided value for which a format has a key but no word."""
KEPT_AUTO = (
    'kept as "auto", which transformers and Accelerate fill in from the training script; write the value for '
    "anything else"
)
"""The note of a value that is written as `AUTO`."""


class FieldResult(NamedTuple):
    """What became of one field."""

    fit: Fit
    key: str
    """What says it, in words."""
    note: str
    keys: tuple[str, ...] = ()
    """The dotted keys of the document that hold it."""

    @classmethod
    def held(cls, *keys: str, fit: Fit = Fit.EXACT, note: str = "") -> FieldResult:
        """The result of a field that these keys hold, and nothing else says."""
        return cls(fit, ", ".join(keys), note, keys)

    def below(self, block: str) -> FieldResult:
        """The same in a document that has all of it in one block."""
        return self._replace(key=f"{block}.{self.key}", keys=tuple(f"{block}.{key}" for key in self.keys))


class RenderedDocument(NamedTuple):
    """A config in the words of an engine or a format."""

    document: Native
    fields: Mapping[str, FieldResult]
    """What became of each; of a key of the source that is written as it is, under `Entry.as_it_is`."""


def render(
    rules: Mapping[str, Rule], cfg: Config, topology: Topology, undecided: Collection[str] = frozenset()
) -> RenderedDocument:
    """What a table of rules makes of a config. Pure; imports no engine.

    Args:
        rules: One for each leaf of `Config`.
        cfg: What to say.
        topology: The ranks.
        undecided: Fields whose value in `cfg` only fills the place of one that the training script decides.
    """
    document: Native = {}
    fields = {}
    for path, row in rules.items():
        fragment, fields[path] = _render_field(path, row, cfg, topology, undecided=path in undecided)
        document = merge(document, fragment)
    return RenderedDocument(document, fields)


def _render_field(
    path: str, row: Rule, cfg: Config, topology: Topology, *, undecided: bool
) -> tuple[Native, FieldResult]:
    if undecided and row.auto:
        keys = tuple(dict(flat(row.to(cfg, topology))))
        return nested(dict.fromkeys(keys, AUTO)), FieldResult(Fit.NEEDS_INPUT, row.key, KEPT_AUTO, keys)
    if undecided:
        return {}, _left_out(row)
    fit, note = row.outcome(path, cfg)
    refused = fit in (Fit.UNSUPPORTED, Fit.NEEDS_INPUT)
    fragment = {} if refused else row.to(cfg, topology)
    return fragment, FieldResult(fit, row.key, note, tuple(dict(flat(fragment))))


def _left_out(row: Rule) -> FieldResult:
    """What becomes of a field that is not written, because only the training script knows its value."""
    match row.fit:
        case Fit.NEEDS_INPUT:
            return FieldResult(Fit.EXACT, row.key, "still decides it")
        case Fit.IGNORED:
            return FieldResult(row.fit, row.key, row.note)
    return FieldResult(Fit.NEEDS_INPUT, row.key, LEFT_OUT)
