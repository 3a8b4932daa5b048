"""Imports both engines, trains 2 steps as a plain script and looks at how the process ends."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time

from benchmarks.gpu.report import Report
from benchmarks.gpu.training import BACKENDS

_SCRIPT = """
import json, sys
import unishard
from unishard.testing.models import batch, llama

cfg = unishard.Config(backend=sys.argv[1], sharding="full_shard", training={"micro_batch_size": 2})
losses = []
with unishard.prepare(llama(), cfg) as engine:
    for inputs in engine.batches([batch("llama", 2 * step, 2) for step in range(2)]):
        loss = engine(**inputs).loss
        engine.backward(loss)
        assert engine.step().updated
        losses.append(engine.mean(loss))
    device = str(engine.device)
print(json.dumps({"losses": losses, "device": device}))
"""

_WARNING = re.compile(r"Warning\b|^\[W|^\[rank\d+\]:\[W|\bWARNING\b")


def run(report: Report) -> None:
    for backend in BACKENDS:
        start = time.monotonic()
        done = subprocess.run([sys.executable, "-c", _SCRIPT, backend], capture_output=True, text=True, timeout=120)
        seconds = round(time.monotonic() - start, 1)
        ended = report.check(
            f"{backend}: exit code 0", done.returncode == 0, f"{done.returncode} after {seconds} s", seconds=seconds
        )
        if not ended:
            report.check(f"{backend}: trains 2 steps", False, done.stderr[-3000:])
            continue
        answer = json.loads(done.stdout.splitlines()[-1])
        trained = len(answer["losses"]) == 2 and all(math.isfinite(loss) for loss in answer["losses"])
        there = answer["device"].startswith(report.device)
        report.check(f"{backend}: trains 2 steps", trained and there, loss=answer["losses"][-1], place=answer["device"])
        lines = noise(done.stderr) + noise(
            done.stdout.rstrip().rpartition("\n")[0]
        )  # the last line of stdout is the answer
        report.check(
            f"{backend}: prints nothing but warnings",
            not lines,
            "\n".join(lines),
            warnings=done.stderr.count("Warning"),
        )


def noise(output: str) -> list[str]:
    """Lines that belong to no warning. One may go on for some lines, up to the line of code that Python prints,
    indented, below it.
    """
    lines, found, at = output.splitlines(), [], 0
    while at < len(lines):
        if _WARNING.search(lines[at]):
            code = next(
                (below for below in range(at + 1, min(at + 4, len(lines))) if lines[below].startswith("  ")), at
            )
            at = code + 1
            continue
        if lines[at].strip():
            found.append(lines[at])
        at += 1
    return found
