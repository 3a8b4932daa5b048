"""Write what `--verify` found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

from unishard.config.describe import bare

if TYPE_CHECKING:
    from unishard.verify import Verification
    from unishard.verify.comparing import ComparedSetting

__all__ = ["write_verification"]

_COLUMNS = ("setting", "source", "written", "effective", "")
_LONGEST = 22


def write_verification(found: Verification, file: TextIO) -> None:
    """Write the table and the result to a stream."""
    rows = [_cells(row) for row in found.rows]
    if rows:
        widths = [max(len(row[at]) for row in (_COLUMNS, *rows)) for at in range(len(_COLUMNS))]
        for row in (_COLUMNS, *rows):
            file.write("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n")
    for line in _closing(found):
        file.write(f"{line}\n")


def _cells(row: ComparedSetting) -> tuple[str, ...]:
    result = "" if not row.differs else "reported" if row.reported else "NOT REPORTED"
    return (row.field, _shown(row.source), _shown(row.written), _shown(row.effective), result)


def _shown(value: Any) -> str:
    text = "-" if value is None else bare(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _closing(found: Verification) -> Iterator[str]:
    source, effective = found.source, found.effective
    if source.missing or source.refused:
        yield f"source: {source.refused or source.missing}; compared with what unishard reads in it"
    if effective.missing:
        yield f"not verified: {effective.missing}"
    elif effective.refused:
        undecided = "; decide what needs input first" if found.needs_input else ""
        yield f"not verified: {effective.consumer} refuses it ({effective.refused}){undecided}"
    else:
        count, hidden = sum(row.differs for row in found.rows), len(found.unreported)
        yield f"verified with {effective.consumer}: {len(found.rows)} settings, {count} differ, {hidden} of these unreported"
