"""The private names of each engine, as a section of docs/engines.md; the rest of that page is written by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dev.pages.markdown import table
from unishard.contract.backend import Backend
from unishard.contract.private_api import CORE_PRIVATE_API, PrivateApi

_COLUMNS = ("Case", "Private names", "Run on", "Why", "Where a name is gone")


def private_names(backends: Sequence[Backend]) -> str:
    """A table of all cases that need private names, for unishard itself and for each engine."""
    tables = {"every engine": CORE_PRIVATE_API} | {backend.name: backend.private_api for backend in backends}
    return "\n\n".join(
        f"### Private names: {name}\n\n" + (table(_COLUMNS, map(_row, patches.values())) if patches else "None.")
        for name, patches in tables.items()
    )


def _row(patch: PrivateApi) -> tuple[str, ...]:
    case = f"**{patch.name}**: {patch.case.rstrip(',')}"
    run = patch.versions + (f"; {patch.package} does it itself from {patch.until} on" if patch.until else "")
    return (
        case,
        "<br>".join(_names(patch.names)),
        run,
        f"[source]({patch.link})",
        f"{patch.instead[:1].upper()}{patch.instead[1:]}.",
    )


def _names(names: Sequence[str]) -> Iterator[str]:
    """Names grouped by module, alternatives side by side."""
    by_module: dict[str, list[str]] = {}
    for name in names:
        module = name.partition(":")[0]
        shown = " or ".join(f"`{alternative.partition(':')[2]}`" for alternative in name.split(" or "))
        by_module.setdefault(module, []).append(shown)
    for module, shown_names in by_module.items():
        yield f"{module}: {', '.join(shown_names)}"
