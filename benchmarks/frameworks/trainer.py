"""With transformers' Trainer."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import DistributedType

from benchmarks.frameworks.cases import Case, config
from benchmarks.frameworks.paused import Pause
from benchmarks.peers.by_hand import deepspeed_settings, quiet
from benchmarks.peers.cell import BETAS, CLIP, DECAY, EPS, LR

__all__ = ["train"]

STEPS = 100_000
"""More than are ever made."""


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A rank's rows, again and again, where the Trainer's own sampler deals them out."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(0)
        size = case.size
        self._rows = torch.randint(0, size.vocabulary, (64, size.length), generator=generator)

    def __len__(self) -> int:
        return 64 * 1024

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self._rows[index % 64]
        return {"input_ids": row, "labels": row}


class Told(transformers.TrainerCallback):  # type: ignore[misc]
    """Pauses after each update."""

    def __init__(self, pause: Pause) -> None:
        self._pause = pause
        self.losses: list[torch.Tensor] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Called after the update."""
        losses, self.losses = torch.stack(self.losses).sum(), []
        self._pause(losses)


def train(side: str, case: Case, pause: Pause) -> None:
    """A program with `Trainer(...).train()`."""
    size, told, model = case.size, Told(pause), case.build()
    with tempfile.TemporaryDirectory() as folder, quiet():
        options: dict[str, Any] = {"use_cpu": True}
        if side == "own" and case.engine == "deepspeed":
            options["deepspeed"] = deepspeed_settings(case, model)
        elif side == "own" and case.strategy != "no_shard":
            options |= {
                "fsdp": True,
                "fsdp_config": {
                    "version": 2,
                    "reshard_after_forward": case.strategy == "full_shard",
                    "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
                },
            }
        arguments = transformers.TrainingArguments(
            folder, per_device_train_batch_size=size.batch, gradient_accumulation_steps=size.accumulation,
            max_steps=STEPS, max_grad_norm=CLIP, learning_rate=LR, lr_scheduler_type="constant", weight_decay=DECAY,
            adam_beta1=BETAS[0], adam_beta2=BETAS[1], adam_epsilon=EPS, optim="adamw_torch_fused",
            train_sampling_strategy="sequential", disable_tqdm=True, save_strategy="no", logging_strategy="no",
            report_to="none", dataloader_pin_memory=False, **options,
        )  # fmt: skip
        given: dict[str, Any] = {
            "model": model, "args": arguments, "train_dataset": Samples(case), "callbacks": [told],
        }  # fmt: skip
        if side == "own":
            if "fsdp" in options:
                PartialState().distributed_type = DistributedType.MULTI_GPU
            base: Any = transformers.Trainer
        else:
            from unishard.integrations.transformers import UnishardTrainer

            base, given["unishard"] = UnishardTrainer, config(case)

        class Noted(base):  # type: ignore[misc]
            """Notes its losses."""

            def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
                """As the Trainer's."""
                loss: torch.Tensor = super().training_step(*args, **kwargs)
                told.losses.append(loss)
                return loss

        trainer = Noted(**given)
        trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
