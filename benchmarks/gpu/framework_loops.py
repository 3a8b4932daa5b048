"""A usual loop of each training framework, on its own or through unishard's integration, on one rank."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from unishard.testing.models import MODELS, llama

UPDATES, ACCUMULATION, BATCH, CLIP, LR, EPS = 6, 2, 2, 1.0, 3e-2, 1e-3
"""With this `EPS` a clipped gradient makes a smaller update, and one that is nearly 0 keeps its direction."""


class Cell(NamedTuple):
    """One training."""

    framework: str
    side: str
    """An engine, or `own`: the framework without unishard."""
    precision: str

    def __str__(self) -> str:
        return ", ".join(self)


class Seen:
    """What a training has shown: the loss of each micro-batch, and where its tensors were."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.places: set[str] = set()

    def __call__(self, loss: Tensor, batch: dict[str, Tensor], model: nn.Module) -> None:
        """Note a micro-batch."""
        self.losses.append(loss.detach().float())
        self.places |= {each.device.type for each in (loss, *batch.values(), *model.parameters())}
        if any(isinstance(each, DTensor) or hasattr(each, "ds_id") for each in model.parameters()):
            self.places.add("sharded")


def config(cell: Cell) -> dict[str, Any]:
    return {"backend": cell.side, "sharding": "full_shard"}


def samples() -> Any:
    return [MODELS["llama"].sample(index) for index in range(UPDATES * ACCUMULATION * BATCH)]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=0.0)


def forget() -> None:
    """Forget what Accelerate keeps of the training before, which was in the same process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def accelerate(cell: Cell, device: str, seen: Seen) -> None:
    forget()
    options: dict[str, Any] = {"gradient_accumulation_steps": ACCUMULATION}
    if cell.side == "own":
        from accelerate import Accelerator

        precision = "no" if cell.precision == "fp32" else cell.precision
        accelerator: Any = Accelerator(cpu=device == "cpu", mixed_precision=precision, **options)
    else:
        from unishard.integrations.accelerate import Accelerator

        accelerator = Accelerator(config(cell) | {"precision": cell.precision}, **options)
    model: Any = llama()
    model, optimizer, loader = accelerator.prepare(model, adamw(model), DataLoader(samples(), BATCH))
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
        seen(loss, batch, model)
    accelerator.end_training()


def trainer(cell: Cell, device: str, seen: Seen) -> None:
    import transformers

    forget()
    base: Any = transformers.Trainer
    if cell.side != "own":
        from unishard.integrations.transformers import UnishardTrainer as base

    class Noted(base):  # type: ignore[misc]
        def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            seen(loss * ACCUMULATION, inputs, model)  # the Trainer has divided it
            return loss

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, per_device_train_batch_size=BATCH, gradient_accumulation_steps=ACCUMULATION, num_train_epochs=1,
            max_grad_norm=CLIP, learning_rate=LR, adam_epsilon=EPS, optim="adamw_torch", lr_scheduler_type="constant",
            bf16=cell.precision == "bf16", use_cpu=device == "cpu", disable_tqdm=True, save_strategy="no",
            logging_strategy="no", report_to="none",
        )  # fmt: skip
        given: dict[str, Any] = {} if cell.side == "own" else {"unishard": config(cell)}
        arguments._n_gpu = 1  # plain, it would take every card that it sees
        made = Noted(llama(), arguments, train_dataset=samples(), **given)
        made.remove_callback(transformers.PrinterCallback)
        made.train()
        if cell.side != "own":
            made.accelerator.close()


def lightning(cell: Cell, device: str, seen: Seen) -> None:
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = llama()

        def training_step(self, batch: dict[str, Tensor]) -> Tensor:
            loss: Tensor = self.net(**batch).loss
            seen(loss, batch, self)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self)

    # Under a strategy for several ranks it would shuffle; plain it would not.
    made = lightning.Trainer(
        max_epochs=1, accumulate_grad_batches=ACCUMULATION, gradient_clip_val=CLIP, use_distributed_sampler=False,
        logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        **of_lightning(cell, device),
    )  # fmt: skip
    made.fit(Module(), DataLoader(samples(), BATCH))
    if cell.side != "own":
        made.strategy.engine.close()


def fabric(cell: Cell, device: str, seen: Seen) -> None:
    from lightning.fabric import Fabric

    made = Fabric(**of_lightning(cell, device))
    made.launch()
    model: Any = llama()
    model, optimizer = made.setup(model, adamw(model))
    for index, batch in enumerate(made.setup_dataloaders(DataLoader(samples(), BATCH))):
        last = index % ACCUMULATION == ACCUMULATION - 1
        with made.no_backward_sync(model, enabled=not last):
            loss = model(**batch).loss
            made.backward(loss / ACCUMULATION)
        seen(loss, batch, model)
        if last:
            made.clip_gradients(model, optimizer, max_norm=CLIP)
            optimizer.step()
            optimizer.zero_grad()
    if cell.side != "own":
        made.strategy.engine_of(optimizer).close()


def of_lightning(cell: Cell, device: str) -> dict[str, Any]:
    """What Trainer and Fabric are told alike."""
    where = {"accelerator": "cuda" if device == "cuda" else "cpu", "devices": 1}
    if cell.side == "own":
        return where | {"precision": "32-true" if cell.precision == "fp32" else "bf16-mixed"}
    from unishard.integrations import lightning

    kind = {"lightning": lightning.UnishardStrategy, "fabric": lightning.UnishardFabricStrategy}[cell.framework]
    return where | {"strategy": kind(config(cell) | {"precision": cell.precision})}


LOOPS: dict[str, tuple[str, Callable[[Cell, str, Seen], None]]] = {
    "accelerate": ("accelerate", accelerate),
    "trainer": ("accelerate", trainer),
    "lightning": ("lightning", lightning),
    "fabric": ("lightning", fabric),
}
"""The package that each needs beside transformers, and its training."""
