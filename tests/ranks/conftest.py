"""A folder for what ranks save; ends a run with the worst cells of the conformance suite."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

_CELL = re.compile(r"\[(?P<backend>[a-z0-9_]+)-(?P<cell>.*-(?P<precision>fp32|bf16|fp16)-\dranks)\]$")


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    worst: dict[tuple[str, str, str], tuple[float, str]] = {}
    for report in [*terminalreporter.stats.get("passed", ()), *terminalreporter.stats.get("failed", ())]:
        found = _CELL.search(report.nodeid)
        properties = dict(report.user_properties)
        deviation = properties.get("deviation")
        if found is None or deviation is None:
            continue
        for field in ("first_losses", "losses", "first_norm", "norms"):
            key = (
                found["backend"],
                found["precision"] + (" (declared gap)" if properties["declared gap"] else ""),
                field,
            )
            worst[key] = max(worst.get(key, (-1.0, "")), (deviation[field], found["cell"]))
    if worst:
        terminalreporter.section("worst cells: relative deviation from plain torch")
        for (backend, precision, field), (value, cell) in sorted(worst.items()):
            terminalreporter.write_line(f"{backend:10} {precision:19} {field:12} {value:8.1e}  {cell}")
