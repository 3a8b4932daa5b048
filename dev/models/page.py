"""docs/models-tested.md: which models are trained, and the ten that are farthest from plain torch."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from dev.models import CASES, KINDS
from dev.models.chunked import EQUAL as SAME_IN_CHUNKS
from dev.models.chunked import HEADLESS
from dev.models.chunked import REFUSED as REFUSED_IN_CHUNKS
from dev.models.exporting import EQUAL
from dev.models.figures import BOUNDS, shown
from dev.models.joint import EQUAL as SAME
from dev.models.joint import RANDOM, REFUSED
from dev.models.rows import ModelRow
from dev.models.runs import MORE, UPDATES
from dev.pages.markdown import table
from unishard.testing.cells import BACKENDS

__all__ = ["environment", "environment_of", "page", "summary"]

_WORST = 10
_TOP = """\
# Models tested

Every model here is trained on {backends} beside plain torch, which has a copy of the model for each rank in one process and
averages their gradients. Written by `make models`: {environment}.
The models of transformers are small ones of random weights. For each precision there are 6 runs:

- {updates} updates with AdamW under `full_shard`, and under another strategy (they take turns), on each engine;
- {more} more updates from the checkpoint of each engine's `full_shard`, by the other engine under the other strategy.

A bf16 run has fp32 master weights, and so has plain torch beside it: it computes with a bf16 copy of the weights. The figures of a model
are the largest deviations of all its runs, relative for losses and gradient norms, absolute for parameters:

- fp32: losses / norms / parameters, bounds {fp32};
- bf16: first loss / first norm / losses / norms, bounds {bf16}: a last digit of fp32 flips one bf16 rounding,
  and that grows;
- export: whether every file of an export from `full_shard` has the bytes that `save_pretrained` writes in plain torch.

[models-tested.csv](models-tested.csv) has them for every model, with the first sentence of each error that runs end with (of unishard, or
a failure of another), and of that with which plain torch itself ends in bf16; where the cause is known, the last column has it.
"""
_FARTHEST = """\
## The farthest

The {worst} models with the largest figures relative to their bounds. {beyond} models are beyond a bound, each with its cause.
"""
_SEQUENCES = """\
## Long sequences

With `parallel.sequence`, both ranks share each sample: {updates} updates in fp32 under `full_shard`, by `ulysses` on one engine and by
`allgather` on the other, which take turns. Plain torch has the whole batch in one process, and some samples have more labels than others.
Of {models} models, {equal} are within the bounds by both methods, {refused} are refused, and {random} is not compared, for it draws random
numbers. The column `sequence` of the table has the reasons. Equal are:
"""
_CHUNKED = """\
## The loss in chunks

With `training.loss_chunk_tokens`, loss and gradients of a micro-batch in one process, beside those of the plain loss. Of {models} models,
{equal} are equal, {headless} have no head that `get_output_embeddings` names, and {refused} are refused for what they do to their logits,
which the column `chunked` of the table has.
"""
_EXPERTS = """\
## Experts over ranks

With `parallel.expert`, each rank has half of the experts: {updates} updates in fp32 on each engine, under `full_shard` on one and
`shard_grad_op` on the other, which take turns. Of {models} models with experts, {equal} are within the bounds, and {refused} are refused; the
column `experts` of the table has the reasons. Equal are:
"""
_TENSOR = """\
## Layers over ranks

With `parallel.tensor`, each rank has a part of every layer, by the plan that the model comes with: {updates} updates in fp32 on each engine,
under the same strategies. Of {models} models with a plan, {equal} are within the bounds; the column `tensor` of the table has the reasons of
the others. Equal are:
"""


def environment() -> str:
    """What the models are trained with."""
    packages = ", ".join(f"{name} {version(name).partition('+')[0]}" for name in ("torch", "deepspeed", "transformers"))
    return f"Python {sys.version_info.major}.{sys.version_info.minor}, {packages}, 2 ranks, CPU, gloo"


def environment_of(path: Path) -> str:
    """The environment that a page has."""
    (said,) = re.findall(r"Written by `make models`: (.*)\.$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return str(said)


def summary(rows: Sequence[ModelRow]) -> str:
    """How many models there are, and what came of them."""
    exported = [row for row in rows if row.export]
    return (
        f"{len(rows)} of {len(CASES)} models: {sum(_share(row) <= 1 for row in rows)} within the bounds. "
        f"{sum(row.export == EQUAL for row in exported)} of {len(exported)} exports are equal. "
        f"{sum(bool(row.errors or row.failures) for row in rows)} models have runs that end with an error."
    )


def page(rows: Sequence[ModelRow], environment: str) -> str:
    """The page, as Markdown."""
    top = _TOP.format(
        backends=" and ".join(BACKENDS),
        environment=environment,
        updates=UPDATES,
        more=MORE,
        **{precision: shown(tuple(bounds.values())) for precision, bounds in BOUNDS.items()},
    )
    worst = sorted((row for row in rows if row.fp32 or row.bf16), key=_share, reverse=True)
    header = ("Model", "fp32", "bf16", "Times the bound", "Cause")
    blocks = [
        top,
        summary(rows),
        _FARTHEST.format(worst=_WORST, beyond=sum(_share(row) > 1 for row in worst)),
        table(header, map(_farthest, worst[:_WORST])),
        "## Models with runs that end with an error",
        _names([row for row in rows if row.errors or row.failures]),
        *_sequences(rows),
        _chunked(rows),
        *_of_some(_EXPERTS, {row: row.experts for row in rows if row.experts}),
        *_of_some(_TENSOR, {row: row.tensor for row in rows if row.tensor}),
        *_kinds(rows),
    ]
    return "\n\n".join(block.rstrip() for block in blocks) + "\n"


def _share(row: ModelRow) -> float:
    """How much of its bounds a model uses up, at most; infinity without figures."""
    parts = zip((row.fp32, row.bf16), BOUNDS.values(), strict=True)
    shares = (
        figure / bound
        for figures, bounds in parts
        if figures
        for figure, bound in zip(figures, bounds.values(), strict=True)
    )
    return max(shares, default=math.inf)


def _farthest(row: ModelRow) -> tuple[str, ...]:
    return row.name, shown(row.fp32), shown(row.bf16), f"{_share(row):.1f}", row.cause


def _sequences(rows: Sequence[ModelRow]) -> Iterator[str]:
    equal = [row for row in rows if row.sequence == SAME]
    yield _SEQUENCES.format(
        updates=UPDATES,
        models=len(rows),
        equal=len(equal),
        refused=sum(REFUSED in row.sequence for row in rows),
        random=sum(row.sequence == RANDOM for row in rows),
    )
    yield _names(equal)


def _chunked(rows: Sequence[ModelRow]) -> str:
    return _CHUNKED.format(
        models=len(rows),
        equal=sum(row.chunked == SAME_IN_CHUNKS for row in rows),
        headless=sum(row.chunked == HEADLESS for row in rows),
        refused=sum(row.chunked.startswith(REFUSED_IN_CHUNKS) for row in rows),
    )


def _of_some(text: str, outcomes: Mapping[ModelRow, str]) -> Iterator[str]:
    equal = [row for row, outcome in outcomes.items() if outcome == SAME]
    yield text.format(
        updates=UPDATES,
        models=len(outcomes),
        equal=len(equal),
        refused=sum(REFUSED in outcome for outcome in outcomes.values()),
    )
    yield _names(equal)


def _kinds(rows: Sequence[ModelRow]) -> Iterator[str]:
    for kind in KINDS:
        if trained := [row for row in rows if row.kind == kind.title]:
            yield f"## {kind.title}"
            yield _names(trained)


def _names(rows: Sequence[ModelRow]) -> str:
    return "; ".join(row.name for row in rows) or "None."
