"""Write what `unishard translate --verify` found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

from unishard.cli.wrapping import report_width, wrapped
from unishard.config.describe import bare

if TYPE_CHECKING:
    from unishard.formats.verify import Verification
    from unishard.formats.verify.comparing import ComparedSetting


def write_verification(verification: Verification, file: TextIO) -> None:
    """Write the settings and the result to a stream: what all agree on once, and what differs with each side's
    value.
    """
    width, longest = report_width(file), max((len(row.field) for row in verification.rows), default=0)
    for row in verification.rows:
        file.write(wrapped(f"{row.field.ljust(longest)}  {_said(row)}", width, hanging=" " * (longest + 2)) + "\n")
    for line in _closing(verification):
        file.write(wrapped(line, width, hanging="    ") + "\n")


def _said(row: ComparedSetting) -> str:
    written = "not written" if row.written is None else f"written {bare(row.written)}"
    if row.differs:
        result = "reported" if row.reported else "NOT REPORTED"
        return f"source {_shown(row.source)}, {written}, in effect {_shown(row.effective)}: {result}"
    if row.effective is None:
        return f"source {_shown(row.source)}, {written}"
    return bare(row.effective) if row.written == row.effective else f"{bare(row.effective)} ({written})"


def _shown(value: Any) -> str:
    return "-" if value is None else bare(value)


def _closing(verification: Verification) -> Iterator[str]:
    source, effective = verification.source, verification.effective
    if source.missing or source.refused:
        yield f"source: {source.refused or source.missing}; compared with what unishard reads in it"
    if effective.missing:
        yield f"not verified: {effective.missing}"
    elif effective.refused:
        undecided = "; decide what needs input first" if verification.needs_input else ""
        yield f"not verified: {effective.consumer} refuses it ({effective.refused}){undecided}"
    else:
        count, hidden = sum(row.differs for row in verification.rows), len(verification.unreported)
        yield (
            f"verified with {effective.consumer}: {len(verification.rows)} settings, {count} differ, {hidden} of these "
            "unreported"
        )
