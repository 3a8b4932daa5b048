"""Which values a config may contain, whatever field they are for: plain ones, finite and without variables."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from unishard.config.describe import shown
from unishard.config.loading.origins import Keys, Origin
from unishard.config.loading.validation import Finding

_VARIABLE = re.compile(r"\$\{[^}]*\}")


def plain(value: Any, keys: Keys, findings: list[Finding]) -> Any:
    """Copy a caller's mapping, so that overrides do not change it."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                findings.append(
                    Finding(keys, f"has the key {shown(key)}, which is not a string; write the name of a field")
                )
        return {key: plain(item, (*keys, key), findings) for key, item in value.items() if isinstance(key, str)}
    if isinstance(value, list | tuple):
        return [plain(item, (*keys, index), findings) for index, item in enumerate(value)]
    return checked(value, keys, findings)


def checked(value: Any, keys: Keys, findings: list[Finding], place: Origin | None = None) -> Any:
    """Return the value; record what no field may contain."""
    if isinstance(value, str) and (variable := _VARIABLE.search(value)):
        findings.append(Finding(keys, _undecided(value, keys) or _expanded(variable.group()), place, of_value=True))
    if isinstance(value, float) and not math.isfinite(value):
        findings.append(Finding(keys, f"is {value}; write a finite number", place, of_value=True))
    return value


def _expanded(name: str) -> str:
    return f"contains {name}, but environment variables are not expanded; write the value, or set it with an override"


def _undecided(value: str, keys: Keys) -> str:
    """The message for a placeholder that `unishard translate` left, such as `${training.micro_batch_size}`; empty for
    other strings.
    """
    path = ".".join(map(str, keys))
    if value != f"${{{path}}}":
        return ""
    return (
        "needs a value: the config that this was translated from does not set it; write the value, or set it with "
        f"the override {path}=..."
    )
