"""The demo from end to end, and the script that it trains."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from forking import completed, in_a_fork
from harness import run_script, until

from unishard.testing import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"


def curve(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def test_both_engines_draw_the_same_curve(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--out", str(tmp_path), "--steps", "8"]
    done = completed(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    one, other = (curve(tmp_path / f"{backend}.json") for backend in ("fsdp", "deepspeed"))
    assert (one["ranks"], other["ranks"], len(one["losses"]), len(other["losses"])) == (2, 2, 8, 8)
    assert one["losses"][-1] < one["losses"][0] - 0.5
    assert one["losses"] == pytest.approx(other["losses"], rel=1e-5, abs=0)
    assert one["grad_norms"] == pytest.approx(other["grad_norms"], rel=1e-4, abs=0)
    assert len(one["peak_memory_bytes"]) == 2
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "--set backend=fsdp " in done.stdout
    assert "--set backend=deepspeed " in done.stdout
    assert f"{one['losses'][-1]:.6f}" in done.stdout
    assert " of the loss, at step " in done.stdout
    assert "step 8/8" in done.stderr


@pytest.mark.parametrize("last", [3.0003, float("nan")])
def test_curves_that_part_fail_and_are_drawn(tmp_path: Path, last: float) -> None:
    code, said = in_a_fork(parted, tmp_path, last)
    assert code.startswith("the curves should agree within 1e-04 of the loss")
    assert "at step 3 of 3" in said
    assert (tmp_path / "loss.png").exists()


def parted(out: Path, last: float) -> tuple[str, str]:
    """How the demo ends whose runs give curves with another last loss."""
    sys.path.insert(0, str(EXAMPLES))
    import demo

    def train(backend: str, *_: Any) -> dict[str, Any]:
        losses = [5.0, 4.0, 3.0 if backend == "fsdp" else last]
        rest = {"step_seconds": [0.1] * 3, "peak_memory_bytes": [2**20] * 2, "ranks": 2}
        return {"backend": backend, "losses": losses, **rest}

    demo.train = train
    sys.argv = ["demo.py", "--out", str(out), "--steps", "3"]
    with redirect_stdout(io.StringIO()) as printed:
        try:
            demo.main()
        except SystemExit as end:
            return str(end.code), printed.getvalue()
    return "", printed.getvalue()


WAITING = """
import os, pathlib, time
pathlib.Path({folder!r}, f"pid{{os.environ['RANK']}}").write_text(str(os.getpid()))
time.sleep(600)
"""


def stopped(folder: Path) -> int:
    """How the demo ends that gets a signal while its ranks train; they must end with it."""
    (folder / "examples").mkdir()
    shutil.copy(EXAMPLES / "demo.py", folder / "examples")
    shutil.copytree(EXAMPLES.parent / "configs", folder / "configs")
    (folder / "examples" / "train_llama.py").write_text(WAITING.format(folder=str(folder)))
    command = [sys.executable, str(folder / "examples" / "demo.py"), "--out", str(folder / "out")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        written = [folder / f"pid{rank}" for rank in range(2)]
        assert until(lambda: all(path.exists() and path.read_text() for path in written))
        process.send_signal(signal.SIGTERM)
    assert until(lambda: not any(alive(int(path.read_text())) for path in written))
    return process.returncode


def test_a_demo_that_is_stopped_ends_its_ranks(tmp_path: Path) -> None:
    assert in_a_fork(stopped, tmp_path) == 128 + signal.SIGTERM


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def run_scripts(*calls: tuple[str, ...]) -> list[str]:
    """What the script prints for each list of arguments; in one process, since importing costs more than the rest."""
    printed = []
    for arguments in calls:
        with redirect_stdout(io.StringIO()) as out:
            run_script(EXAMPLES / "train_llama.py", *arguments)
        printed.append(out.getvalue())
    return printed


def test_the_script_goes_on_where_an_earlier_run_was_saved(tmp_path: Path) -> None:
    def arguments(backend: str, *overrides: str) -> tuple[str, ...]:
        given = [word for each in (f"backend={backend}", *overrides) for word in ("--set", each)]
        return ("--steps", "4", "--out", str(tmp_path / f"{backend}.json"), *given)

    saving = f"checkpoint.dir={tmp_path / 'run'}", "checkpoint.on_existing=resume"
    ((whole, again),) = run_ranks(
        1, run_scripts, arguments("fsdp", *saving, "checkpoint.every_steps=2"), arguments("fsdp", *saving)
    )
    assert "after 4 updates" in whole
    assert "holds a finished run" in again
    for newest in (tmp_path / "run").glob("step-*4"):
        shutil.rmtree(newest)
    run_ranks(1, run_scripts, arguments("deepspeed", *saving))
    one, other = (curve(tmp_path / f"{backend}.json")["losses"] for backend in ("fsdp", "deepspeed"))
    assert other == pytest.approx(one[2:], rel=1e-6)
