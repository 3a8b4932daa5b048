"""Whether two runs agree, and what to say where they do not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

from unishard.config import Config
from unishard.config.nested import flat, is_within
from unishard.contract.tolerances import TOLERANCES
from unishard.errors import BackendError, ConfigError, Problem
from unishard.tools.compare import modules
from unishard.tools.compare import records as logged
from unishard.tools.compare.modules import Located, module_lines

# -- Golden files: what a run has given at each step, and the config that decided it ---------------

_AROUND = ("launch", "logging", "profile", "checkpoint", "backend", "sharding", "communication", "strict")
"""Sections that do not change what is trained."""
_LARGEST_FILE = 2**28
"""Bytes of a golden file; a line has about 300."""


class ComparedRun(NamedTuple):
    """One side of a comparison."""

    name: str
    course: logged.Course
    facts: Mapping[str, Any]
    """The fields of the config that decide what is trained; empty where they are not known."""


def facts_of(cfg: Config) -> dict[str, Any]:
    """The fields that decide what is trained, by their paths."""
    dumped = cfg.model_dump(mode="json")
    return dict(flat({name: section for name, section in dumped.items() if name not in _AROUND}))


def golden_text(records: Sequence[logged.Record], cfg: Config, modules: str = "") -> str:
    """A golden file: a line with the config, then one for each step, then those of its modules.

    Args:
        records: The steps.
        cfg: The config.
        modules: The text of `modules.jsonl`, if modules were measured.
    """
    course = logged.Course.of(records)
    lines: list[dict[str, Any]] = [{"unishard_golden": 1, "config": facts_of(cfg)}]
    rows = zip(course.steps, course.losses, course.norms, course.lrs, course.samples, strict=True)
    lines += [
        {"step": step, "loss": loss, "grad_norm": norm, "lr": lr, "samples": samples}
        for step, loss, norm, lr, samples in rows
    ]
    return "".join(json.dumps(line) + "\n" for line in lines) + module_lines(modules)


def read_golden(path: Path) -> ComparedRun:
    """Read a golden file, or a `log.jsonl` of a run.

    Raises:
        ConfigError: It has no losses.
    """
    try:
        size = path.stat().st_size
    except OSError as error:
        raise ConfigError(
            [Problem("", f"cannot be opened ({error.strerror}); name a golden file, or a log.jsonl", str(path))]
        ) from None
    if size > _LARGEST_FILE or not path.is_file():
        raise ConfigError(
            [Problem("", f"is no file of at most {_LARGEST_FILE} bytes; name a golden file, or a log.jsonl", str(path))]
        )
    text = path.read_text(encoding="utf-8", errors="replace")
    records = logged.records_in(text)
    if not records:
        what = (
            'has no losses; write it with --write-golden, or name a log.jsonl: lines such as {"step": 1, "loss": 2.5}'
        )
        raise ConfigError([Problem("", what, str(path))])
    return ComparedRun(path.name, logged.Course.of(records), _config_in(text))


def _config_in(text: str) -> dict[str, Any]:
    try:
        first = json.loads(text.splitlines()[0])
    except (ValueError, RecursionError):
        return {}
    found = first.get("config") if isinstance(first, dict) else None
    return found if isinstance(found, dict) else {}


# -- Why two runs differ, found from how their curves differ and from their configs. Pure ----------
# The first loss and the first norm are of the same weights, so what differs there is the data, the weights, the dtype,
# or the scale of the loss. What is the same there and differs later is the update: learning rate, clipping, weight
# decay, the optimizer's other settings.

_SLIGHT = 0.02
"""A relative difference that another dtype can make in a first loss or norm."""
_SUDDEN = 0.05
"""A relative difference of a later loss that one update does not make."""
_FAINT = 0.02
"""The part of clipping's first effect on the same data below which a difference has another cause."""
_FIELDS = {
    "accumulation": ("training.gradient_accumulation_steps", "training.micro_batch_size", "training.global_batch_size"),
    "seed": ("training.seed",),
    "dtype": ("precision",),
    "clipping": ("training.gradient_clipping",),
    "learning rate": ("optimizer.lr", "scheduler"),
    "weight decay": ("optimizer.weight_decay",),
    "optimizer": ("optimizer",),
}
"""The fields behind each cause, the more special ones first."""


class LikelyCause(NamedTuple):
    """One explanation."""

    name: str
    why: str


class _Pair(NamedTuple):
    found: ComparedRun
    expected: ComparedRun
    at: logged.Divergence

    @property
    def first(self) -> tuple[int, int]:
        """Positions of the first common step."""
        step = next(step for step in self.found.course.steps if step in self.expected.course.steps)
        return self.found.course.steps.index(step), self.expected.course.steps.index(step)

    def ratio(self, values: str) -> float:
        """Of the first values; NaN where one is missing or zero."""
        one, other = (
            getattr(run.course, values)[place]
            for run, place in zip((self.found, self.expected), self.first, strict=True)
        )
        return one / other if one and other else math.nan


def causes_of(found: ComparedRun, expected: ComparedRun, at: logged.Divergence) -> list[LikelyCause]:
    """The explanations that agree with what is known, the likeliest first.

    Args:
        found: The run.
        expected: What it should have given.
        at: Their first difference.
    """
    pair = _Pair(found, expected, at)
    by_curve = [cause for sign in _SIGNS if (cause := sign(pair)) is not None]
    by_config = list(_configured(pair))
    # A field that differs and explains the curve comes first, then any field that differs.
    named = [cause.name for cause in by_curve]
    by_config.sort(key=lambda cause: named.index(cause.name) if cause.name in named else len(named))
    known = {cause.name for cause in by_config}
    return [*by_config, *(cause for cause in by_curve if cause.name not in known)] or [
        LikelyCause("update", f"the update before step {at.step} differs, and no sign says how")
    ]


def _configured(pair: _Pair) -> Iterator[LikelyCause]:
    told: set[str] = set()
    for name, prefixes in _FIELDS.items():
        for path, value in pair.found.facts.items():
            known = is_within(path, prefixes) and path not in told and path in pair.expected.facts
            if known and value != pair.expected.facts[path]:
                told.add(path)
                yield LikelyCause(
                    name,
                    f"{path} is {_shown(value)} in {pair.found.name}, {_shown(pair.expected.facts[path])} in "
                    f"{pair.expected.name}",
                )


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)


# -- signs: each says its cause, or None -----------------------------------------------------------


def _accumulation(pair: _Pair) -> LikelyCause | None:
    one, other = (run.course.samples[place] for run, place in zip((pair.found, pair.expected), pair.first, strict=True))
    if one is None or other is None or abs(one - other) < 0.5:
        return None
    return LikelyCause(
        "accumulation", f"an update takes {one} samples in {pair.found.name}, {other} in {pair.expected.name}"
    )


def _scale(pair: _Pair) -> LikelyCause | None:
    """The first norm is a multiple, and the first loss the same multiple or equal."""
    loss, norm = pair.ratio("losses"), pair.ratio("norms")
    if not abs(norm - 1) > _SLIGHT or not (abs(loss / norm - 1) < 1e-3 or abs(loss - 1) < 1e-3):
        return None
    what = "loss and norm are both" if abs(loss - 1) > _SLIGHT else "the loss agrees, but its gradients are"
    return LikelyCause(
        "scale",
        f"{what} {norm:.4g} times those expected: a loss that is divided twice or not at all, or a sum for a mean",
    )


def _dtype(pair: _Pair) -> LikelyCause | None:
    loss, norm = abs(pair.ratio("losses") - 1), abs(pair.ratio("norms") - 1)
    if _at_start(pair) and max(loss, 0 if math.isnan(norm) else norm) <= _SLIGHT:
        return LikelyCause(
            "dtype", f"the first values differ, but by only {pair.at.relative:.0e}: precision, or another kernel"
        )
    return None


def _data_order(pair: _Pair) -> LikelyCause | None:
    if _scale(pair) or _accumulation(pair) or _dtype(pair):
        return None
    if _at_start(pair):
        return LikelyCause(
            "data order", "the first values differ much: another order of the data, or other initial weights (seed)"
        )
    if pair.at.name == "loss" and pair.at.relative > _SUDDEN and not _rate(pair) and not _clipping(pair):
        return LikelyCause(
            "data order", f"all agrees before step {pair.at.step}, where the loss jumps: other data from there"
        )
    return None


def _rate(pair: _Pair) -> LikelyCause | None:
    """The learning rate differs no later than what it explains."""
    other = dict(zip(pair.expected.course.steps, pair.expected.course.lrs, strict=True))
    for step, rate in zip(pair.found.course.steps, pair.found.course.lrs, strict=True):
        if step <= pair.at.step and other.get(step) is not None and logged.relative(rate, other[step]) > 1e-6:
            return LikelyCause(
                "learning rate",
                f"lr at step {step} is {rate} in {pair.found.name}, {other[step]} in {pair.expected.name}",
            )
    return None


def _clipping(pair: _Pair) -> LikelyCause | None:
    """Losses agree until an update whose norm is above the limit."""
    limits = [run.facts.get("training.gradient_clipping") for run in (pair.found, pair.expected)]
    limit = min((limit for limit in limits if limit is not None), default=None)
    if limit is None or _at_start(pair) or _rate(pair):
        return None
    norms = [
        (step, norm)
        for step, norm in zip(pair.expected.course.steps, pair.expected.course.norms, strict=True)
        if norm is not None
    ]
    above, norm = next(((step, norm) for step, norm in norms if norm > limit), (None, 0.0))
    if (
        above is None or not above < pair.at.step <= above + 2
    ):  # Adam's first update does not depend on the gradients' scale
        return None
    if pair.found.facts.get("optimizer.name") == "sgd" and _less_than_clipping(pair, above, norm, limit):
        return None
    return LikelyCause("clipping", f"all agrees until step {above}, whose norm is the first above the limit {limit}")


def _less_than_clipping(pair: _Pair, step: int, norm: float, limit: float) -> bool:
    """Whether a loss differs by much less than clipping this norm changes it: lr x (norm - limit) x norm, for the same
    data.
    """
    rate = dict(zip(pair.expected.course.steps, pair.expected.course.lrs, strict=True)).get(step)
    known = rate is not None and pair.at.name == "loss" and pair.at.found is not None and pair.at.expected is not None
    return known and abs(pair.at.found - pair.at.expected) < _FAINT * rate * (norm - limit) * norm  # type: ignore[operator]


def _decay(pair: _Pair) -> LikelyCause | None:
    if _at_start(pair) or _rate(pair) or pair.at.relative > _SUDDEN:
        return None
    return LikelyCause(
        "weight decay",
        f"the first values agree and step {pair.at.step} drifts: weight decay, or the optimizer's options",
    )


def _at_start(pair: _Pair) -> bool:
    """Whether they differ before any update."""
    return pair.at.step == pair.found.course.steps[pair.first[0]] and pair.at.name != "lr"


_SIGNS: tuple[Callable[[_Pair], LikelyCause | None], ...] = (
    _accumulation,
    _scale,
    _dtype,
    _rate,
    _clipping,
    _data_order,
    _decay,
)
"""In the order of how much each proves."""


_WIDTH = 80


class Verdict(NamedTuple):
    """The result of one comparison."""

    found: ComparedRun
    expected: ComparedRun
    distance: logged.Distance
    at: logged.Divergence | None
    """The first difference; None if they agree."""
    causes: list[LikelyCause]
    located: Located = Located()
    """The first module that differs."""

    @property
    def same(self) -> bool:
        """Whether all common steps agree within the tolerances."""
        return self.at is None

    def as_json(self) -> dict[str, Any]:
        """All that is known."""
        return {
            "run": self.found.name,
            "expected": self.expected.name,
            "same": self.same,
            "distance": self.distance._asdict(),
            "first_difference": None if self.at is None else self.at._asdict(),
            "causes": [cause._asdict() for cause in self.causes],
            "first_module": None if self.located.first is None else self.located.first._asdict(),
            "notes": list(self.located.notes),
        }


def verdict_of(found: ComparedRun, expected: ComparedRun, compute: str) -> Verdict:
    """Compare two runs.

    Args:
        found: The run.
        expected: What it should have given.
        compute: `precision.compute`, which decides the tolerances.

    Raises:
        BackendError: They have no step in common.
    """
    distance = logged.distance_to(found.course, expected.course)
    if not distance.steps:
        raise BackendError(
            f"{found.name} and {expected.name} have no step in common; write the golden file with at least as many "
            "--steps"
        )
    at = logged.first_divergence(found.course, expected.course, TOLERANCES[compute])
    return Verdict(found, expected, distance, at, [] if at is None else causes_of(found, expected, at))


def lines_of(verdict: Verdict) -> Iterator[str]:
    """A verdict in 80 columns."""
    distance, at = verdict.distance, verdict.at
    names = f"{verdict.found.name} and {verdict.expected.name}"
    if at is None:
        norms = "" if distance.norm is None else f", of norms {distance.norm:.1e}"
        far = f"the largest relative difference of losses is {distance.loss:.1e}{norms}"
        yield from wrap(f"same: {names} in {distance.steps} steps; {far}", _WIDTH, subsequent_indent="  ")
        return
    values = (
        f"{at.name} is {at.found}, not {at.expected} (relative difference {at.relative:.1e}, allowed {at.allowed:.0e})"
    )
    yield from wrap(f"different: {names} at step {at.step}: {values}", _WIDTH, subsequent_indent="  ")
    for word, cause in zip(("likely cause", *["or"] * len(verdict.causes)), verdict.causes, strict=False):
        yield from wrap(f"{word}: {cause.name}: {cause.why}", _WIDTH, subsequent_indent="  ")
    for line in modules.lines_of(verdict.located):
        yield from wrap(line, _WIDTH, subsequent_indent="  ")
