"""What a source and its translation come to, setting by setting, and whether the report says each difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from unishard.config.loading.text_file import text_of
from unishard.contract.rules import Fit
from unishard.contract.templates import is_placeholder, placeholders_in
from unishard.errors import ConfigError
from unishard.formats import Outcome, catalog
from unishard.formats.report.readback import read_back, same
from unishard.formats.verify.consumers import of_source, read_settings
from unishard.formats.verify.settings import AUTO, KEPT, Effective, of_config

_LAYOUT = ("sharding.strategy", "sharding.units")
"""Fields in which equivalent means other collectives: the report says so."""
_UNITS = "sharding.units"
"""Of which `auto` means one for each block."""
_ABSENT: Any = object()


class ComparedSetting(NamedTuple):
    """One setting."""

    field: str
    source: Any
    """With the tool of the source; None in words where it does not say."""
    written: Any
    """In the translation itself; None where it does not say."""
    effective: Any
    """With the tool that reads the translation."""
    differs: bool
    reported: bool


class Verification(NamedTuple):
    """What the consumers say of a translation."""

    rows: tuple[ComparedSetting, ...]
    source: Effective
    effective: Effective
    needs_input: bool
    """Whether values are missing that only the training script knows."""

    @property
    def unreported(self) -> list[ComparedSetting]:
        """The differences that no line of the report says."""
        return [row for row in self.rows if row.differs and not row.reported]

    @property
    def clean(self) -> bool:
        """Whether every difference is reported, and the consumer takes the translation; what it refuses in the source,
        it may refuse again.
        """
        return not self.unreported and self.effective.refused in ("", self.source.refused)


def verify(outcome: Outcome) -> Verification:
    """Read a translation with the tool that it is for, and compare it with what its source comes to.

    Imports that tool, and torch with it; what is not installed is said in `missing`.

    Args:
        outcome: The translation. A difference that its overrides ask for is no surprise.
    """
    source, effective, open_ = (
        of_source(outcome),
        read_settings(outcome),
        bool(outcome.of(Fit.NEEDS_INPUT) or outcome.reading.undecided or placeholders_in(outcome.text)),
    )
    if _unchanged(outcome):  # whatever the tool says of it, it said before
        source = source._replace(refused=effective.refused)
    if effective.missing or effective.refused:
        return Verification((), source, effective, open_)
    settings = dict(source.settings)
    if _in_one_group(outcome):
        source, effective = _without_groups(source), _without_groups(effective)
        settings = dict(source.settings)
    if settings.get("sharding.strategy", "no_shard") != "no_shard" and _UNITS not in settings:
        settings[_UNITS] = "auto"  # ZeRO gathers the parameters of each module
    written = _in_the_file(outcome)
    reported = _reported(outcome)
    rows = []
    for field in dict.fromkeys((*settings, *effective.settings)):
        before, after = settings.get(field, _ABSENT), effective.settings.get(field, _ABSENT)
        left = (
            field != _UNITS and before == AUTO and (outcome.to == "hf" or field not in outcome.reading.decided)
        )  # to the script, or who decides for it
        differs = not left and _differ(field, before, after)
        shown = [None if value is _ABSENT else value for value in (before, after)]
        rows.append(ComparedSetting(field, shown[0], written.get(field), shown[1], differs, field in reported))
    return Verification(tuple(rows), source, effective, open_)


def _in_the_file(outcome: Outcome) -> dict[str, Any]:
    """What the translation says itself, as unishard reads it: neither what its tool assumes, nor what the script
    decides.
    """
    try:
        back = read_back(catalog.get(outcome.to), outcome.document, outcome.reading)
    except ConfigError:
        return {}
    fields = {
        field for entry in back.entries if not entry.assumed for field in entry.effect.fields
    } - back.undecided.keys()
    return {field: value for field, value in of_config(back.config).items() if field in fields}


def _unchanged(outcome: Outcome) -> bool:
    """Whether the file is repeated character by character."""
    source = outcome.reading.source
    return (
        outcome.to == outcome.reading.format
        and source.folder is not None
        and text_of(Path(source.name)) == outcome.text
    )


def _in_one_group(outcome: Outcome) -> bool:
    ranks, size = outcome.reading.topology, outcome.reading.config.sharding.group_size
    return ranks is not None and (size or ranks.local_world_size) == ranks.world_size


def _without_groups(effective: Effective) -> Effective:
    """Groups of all ranks are no groups."""
    strategy = effective.settings.get("sharding.strategy")
    if not isinstance(strategy, str) or not strategy.startswith("hybrid_"):
        return effective
    whole = {"hybrid_shard": "full_shard", f"hybrid_{KEPT}": KEPT}.get(strategy, strategy.removeprefix("hybrid_"))
    return effective._replace(settings={**effective.settings, "sharding.strategy": whole})


def _differ(field: str, before: Any, after: Any) -> bool:
    if before is _ABSENT or after is _ABSENT or is_placeholder(after):
        return False
    if field == _UNITS:
        listed = isinstance(before, list) and isinstance(after, list)
        return not same(before, after) if listed else (before == "none") is not (after == "none")
    if field == "sharding.strategy" and KEPT in (before, after):
        return not {before, after} <= {KEPT, "shard_grad_op"}
    return not same(before, after)


def _reported(outcome: Outcome) -> set[str]:
    """The fields of which a line of the report says that they are not kept as they are, or that were asked to
    change.
    """
    reported = {text.partition("=")[0].strip() for text in outcome.overrides}
    for section in [field for field in reported if "." not in field]:
        reported |= {field for field in of_config(outcome.reading.config) if field.startswith(f"{section}.")}
    for item in outcome.items:
        fields = {*item.entry.effect.fields, *item.entry.effect.decides}
        if item.place:
            reported |= fields
        if item.fit is Fit.EQUIVALENT:
            reported |= fields & set(_LAYOUT)
        elif item.fit is not Fit.EXACT:
            reported |= fields
    reported |= {change.field for change in outcome.changes}
    if "precision.compute" in reported | outcome.reading.undecided.keys():
        reported.add("precision.loss_scale")
    if "sharding.reshard_after_forward" in reported:
        reported.add("sharding.strategy")
    return reported
