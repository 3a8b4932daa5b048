"""Writes docs/models-tested.md from the records of `make models`."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from models import KINDS
from models.case import Case, Kind
from models.exporting import EQUAL
from models.runs import MORE, UPDATES, Run, runs_of
from unishard.contract.tolerances import TOLERANCES
from unishard.testing.cells import BACKENDS

__all__ = ["beyond", "page"]

Record = Mapping[str, Any]
_PARAMETERS = 1e-5
_FP32, _BF16 = TOLERANCES["fp32"], TOLERANCES["bf16"]
_BOUNDS = {
    "fp32": (_FP32.losses, _FP32.norms, _PARAMETERS),
    "bf16": (_BF16.first_losses, _BF16.first_norm, _BF16.losses, _BF16.norms),
}


def page(records: Sequence[Record]) -> str:
    """The page, as Markdown."""
    by_case: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_case[record["case"]].append(record)
    sections = [line for kind, first in _numbered() for line in _section(kind, first, by_case)]
    return "\n".join([_head(), *_summary(by_case), *sections]).rstrip() + "\n"


def _numbered() -> Iterator[tuple[Kind, int]]:
    """Each kind with the number of its first case."""
    first = 0
    for kind in KINDS:
        yield kind, first
        first += len(kind.cases)


def _head() -> str:
    packages = ", ".join(f"{name} {version(name).partition('+')[0]}" for name in ("torch", "deepspeed", "transformers"))
    return f"""# Models tested

Every model here is trained on {" and ".join(BACKENDS)} beside plain torch, which has a copy of the model for each rank in one process and
averages their gradients. Written by `make models`: Python {sys.version_info.major}.{sys.version_info.minor}, {packages}, 2 ranks, CPU,
gloo. The models of transformers are small ones of random weights. For each precision there are 6 runs:

- {UPDATES} updates with AdamW under `full_shard`, and under another strategy (they take turns), on each engine;
- {MORE} more updates from the checkpoint of each engine's `full_shard`, by the other engine under the other strategy.

A bf16 run has fp32 master weights, and so has plain torch beside it: it computes with a bf16 copy of the weights. An entry is the largest
deviation of all its runs, relative for losses and gradient norms, absolute for parameters:

- fp32: losses / norms / parameters, bounds {_figures(_BOUNDS["fp32"])};
- bf16: first loss / first norm / losses / norms, bounds {_figures(_BOUNDS["bf16"])}: a last digit of fp32 flips one bf16 rounding,
  and that grows;
- export: whether every file of an export from `full_shard` has the bytes that `save_pretrained` writes in plain torch.

The last column has the first sentence of the error where runs end with one, and where plain torch itself cannot compute in bf16. **Bold**
is what is beyond a bound, or an error that is not unishard's; where the cause is known, the last column has it.
"""


def _figures(figures: Sequence[float]) -> str:
    return " / ".join(f"{figure:.0e}" for figure in figures)


def _summary(by_case: Mapping[str, Sequence[Record]]) -> Iterator[str]:
    records = [record for each in by_case.values() for record in each]
    trained = [record for record in records if "losses" in record]
    exported = [record for record in trained if record.get("export")]
    refused = {case for case, each in by_case.items() if any("error" in record for record in each)}
    yield (
        f"{len(by_case)} of {sum(len(kind.cases) for kind in KINDS)} models, {len(trained)} runs: "
        f"{sum(beyond(record) is None for record in trained)} within the bounds. "
        f"{sum(record['export'] == EQUAL for record in exported)} of {len(exported)} exports are equal. "
        f"{len(refused)} models have runs that end with an error.\n"
    )


def beyond(record: Record) -> str | None:
    """What is wrong with a run: an error, or a figure beyond its bound."""
    if "losses" not in record:
        return str(record.get("error") or record["plain"])
    if record.get("export") not in (None, EQUAL):
        return f"export: {record['export']}"
    figures, bounds = _deviation([record], _precision(record)), _BOUNDS[_precision(record)]
    held = all(figure <= bound for figure, bound in zip(figures, bounds, strict=True))
    return None if held else f"{_figures(figures)}, bounds {_figures(bounds)}"


def _precision(record: Record) -> str:
    return "bf16" if " bf16" in record["run"] else "fp32"


def _deviation(records: Sequence[Record], precision: str) -> tuple[float, ...]:
    """The largest figures of some runs, as the page lists them for a precision."""
    losses, norms = (max(max(record[name]) for record in records) for name in ("losses", "norms"))
    if precision == "fp32":
        return losses, norms, max(record["parameters"] for record in records)
    started = [record for record in records if ", from" not in record["run"]]
    first = (max((record[name][0] for record in started), default=0.0) for name in ("losses", "norms"))
    return (*first, losses, norms)


def _section(kind: Kind, first: int, by_case: Mapping[str, Sequence[Record]]) -> Iterator[str]:
    yield f"## {kind.title}\n"
    yield "| Model | fp32 | bf16 | Export | Errors, causes |\n|---|---|---|---|---|"
    for number, case in enumerate(kind.cases, first):
        if not (records := by_case.get(case.name)):
            continue  # it was not played
        cells = (
            case.name,
            *(_cell(records, each) for each in _BOUNDS),
            _export(records),
            _errors(case, records, list(runs_of(number))),
        )
        yield f"| {' | '.join(cells)} |"
    yield ""


def _cell(records: Sequence[Record], precision: str) -> str:
    good = [record for record in records if "losses" in record and _precision(record) == precision]
    if not good:
        return ""
    figures = zip(_deviation(good, precision), _BOUNDS[precision], strict=True)
    return " / ".join(f"{figure:.0e}" if figure <= bound else f"**{figure:.0e}**" for figure, bound in figures)


def _export(records: Sequence[Record]) -> str:
    found = sorted({record["export"] for record in records if record.get("export")})
    return "; ".join(each if each == EQUAL else f"**{each}**" for each in found)


def _errors(case: Case, records: Sequence[Record], runs: Sequence[Run]) -> str:
    """Each message once, with the runs that end with it."""
    of = {str(run): run for run in runs}
    by_message: dict[str, list[Run]] = defaultdict(list)
    for record in records:
        if "plain" in record:
            by_message[f"plain torch: {_sentence(record['plain'])}"].append(of[record["run"]])
        elif "error" in record:
            text = _sentence(record["error"])
            by_message[text if record["ours"] else f"**{text}**"].append(of[record["run"]])
    started = [run for run in runs if not run.resumes]
    lines = [f"{_where(some, started)}{text}" for text, some in by_message.items()]
    return "<br>".join([*lines, *filter(None, [case.known])])


def _sentence(text: str) -> str:
    sentence = re.split(r"\n|(?<=[a-z)])\. ", text, maxsplit=1)[0]
    return sentence.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _where(some: Sequence[Run], runs: Sequence[Run]) -> str:
    """What the runs have in common that not all runs have."""
    common = []
    for place in range(3):
        values = {run[place] for run in some}
        if len(values) < len({run[place] for run in runs}):
            common.append(" and ".join(sorted(map(str, values))))
    if all(run.resumes for run in some):
        common.append("moved")
    return f"{', '.join(common)}: " if common else ""
