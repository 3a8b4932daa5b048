"""What the progress of a loop shows, with and without a terminal, and what it costs."""

from __future__ import annotations

import io
import re
import sys
import time

import pytest
import torch
from rich.console import Console

from unishard.contract.results import Step
from unishard.observe import progress
from unishard.observe.progress import Progress

CPU = torch.device("cpu")
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f\x1b]")


def step(updated: bool = True, *, norm: float = 1.5, skipped: bool = False) -> Step:
    return Step(updated=updated, grad_norm=norm if updated or skipped else None, lr=3e-4, skipped=skipped)


def loop(bar: Progress, losses: list[float], window: int) -> None:
    for number, loss in enumerate(losses, 1):
        bar.record_batch({"input_ids": torch.zeros(2, 8, dtype=torch.long)})
        bar.on_loss(torch.tensor(loss))
        if number % window == 0 or number == len(losses):
            bar.on_step(step())
    bar.close()


def shown(losses: list[float], window: int, *, terminal: bool = False, width: int = 200) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=width, _environ={"TERM": "xterm"})
    loop(Progress(-(-len(losses) // window), CPU, console=console), losses, window)
    return file.getvalue()


def test_counts_updates_not_micro_batches() -> None:
    lines = shown([4.0] * 7, 2).splitlines()
    assert lines[0].startswith("step 1/4  ")
    assert lines[-1].startswith("step 4/")


def test_loss_is_the_mean_of_the_window() -> None:
    lines = shown([4.0, 2.0, 1.0, 2.0], 2).splitlines()
    assert "loss 3.0000" in lines[0]
    assert "loss 1.5000" in lines[-1]
    assert "lr 3.00e-04" in lines[0]
    assert "norm 1.5" in lines[0]
    assert "tokens/s" in lines[0]
    assert re.search(r"\d+ MiB|[\d.]+ GiB", lines[0])
    assert re.search(r"left \d+:\d\d", lines[0])


def test_losses_of_a_dropped_window_are_not_in_the_next_ones_mean() -> None:
    file = io.StringIO()
    bar = Progress(2, CPU, console=Console(file=file, width=200, _environ={"TERM": "xterm"}))
    bar.on_loss(torch.tensor(100.0))
    bar.on_discard()
    for _ in range(2):
        bar.on_loss(torch.tensor(2.0))
    bar.on_step(step())
    bar.close()
    assert "loss 2.0000" in file.getvalue()


def test_plain_lines_are_few_and_free_of_control_characters() -> None:
    text = shown([3.0] * 500, 1)
    assert not CONTROL.search(text)
    assert text.count("\n") == 2  # the first update and the last: the loop is shorter than the interval of the lines


def test_plain_lines_come_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr(progress.time, "perf_counter", lambda: float(next(clock)))
    numbers = [int(line.split("/")[0].removeprefix("step ")) for line in shown([3.0] * 10, 1).splitlines()]
    assert numbers == [1, 4, 7, 10]  # every 6 of the clock's seconds, the first multiple of 2 above 5


def test_terminal_draws_a_bar_in_place() -> None:
    text = shown([4.0, 2.0], 1, terminal=True)
    assert "2/2" in text
    assert "loss 2.0000" in text
    assert "\x1b[?25l" in text, "the cursor is hidden while the bar is drawn"
    assert text.count("\x1b[?25h") == 1, "and shown again by close"


def test_a_narrow_terminal_keeps_what_matters_on_one_line() -> None:
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown([4.0, 2.0], 1, terminal=True, width=60))
    assert "step 2/2  loss 2.0000  left 0:00" in text
    assert all(len(line) <= 60 for line in re.split(r"[\r\n]", text))
    assert text.count("\n") == 1


def test_a_bar_leaves_redirected_output_alone(capsys: pytest.CaptureFixture[str]) -> None:
    bar = Progress(1, CPU, console=Console(file=io.StringIO(), force_terminal=True))
    sys.stdout.write("a result\n")
    bar.close()
    assert capsys.readouterr().out == "a result\n"


def test_an_unknown_length_has_no_total() -> None:
    file = io.StringIO()
    bar = Progress(None, CPU, console=Console(file=file))
    bar.record_batch([torch.zeros(3, 5)])
    bar.on_loss(torch.tensor(1.0))
    bar.on_step(step())
    bar.close()
    assert file.getvalue().startswith("step 1  loss 1.0000")
    assert "samples/s" in file.getvalue()
    assert "left" not in file.getvalue()


def test_a_skipped_step_is_told() -> None:
    file = io.StringIO()
    bar = Progress(1, CPU, console=Console(file=file))
    bar.on_loss(torch.tensor(float("inf")))
    bar.on_step(step(updated=False, norm=float("inf"), skipped=True))
    bar.close()
    assert "norm inf (skipped)" in file.getvalue()


def test_throughput_counts_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0, 10.0, 10.0])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
    assert "  1.6 tokens/s" in shown([1.0], 1)  # 16 in 10 s


def test_interrupted_before_the_first_update_shows_nothing() -> None:
    file = io.StringIO()
    bar = Progress(1, CPU, console=Console(file=file))
    bar.record_batch({"input_ids": torch.zeros(2, 8)})
    bar.close()
    assert file.getvalue() == ""


def test_recording_costs_microseconds() -> None:
    bar = Progress(20_000, CPU, console=Console(file=io.StringIO()))
    batch, loss, done = {"input_ids": torch.zeros(2, 8)}, torch.tensor(1.0), step()
    best = float("inf")
    for _ in range(20):
        started = time.perf_counter()
        for _ in range(100):
            bar.record_batch(batch)
            bar.on_loss(loss)
            bar.on_step(done)
        best = min(best, (time.perf_counter() - started) / 100)
    assert best < 100e-6
