"""How each framework trains a case, on its own and on unishard: the same program but for what the framework's guide
says to change.

Accelerate starts neither FSDP2 nor DeepSpeed on CPU ranks by itself; what is forced, here and for the Trainer, says
benchmarks/peers/loops.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.frameworks.cases import Case, config
from benchmarks.frameworks.paused import Pause
from benchmarks.peers import loops as peers
from benchmarks.peers.by_hand import adamw, quiet

__all__ = ["training_of"]


def training_of(side: str, case: Case) -> Callable[[Pause], None]:
    """A training, not started."""
    if case.model == "accelerate":
        return partial(_with_accelerate, side, case)
    if case.model == "trainer":
        from benchmarks.frameworks.trainer import train
    elif case.model == "lightning":
        from benchmarks.frameworks.lightning_trainer import train
    else:
        from benchmarks.frameworks.lightning_fabric import train
    return partial(train, side, case)


def _with_accelerate(side: str, case: Case, pause: Pause) -> None:
    if side == "own" and case.strategy != "no_shard":
        steps = {"fsdp": peers.accelerate_fsdp, "deepspeed": peers.accelerate_deepspeed}[case.engine](case)
    else:
        with quiet():
            if side == "own":
                from accelerate import Accelerator

                accelerator = Accelerator(cpu=True, gradient_accumulation_steps=case.size.accumulation)
            else:
                from unishard.integrations.accelerate import Accelerator

                accelerator = Accelerator(config(case), gradient_accumulation_steps=case.size.accumulation)
            model = case.build()
            model, optimizer = accelerator.prepare(model, adamw(model))
        steps = peers.accelerate_train(case, accelerator, model, optimizer)
    for loss in steps:
        pause(loss)
