"""What `unishard tune` has found: the fastest trial, what to change, and why. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from textwrap import wrap
from typing import Any, NamedTuple

from unishard.config import Config
from unishard.config.describe import count_of
from unishard.errors import UnishardError
from unishard.tools.compare.measuring import Measured
from unishard.tools.compare.records import Course
from unishard.tools.compare.trials import Dropped, Trials

_WIDTH = 80
_NOISE = 1.02
"""A step time that is shorter by less than this factor is no reason to change a config."""
_MARK = "# unishard tune: "
_OPTIONS = "--backends, --strategies, or a larger training.micro_batch_size"
_SHOWN = 12
"""Reasons why trials were left out that are listed."""


class Tuned(NamedTuple):
    """The result."""

    measured: Sequence[Measured]
    """The config's own trial first."""
    dropped: Sequence[Dropped]
    best: Measured | None
    """None if fewer than two could be measured."""
    changes: tuple[str, ...]
    """As for `unishard set`; empty if the config stays as it is."""
    reason: str

    def as_json(self) -> dict[str, Any]:
        """All that is known."""
        return {
            "candidates": [row.as_json() for row in self.measured],
            "left_out": [{"candidate": str(drop.trial), "reason": drop.reason} for drop in self.dropped],
            "best": None if self.best is None else str(self.best.candidate),
            "changes": list(self.changes),
            "reason": self.reason,
        }


def expect_several(trials: Trials) -> None:
    """Check that there is something to compare.

    Raises:
        UnishardError: There is not; lists what was left out and why.
    """
    if len(trials.kept) > 1:
        return
    first = f"there is nothing to compare with the config as it is ({', '.join(map(str, trials.kept))})"
    if not trials.dropped:
        raise UnishardError(f"{first}; name other candidates: {_OPTIONS}")
    first += f": {len(trials.dropped)} left out; change what the reasons name, or name other candidates: {_OPTIONS}"
    raise UnishardError("\n".join([first, *_left_out(trials.dropped)]))


def tuned(cfg: Config, measured: Sequence[Measured], dropped: Sequence[Dropped]) -> Tuned:
    """Choose.

    Args:
        cfg: The config.
        measured: The config's own trial first.
        dropped: What was not measured.
    """
    rows = _of_the_same_samples(measured)
    timed = {row.candidate: seconds for row in rows if not row.failure and (seconds := row.median("step_seconds"))}
    if not timed:
        return Tuned(rows, dropped, None, (), f"no candidate could be measured; the config as it is: {rows[0].failure}")
    own = rows[0]
    if len(timed) < 2:
        reason = (
            f"only {next(iter(timed))} could be measured, which is no comparison; repair what failed, or name "
            "other candidates"
        )
        return Tuned(rows, dropped, None, (), f"{reason}: {_OPTIONS}")
    best = min((row for row in rows if row.candidate in timed), key=lambda row: timed[row.candidate])
    count = f"the fastest of {len(timed)} that were measured"
    if own.failure:
        reason = (
            f"{best.candidate}: {timed[best.candidate]:.4g} s a step, {count}; the config as it is fails: {own.failure}"
        )
        return Tuned(rows, dropped, best, tuple(best.candidate.changes(cfg)), reason)
    faster = timed[own.candidate] / timed[best.candidate]
    if faster < _NOISE:
        near = "" if best is own else f"; {best.candidate} is faster by only {faster - 1:.1%}"
        reason = f"{own.candidate}, as it is: {timed[own.candidate]:.4g} s a step, {count}{near}"
        return Tuned(rows, dropped, own, (), reason)
    before = f"{faster:.2f} x as fast as before ({own.candidate}: {timed[own.candidate]:.4g} s)"
    reason = f"{best.candidate}: {timed[best.candidate]:.4g} s a step, {before}, {count}"
    return Tuned(rows, dropped, best, tuple(best.candidate.changes(cfg)), reason)


def _of_the_same_samples(measured: Sequence[Measured]) -> list[Measured]:
    """The rows; those whose updates took other samples than the first one's have failed."""
    expected: int | None = None
    rows: list[Measured] = []
    for row in measured:
        samples = (
            None if row.failure else next((each for each in Course.of(row.records).samples if each is not None), None)
        )
        expected = samples if expected is None else expected
        if samples is not None and samples != expected:
            what = f"an update took {samples} samples, not {expected}"
            row = replace(row, failure=f"{what}; let the script take its batch size from cfg.training.micro_batch_size")
        rows.append(row)
    return rows


def lines_of(found: Tuned) -> Iterator[str]:
    """The table, what was left out, and the result, in 80 columns."""
    unit = "tokens/s" if any(row.median("tokens_per_second") for row in found.measured) else "samples/s"
    yield f"{'activation_checkpointing, micro-batch x accumulation':<55}{'step s':>8}{unit:>10}{'GiB':>7}"
    for row in found.measured:
        if row.failure:
            yield from wrap(f"{row.candidate}: failed: {row.failure}", _WIDTH, subsequent_indent="  ")
            continue
        rate = row.median("tokens_per_second" if unit == "tokens/s" else "samples_per_second")
        cells = (row.median("step_seconds"), ".4g", 8), (rate, ",.0f", 10), (row.memory_gib, ".2f", 7)
        line = "".join(f"{'-' if value is None else format(value, form):>{width}}" for value, form, width in cells)
        yield f"{'* ' if row is found.best else '  '}{row.candidate!s:<53}{line}"
    if found.dropped:
        yield ""
        yield f"left out: {len(found.dropped)}"
        yield from _left_out(found.dropped)
    yield ""
    yield from wrap(f"{'best' if found.best else 'no result'}: {found.reason}", _WIDTH, subsequent_indent="  ")
    yield from (f"  {change.replace('=', ': ', 1)}" for change in found.changes)


def _left_out(dropped: Sequence[Dropped]) -> Iterator[str]:
    """What was not measured, by reason; of those that do not fit, the smallest."""
    groups: dict[str, list[Dropped]] = {}
    for drop in sorted(dropped, key=lambda each: each.nbytes):
        groups.setdefault("does not fit" if drop.nbytes else drop.reason, []).append(drop)
    for first, *others in list(groups.values())[:_SHOWN]:
        more = f" and {count_of(len(others), 'larger one' if first.nbytes else 'other')}" if others else ""
        yield from wrap(f"{first.trial}{more}: {first.reason}", _WIDTH, initial_indent="  ", subsequent_indent="    ")
    if len(groups) > _SHOWN:
        left = sum(map(len, list(groups.values())[_SHOWN:]))
        yield f"  and {count_of(left, 'other')} for {count_of(len(groups) - _SHOWN, 'more reason')}"


def comment_of(found: Tuned, ranks: int, steps: int) -> list[str]:
    """The reasons as comment lines of a YAML file.

    Args:
        found: The result.
        ranks: On how many it was measured.
        steps: Optimizer steps of each run.
    """
    said = (
        f"{found.reason}; {count_of(ranks, 'rank')}, {count_of(steps, 'step')} each; {len(found.dropped)} left out "
        "by the plan"
    )
    return wrap(said, 120, initial_indent=_MARK, subsequent_indent="#   ")


def with_comment(text: str, lines: Sequence[str]) -> str:
    """The text of a YAML file with these comment lines at its beginning, instead of those of an earlier time."""
    end = "\r\n" if "\r\n" in text else "\n"
    old = text.splitlines(keepends=True)
    start = next((at for at, line in enumerate(old) if line.startswith(_MARK)), None)
    if start is not None:
        stop = start + 1
        while stop < len(old) and old[stop].startswith("#   "):
            stop += 1
        del old[start:stop]
    first = 1 if old and old[0].startswith("# yaml-language-server:") else 0  # editors look for it in the first line
    return "".join([*old[:first], *(line + end for line in lines), *old[first:]])
