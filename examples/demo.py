"""Trains the same tiny Llama on both engines, with one word of the config changed, and compares the losses.

    make demo
    python examples/demo.py --out demo-out --ranks 2 --steps 60

It leaves `fsdp.json`, `deepspeed.json` and `loss.png` in the folder, and fails where the two curves differ.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from statistics import median

from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
ALLOWED = 1e-4
"""Of the loss, in fp32."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a tiny Llama on both engines.")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder for the results")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks, all on this machine")
    parser.add_argument("--steps", type=int, default=60, help="number of updates")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    args.out.mkdir(parents=True, exist_ok=True)
    fsdp, deepspeed = (train(backend, args.out, args.ranks, args.steps) for backend in ("fsdp", "deepspeed"))
    for run in (fsdp, deepspeed):
        memory = ", ".join(f"{size / 2**20:.0f}" for size in run["peak_memory_bytes"])
        print(
            f"{run['backend']:9}  loss {run['losses'][0]:.6f} -> {run['losses'][-1]:.6f}, "
            f"{1e3 * median(run['step_seconds']):.0f} ms a step, peak memory of each rank {memory} MiB"
        )
    gaps = [abs(a - b) / abs(a) for a, b in zip(fsdp["losses"], deepspeed["losses"], strict=True)]
    widest = max(range(len(gaps)), key=lambda step: math.inf if math.isnan(gaps[step]) else gaps[step])
    print(f"largest difference of the two curves: {gaps[widest]:.1e} of the loss, at step {widest + 1} of {args.steps}")
    draw(fsdp, deepspeed, gaps, args.out / "loss.png")
    print(f"curves: {args.out / 'loss.png'}")
    if not gaps[widest] <= ALLOWED:  # also where it is not a number
        sys.exit(f"the curves should agree within {ALLOWED:.0e} of the loss; please report it with the two JSON files")


def train(backend: str, out: Path, ranks: int, steps: int) -> dict:
    """Start the ranks with `unishard launch`; what the run noted."""
    result = out / f"{backend}.json"
    result.unlink(missing_ok=True)  # an earlier run's
    config = HERE.parent / "configs" / "llama_tiny.yaml"
    words = ["launch", config, "--processes-per-node", ranks, "--set", f"backend={backend}"]
    words = [str(word) for word in (*words, HERE / "train_llama.py", "--steps", steps, "--out", result)]
    print(f"$ unishard {shlex.join(words)}", flush=True)
    with subprocess.Popen([sys.executable, "-m", "unishard", *words]) as launcher:
        try:
            launcher.wait()
        except BaseException:
            launcher.terminate()  # it ends the ranks
            raise
    if launcher.returncode:
        sys.exit(launcher.returncode)
    return json.loads(result.read_text(encoding="utf-8"))


def draw(wide: dict, thin: dict, gaps: list[float], path: Path) -> None:
    """The curves on each other, the first wide and light, the second thin and dark; below, their difference."""
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    curves, differences = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    updates = range(1, len(gaps) + 1)
    curves.plot(updates, wide["losses"], color="#f4a261", linewidth=7, solid_capstyle="round", label=wide["backend"])
    curves.plot(updates, thin["losses"], color="#1d3557", linewidth=1.5, label=thin["backend"])
    curves.set_title(f"A tiny Llama on English text: one script, one config, {wide['ranks']} ranks", loc="left")
    curves.set_ylabel("training loss")
    curves.legend(frameon=False)
    differences.bar(updates, gaps, color="#1d3557", width=0.8)
    differences.set_ylabel("relative\ndifference")
    differences.set_xlabel("update")
    differences.xaxis.get_major_locator().set_params(integer=True)
    differences.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    differences.set_ylim(0, 1.25 * max(filter(math.isfinite, gaps), default=0) or 1e-7)
    for panel in (curves, differences):
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="#e5e5e5", linewidth=0.8)
        panel.set_axisbelow(True)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
