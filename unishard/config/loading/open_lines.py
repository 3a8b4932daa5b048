"""Open lines of a file, `compute: ${precision.compute}`, and the fields that do not count under the value that an
override writes there, such as a loss scale beside bf16.
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


def without_unused(document: Document, findings: Iterable[Finding], changed: Collection[str]) -> Config | None:
    """The config without the fields at fault; None if one of them is wrong in itself, or an override says it.

    Args:
        document: With the overrides.
        findings: What the schema refuses in it.
        changed: The fields that overrides decide.
    """
    data, left = deepcopy(document.data), dict[str, Any]()
    while faults := {dotted(finding.path) for finding in findings}:
        said = sorted(faults & dict(flat(data)).keys())  # the others have a default that follows from these
        if not said or not _FIELDS.issuperset(said) or any(is_within(field, changed) for field in said):
            return None
        left |= {field: leave_out(data, field) for field in said}
        try:
            config, findings = Config.parse(data), ()
        except ValidationError as error:
            findings = findings_of(error, data)
    reasons = {field: why_unused(config, field) or _unmet(field, value, config) for field, value in left.items()}
    if not all(reasons.values()):
        return None
    for field, why in reasons.items():
        warnings.warn(f"{document.origins.of(field)}: {field} is left out: {why}", UnusedFieldWarning, stacklevel=2)
    return config


def leave_out(data: Any, field: str) -> Any:
    """Remove a field from nested data; the value that it had."""
    *above, name = field.split(".")
    for key in above:
        data = data[key]
    return data.pop(name)


def _unmet(field: str, value: Any, config: Config) -> str:
    """The values of other fields, one of which this one lacks; empty for none."""
    wanted = needs(field, value)
    if any(value_at(config, switch) in accepted for switch, accepted in wanted.items()):
        return ""
    lacks = " or ".join(f"{switch} {' or '.join(accepted)}" for switch, accepted in wanted.items())
    return f"it needs {lacks}" if lacks else ""
