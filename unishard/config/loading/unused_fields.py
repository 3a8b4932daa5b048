"""Fields of a file that do not count once an override has decided another one, such as a loss scale beside bf16: they
are left out, with a note.

Where that other field was open, `compute: ${precision.compute}`, fields that need another value of it are left out too.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from typing import Any

from pydantic import ValidationError

from unishard.config import Config, leaves, value_at
from unishard.config.loading.document import Document
from unishard.config.loading.placeholders import needs, undecided_in
from unishard.config.loading.validation import Finding, dotted, findings_of
from unishard.config.nested import flat, is_within
from unishard.config.unused import why_unused
from unishard.errors import UnusedFieldWarning

_FIELDS = frozenset(path for path, _ in leaves(Config))


def open_lines(data: Any) -> frozenset[str]:
    """The fields whose value is still a placeholder."""
    settings = flat(data) if isinstance(data, Mapping) else ()
    return frozenset(path for path, value in settings if undecided_in(value) == path)


def without_unused(
    document: Document, before: Any, findings: Iterable[Finding], changed: Collection[str]
) -> Config | None:
    """The config without the fields at fault; None if one of them is wrong in itself, or an override says it.

    Args:
        document: With the overrides.
        before: The data of the file.
        findings: What the schema refuses in the document.
        changed: The fields that overrides decide.
    """
    data, left, refused = deepcopy(document.data), dict[str, Any](), _refused(before) - open_lines(before)
    while faults := {dotted(finding.path) for finding in findings}:
        said = sorted(faults & dict(flat(data)).keys())  # the others have a default that follows from these
        if not said or not _FIELDS.issuperset(said) or refused & set(said):
            return None
        if any(is_within(field, changed) for field in said):
            return None
        left |= {field: leave_out(data, field) for field in said}
        try:
            config, findings = Config.parse(data), ()
        except ValidationError as error:
            findings = findings_of(error, data)
    opened = open_lines(before)
    reasons = {
        field: why_unused(config, field) or _unmet(field, value, config, opened) for field, value in left.items()
    }
    if not all(reasons.values()):
        return None
    for field in (said for said in reasons if said not in opened):
        warnings.warn(
            f"{document.origins.of(field)}: {field} is left out: {reasons[field]}", UnusedFieldWarning, stacklevel=2
        )
    return config


def _refused(data: Any) -> set[str]:
    """The fields that the schema refuses."""
    try:
        Config.parse(data)
    except ValidationError as error:
        return {dotted(finding.path) for finding in findings_of(error, data)}
    return set()


def leave_out(data: Any, field: str) -> Any:
    """Remove a field from nested data; the value that it had."""
    *above, name = field.split(".")
    for key in above:
        data = data[key]
    return data.pop(name)


def _unmet(field: str, value: Any, config: Config, opened: Collection[str]) -> str:
    """The values of open lines, one of which a field lacks; empty for none."""
    wanted = {switch: accepted for need in needs(field, value) for switch, accepted in need.items() if switch in opened}
    if any(value_at(config, switch) in accepted for switch, accepted in wanted.items()):
        return ""
    lacks = " or ".join(f"{switch} {' or '.join(accepted)}" for switch, accepted in wanted.items())
    return f"it needs {lacks}" if lacks else ""
