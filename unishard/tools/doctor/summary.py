"""The summary of the report: which engines can train here, on which devices, and why the others cannot. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unishard.config.describe import count_of
from unishard.tools.doctor.check import Check, Status

_BACKEND = "backend "
_PROBE = "probe "


def summary(checks: Sequence[Check]) -> Iterator[str]:
    """One line for the engines that can train, one for each that cannot, and one for each other check that fails."""
    backends = [check for check in checks if check.name.startswith(_BACKEND)]
    ready = [check.name.removeprefix(_BACKEND) for check in backends if check.status is Status.OK]
    failing = [check for check in checks if check.status is Status.FAIL]
    if any(check.name in ("torch", "python") for check in failing):
        ready = []
    if ready:
        but = f", after {count_of(len(failing), 'repair')}" if failing else ""
        yield f"{' and '.join(ready)} can train here{_where(checks)}{but}"
    else:
        yield "nothing can train here"
    named = [check for check in backends if check.status is not Status.OK]
    for check in [*named, *(check for check in failing if check not in named)]:
        yield f"{check.name}: {check.found}" + (f"; {check.instead}" if check.instead else "")


def is_probe(check: Check) -> bool:
    """Whether a check is about private names of an engine, which only a workaround needs."""
    return check.name.startswith(_PROBE)


def _where(checks: Sequence[Check]) -> str:
    count = next((check.details.get("count") for check in checks if check.name == "accelerators"), None)
    if count is None:
        return ""
    return f" on {count_of(count, 'device')}" if count else " on the CPU"
