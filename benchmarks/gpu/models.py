"""Trains every model of docs/models-tested.md on the card: both engines beside plain torch, one rank.

The cases are those of `make models`, in dev/models. They are divided among processes; one that ends, as after
an error that leaves the device unusable, is followed by another that takes up the rest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.gpu.report import Report
from benchmarks.gpu.training import BACKENDS, full_size
from unishard.testing import RankFailure, run_ranks

_BESIDE = 4
"""Processes at a time on a GPU."""
BOUNDS = {"fp32": (1e-5, 1e-4), "bf16": (5e-3, 2e-2)}
"""Of losses and norms, relative. In fp32 ten times those of `make models`: kernels of a GPU that add with atomic
operations give other last digits each time."""
_UPDATES = 3
_LIMIT = 500.0
_FEW = ("llama", "mixtral")

Record = dict[str, Any]


def run(report: Report) -> None:
    from dev.models import CASES

    names = list(CASES) if full_size(report.device) else list(_FEW)
    beside = _BESIDE if full_size(report.device) else 1
    with TemporaryDirectory(prefix="models-") as folder, ThreadPoolExecutor(beside) as pool:
        parts = [names[turn::beside] for turn in range(beside)]
        work = [
            pool.submit(played, part, report.device, Path(folder, f"{turn}.jsonl")) for turn, part in enumerate(parts)
        ]
        for record in sorted(
            (record for each in work for record in each.result()), key=lambda r: names.index(r["case"])
        ):
            judge(report, record)


def judge(report: Report, record: Record) -> None:
    """A check for a model, an engine and a precision."""
    name = f"{record['case']}, {record['run']}"
    if "plain" in record:
        report.unsupported(name, f"plain torch: {record['plain']}")
    elif record.get("refused"):
        report.unsupported(name, record["error"])
    elif "error" in record:
        report.check(name, False, record["error"])
    else:
        losses, norms = record["losses"], record["norms"]
        bounds = BOUNDS[record["precision"]]
        close = losses <= bounds[0] and norms <= bounds[1]  # False for NaN
        detail = f"losses {losses:.0e}, norms {norms:.0e}" + (
            "" if close else f"; at most {bounds[0]:g}, {bounds[1]:g}"
        )
        report.check(name, close, detail, losses=losses, norms=norms)


def played(names: Sequence[str], device: str, path: Path) -> list[Record]:
    """What came of each run of these cases."""
    todo, records = list(names), []
    while todo:
        path.write_text("")
        why = "ended without a word"
        try:
            run_ranks(1, play, todo, device, str(path), timeout=_LIMIT)
        except RankFailure as failure:
            why = str(failure)
        found = [json.loads(line) for line in path.read_text().splitlines()]
        records += found
        done = {record["case"] for record in found if record["run"] == "end"}
        left = [name for name in todo if name not in done]
        if left:
            records.append({"case": left[0], "run": "process", "error": why})
        todo = left[1:]
    return [record for record in records if record["run"] != "end"]


def play(names: Sequence[str], device: str, path: str) -> None:
    """Play cases and append what came of each run to a file."""
    import logging
    import warnings

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    with open(path, "a", encoding="utf-8", buffering=1) as file:
        for name in names:
            for record in runs_of(name, device):
                file.write(json.dumps({"case": name} | record) + "\n")
            file.write(json.dumps({"case": name, "run": "end"}) + "\n")


def runs_of(name: str, device: str) -> Iterator[Record]:
    """Both precisions on both engines, beside one run of plain torch."""
    import unishard
    from dev.models import CASES
    from dev.models.oracle import reference
    from dev.models.runs import PRECISIONS

    for precision in PRECISIONS:
        try:
            expected = reference(CASES[name], precision, world=1, device=device)
        except Exception as error:  # whatever the model's own code raises
            yield {"run": precision, "plain": f"{type(error).__name__}: {error}"}
            continue
        for backend in BACKENDS:
            run = {"run": f"{backend} {precision}", "precision": precision}
            try:
                yield run | trained(name, backend, precision, expected, device)
            except Exception as error:
                refused = isinstance(error, unishard.UnishardError)
                yield run | {"error": f"{type(error).__name__}: {error}", "refused": refused}


def trained(name: str, backend: str, precision: str, expected: Any, device: str) -> Record:
    """How far losses and norms of a run are from those of plain torch."""
    import unishard
    from dev.models import CASES
    from dev.models.case import micro_batch
    from dev.models.runs import Run, config_of

    case = CASES[name]
    losses, norms = [], []
    with unishard.prepare(case.build(), config_of(case, Run(backend, "full_shard", precision))) as engine:
        for update in range(_UPDATES):
            if case.before is not None:
                case.before(engine.module, update)
            loss = case.loss(engine, micro_batch(case, update, 0, 1, device))
            engine.backward(loss)
            losses.append(engine.mean(loss))
            norms.append(float(engine.step().grad_norm))
    return {"losses": furthest(losses, expected.losses), "norms": furthest(norms, expected.norms)}


def furthest(found: Sequence[float], right: Sequence[float]) -> float:
    """The largest relative distance; the first of two lists may end before the other."""
    far = [abs(one - other) / max(abs(other), 1e-12) for one, other in zip(found, right, strict=False)]
    return next((each for each in far if each != each), max(far))
