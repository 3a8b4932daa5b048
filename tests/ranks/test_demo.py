"""The demo from end to end, and what it says when something is wrong."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from forking import completed, in_a_fork
from harness import run_script, until
from rich.console import Console

from unishard.errors import BackendError
from unishard.testing import run_ranks
from unishard.tools.demo import comparison, training
from unishard.tools.demo.comparison import run_demo
from unishard.tools.demo.curves import TrainingCurve
from unishard.tools.demo.training import DemoError

SCRIPT = Path(__file__).parents[2] / "examples" / "train_llama.py"


def test_both_engines_draw_the_same_curve(tmp_path: Path) -> None:
    done = completed(
        [sys.executable, "-m", "unishard", "demo", "--out", tmp_path, "--steps", "8"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    one, other = (TrainingCurve.read(tmp_path / f"{backend}.json") for backend in ("fsdp", "deepspeed"))
    assert (one.ranks, other.ranks, len(one.losses), len(other.losses)) == (2, 2, 8, 8)
    assert one.losses[-1] < one.losses[0] - 0.5
    assert one.losses == pytest.approx(other.losses, rel=1e-5, abs=0)
    assert one.grad_norms == pytest.approx(other.grad_norms, rel=1e-4, abs=0)
    assert len(one.peak_memory_bytes) == 2
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "backend: fsdp" in done.stdout
    assert "backend: deepspeed" in done.stdout
    assert "step 8/8" in done.stdout
    assert f"{one.losses[-1]:.6f}" in done.stdout
    assert "of the loss) at step" in done.stdout


def run_scripts(*calls: tuple[str, ...]) -> list[str]:
    """What the script prints for each list of arguments; in one process, since importing costs more than the rest."""
    printed = []
    for arguments in calls:
        with redirect_stdout(io.StringIO()) as out:
            run_script(SCRIPT, *arguments)
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
    one, other = (TrainingCurve.read(tmp_path / f"{backend}.json").losses for backend in ("fsdp", "deepspeed"))
    assert other == pytest.approx(one[2:], rel=1e-6)


def run(backend: str, losses: list[float]) -> TrainingCurve:
    return TrainingCurve(backend, 2, losses, [1.0] * len(losses), [0.1] * len(losses), [2**20, 2**20])


def stub(monkeypatch: pytest.MonkeyPatch, curves: dict[str, list[float]]) -> None:
    """The engines' part: a run that is over at once."""

    def train(backend: str, *_: Any, **__: Any) -> TrainingCurve:
        return run(backend, curves[backend])

    monkeypatch.setattr(comparison, "train", train)


@pytest.mark.parametrize("last", [3.0003, float("nan")])
def test_curves_that_part_are_an_error_that_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: float
) -> None:
    stub(monkeypatch, {"fsdp": [5.0, 4.0, 3.0], "deepspeed": [5.0, 4.0, last]})
    with pytest.raises(DemoError, match=f"at step 3 fsdp has loss 3.000000 and deepspeed has loss {last:.6f}"):
        run_demo(out=tmp_path, steps=3)
    assert (tmp_path / "loss.png").exists(), "the picture of what went wrong is kept"


def test_a_missing_package_is_named_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        comparison, "find_spec", lambda name: None if name in ("deepspeed", "matplotlib") else find_spec(name)
    )
    with pytest.raises(BackendError, match=r"needs deepspeed, matplotlib, .*pip install 'unishard\[demo\]'"):
        run_demo(out=tmp_path)
    assert not list(tmp_path.iterdir())


def failure(folder: Path, text: str) -> str:
    """The error of a run of another script on one rank."""
    (folder / "script.py").write_text(text, encoding="utf-8")
    training._find = lambda path: folder / "script.py"
    try:
        training.train("fsdp", folder / "fsdp.json", world_size=1, steps=1, console=Console(file=io.StringIO()))
    except DemoError as error:
        return str(error)
    return ""


def test_a_failing_run_is_told_with_its_own_last_lines(tmp_path: Path) -> None:
    message = in_a_fork(failure, tmp_path, "raise SystemExit('the reason why')")
    assert message.startswith(
        f"training on fsdp failed with exit code 1; its last lines (all are in {tmp_path / 'fsdp.log'}):"
    )
    assert message.endswith("the reason why"), "not torchrun's report of it"
    assert "ChildFailedError" in (tmp_path / "fsdp.log").read_text()


WAITING = """
import os, pathlib, time
pathlib.Path({folder!r}, f"pid{{os.environ['RANK']}}").write_text(str(os.getpid()))
print("step 1/9", flush=True)
time.sleep(600)
"""
STOPPED = """
import signal
from pathlib import Path
from unishard.cli import main
from unishard.tools.demo import training
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
training._find = lambda path: Path({script!r})
main()
"""


def stopped(folder: Path, number: signal.Signals) -> tuple[int, str]:
    """How a demo that gets a signal ends, and what it says."""
    script, demo, out = folder / "script.py", folder / "demo.py", folder / "out"
    script.write_text(WAITING.format(folder=str(folder)))
    demo.write_text(STOPPED.format(script=str(script)))
    command = [sys.executable, str(demo), "demo", "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert until(lambda: "step 1/9" in log(out)), log(out)
        written = [folder / f"pid{rank}" for rank in range(2)]
        assert until(lambda: all(path.exists() and path.read_text() for path in written))
        ranks = [int(path.read_text()) for path in written]
        assert [alive(rank) for rank in ranks] == [True, True]
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert until(lambda: not any(alive(rank) for rank in ranks))
    return process.returncode, said


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.deep),
        (signal.SIGINT, 130),
    ],
    ids=str,
)
def test_a_demo_that_is_stopped_ends_its_ranks_and_says_which_run_it_was(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    out = tmp_path / "out"
    said = (
        f"interrupted while training on fsdp: {out / 'fsdp.json'} is not written, the output so far is in "
        f"{out / 'fsdp.log'}\n"
    )
    assert in_a_fork(stopped, tmp_path, number) == (code, said)
    assert [path.name for path in out.iterdir()] == ["fsdp.log"]


def log(out: Path) -> str:
    return (out / "fsdp.log").read_text() if (out / "fsdp.log").exists() else ""


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_an_old_curve_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "fsdp.json").write_text("{}")
    message = in_a_fork(failure, tmp_path, "")
    assert re.search(r"ended without a readable .*fsdp\.json", message)


def test_a_missing_script_is_told_with_where_it_was_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DemoError, match=r"cannot find nothing.py, looked in .*examples, .*share/unishard"):
        training._find("examples/nothing.py")
