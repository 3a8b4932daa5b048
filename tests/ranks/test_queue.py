"""What a step waits for: nothing on the device, with the default settings on both engines, so that its queue never runs
empty."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from harness import BACKENDS, DEEP, PAIRS, STRATEGIES, own_share, play, prepare, values
from harness import checked as config
from waiting import Wait, Waits

WARM_UP, WATCHED = 11, 10
"""Updates: the first ones look closer at what the script does, and so does every tenth."""
ADAMW = {"name": "adamw", "lr": 1e-3}

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "accumulation": {"training": {"gradient_accumulation_steps": 2}},
    "schedule": {"scheduler": {"name": "cosine", "warmup_steps": 3, "total_steps": 100}},
    "items": {"training": {"gradient_clipping": 1.0}},
    "items counted on the device": {"training": {"gradient_clipping": 1.0}},
    "automatic saves": {"checkpoint": {"dir": "build/unused", "on_signal": ["SIGUSR1"], "every_minutes": 60}},
    "bf16": {"precision": "bf16", "training": {"gradient_clipping": 1.0}},
    "fp16": {"precision": "fp16"},
    "ignore": {"training": {"nonfinite": "ignore"}},
    "raise": {"training": {"nonfinite": "raise"}},
    "sgd": {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}},
}
ENGINES = tuple(
    (backend, strategy)
    for backend in BACKENDS
    for strategy in STRATEGIES
    if strategy != "shard_optimizer" and (DEEP or (backend, strategy) != ("fsdp", "shard_grad_op"))
)
CELLS = (
    *((*engine, "default") for engine in ENGINES),
    *(("deepspeed", strategy, "bf16") for strategy in ("no_shard", "shard_grad_op", "full_shard")),
    *(("fsdp", "full_shard", setting) for setting in ("items", "fp16")),
    *(("fsdp", "no_shard", setting) for setting in SETTINGS if setting not in ("default", "items", "bf16", "fp16")),
    *(("deepspeed", "no_shard", setting) for setting in ("fp16", "raise", "sgd")),
)

AGREED = {
    "resolve_pending": "whether the last update was skipped, after the backward of the next one is queued",
    "divisor": "how many items the ranks have counted, after the backward is queued",
    "compare": "whether gradients were changed, in one of forty updates",
    "_true": "whether weights were written past the engine, in one of forty updates",
    "before_step": "checksums of the weights of every tenth update, added up before its forward",
}
"""What is read of pinned memory, by function: copied there while the device still had more to do than the host waits
for."""

READ_AT_ONCE = {
    "raise": {"fsdp": "_read", "deepspeed": "_read"},  # the error must come from this step
    "sgd": {"fsdp": "update", "deepspeed": "_before_update"},  # its kernels cannot skip
}
"""Where an update waits for its own norm, once: by setting and backend."""
DEEPSPEED = {
    "is_invalid_grad_norm": "stages 1 to 3: whether the norm is finite; each clipping group in stage 2",
    "has_overflow": "bf16 at stage 2, 16 bits at stage 0: the flag of all ranks",
    "has_overflow_serial": "16 bits at stage 0: each gradient",
    "get_weight_norm": "bf16 at stage 0",
    "check_using_norm": "fp16 at stage 0",
}
"""What DeepSpeed 0.19.8 reads inside its own step, by function; no setting of it avoids that."""


def waits(backend: str, strategy: str, setting: str) -> Counter[Wait]:
    """Of the watched updates."""
    sections = {
        name: dict(section) if isinstance(section, dict) else section for name, section in SETTINGS[setting].items()
    }
    cfg = config(backend, strategy, **{"optimizer": ADAMW, **sections})
    accumulation = cfg.training.gradient_accumulation_steps
    found = Waits()
    with prepare(cfg) as engine:
        loop = engine.batches(own_share((WARM_UP + WATCHED) * accumulation))
        train(engine, loop, WARM_UP * accumulation, setting, Waits())
        with found.watching():
            train(engine, loop, WATCHED * accumulation, setting, found)
    return found.found


def train(engine: Any, loop: Any, count: int, setting: str, found: Waits) -> None:
    """Micro-batches of a loop in which the script itself reads nothing."""
    for _ in range(count):
        found.phase = "batches"
        batch = next(loop)
        found.phase = "forward"
        loss = engine(**batch).loss
        found.phase = "backward"
        labels = batch["labels"]
        items = {"items": labels.numel(), "items counted on the device": labels.ge(0).sum()}.get(setting)
        engine.backward(loss if items is None else loss * labels.numel(), items)
        found.phase = "step"
        engine.step()


def of(cell: tuple[str, ...]) -> list[Counter[Wait]]:
    alike = tuple((waits, each) for each in CELLS if each[0] == cell[0])
    found: list[Counter[Wait]] = values(play(alike)[waits, cell])
    return found


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_a_step_does_not_wait_for_the_device(cell):
    known = [READ_AT_ONCE[cell[2]][cell[0]]] if cell[2] in READ_AT_ONCE else []
    for found in of(cell):
        own = {wait: number / WATCHED for wait, number in found.items() if wait.owner == "unishard"}
        places = "\n" + "\n".join(
            f"{wait.phase} {wait.place} in {wait.function}: {number:g} an update" for wait, number in own.items()
        )
        assert {wait.function for wait in own} <= {*AGREED, *known}, places
        assert all(wait.deferred for wait in own if wait.function not in AGREED), places
        assert sum(number for wait, number in own.items() if wait.function not in AGREED) == len(known), places
        assert all(number <= 1 for number in own.values()), places


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell[0] == "deepspeed"], ids="-".join)
def test_what_deepspeed_reads_is_listed(cell):
    for found in of(cell):
        assert {wait.function for wait in found if wait.owner == "deepspeed"} <= DEEPSPEED.keys()


# -- skipped on the device -------------------------------------------------------------------------

SKIPPING = ENGINES if DEEP else PAIRS


def trained(backend: str, strategy: str, bad: int | None, reads: bool) -> dict[str, Any]:
    """Seven updates, of which one meets a NaN on rank 1 or is left out; the outcome of each is read at once, or at the
    end."""
    sections = {
        "training": {"gradient_clipping": 1.0},
        "scheduler": {"name": "linear", "warmup_steps": 2, "total_steps": 20},
    }
    steps, rates = [], []
    with prepare(config(backend, strategy, optimizer=ADAMW, **sections)) as engine:
        for turn, batch in enumerate(own_share(7)):
            if turn == 4 and bad is None:
                continue
            x = batch["x"] * torch.nan if turn == bad and engine.rank == 1 else batch["x"]
            engine.backward(engine(x, batch["labels"]).loss)
            steps.append(engine.step())
            if reads:
                rates.append((engine.lr, engine.optimizer.param_groups[0]["lr"], steps[-1].skipped))
        weights = {name: engine.weights.read(name) for name, _ in engine.module.named_parameters()}
        return {"weights": weights, "steps": [tuple(step) for step in steps], "rates": rates, "lr": engine.lr}


@pytest.mark.parametrize("reads", [True, False], ids=["read at once", "read at the end"])
@pytest.mark.parametrize("engine", SKIPPING, ids="-".join)
def test_an_update_that_is_skipped_leaves_no_trace(engine, reads):
    cells = tuple((trained, (*each, *run)) for each in SKIPPING for run in ((4, True), (4, False), (None, True)))
    found = play(cells)
    for with_nan, without in zip(
        *(values(found[trained, (*engine, *run)]) for run in ((4, reads), (None, True))), strict=True
    ):
        assert [step[3] for step in with_nan["steps"]] == [turn == 4 for turn in range(7)]
        assert with_nan["steps"][4] == (False, float("inf"), with_nan["steps"][5][2], True), (
            "the schedule does not move"
        )
        assert [step for step in with_nan["steps"] if step[0]] == without["steps"]
        assert with_nan["lr"] == without["lr"]
        for name, weight in with_nan["weights"].items():
            assert torch.equal(weight, without["weights"][name]), name
        if reads:
            assert [rate[:2] for turn, rate in enumerate(with_nan["rates"]) if turn != 4] == [
                rate[:2] for rate in without["rates"]
            ]
            assert with_nan["rates"][4][:2] == with_nan["rates"][3][:2]
