"""Parameters that are frozen, unfrozen later, or not used in every step."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

import unishard
from unishard.config import Config
from unishard.testing import oracle
from unishard.testing.cells import STRATEGIES, Cell, Feature, Recorder
from unishard.testing.models import MODELS, Mlp, MlpOutput, TestModel, llama, mlp
from unishard.testing.oracle import Curve


def lora(base: torch.dtype = torch.float32, *, rank: int = 3, **changes: Any) -> nn.Module:
    """A tiny Llama with fp32 adapters on a frozen base, the same on every call.

    Args:
        base: Dtype of the frozen parameters.
        rank: Of the adapters.
        changes: Fields of `LlamaConfig` to override.
    """
    from peft import LoraConfig, get_peft_model

    # Not initialized to zero, so that all adapter weights have a gradient from the first step on.
    targets = ["q_proj", "v_proj", "down_proj"]
    adapters = LoraConfig(r=rank, lora_alpha=8, target_modules=targets, init_lora_weights=False)
    model = llama(**changes).to(base)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # peft 0.21.2 asks transformers 5.23 by an old name (peft/peft_model.py).
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        torch.manual_seed(5)
        adapted: nn.Module = get_peft_model(model, adapters)
        return adapted


def _bf16_base() -> nn.Module:
    return lora(torch.bfloat16)


def _frozen_layers() -> nn.Module:
    """The first layers are frozen, and a bias in the middle."""
    model = mlp()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(("inp.", "blocks.0.", "blocks.1.down.bias")))
    return model


SCHEDULE: dict[int, tuple[tuple[str, bool], ...]] = {
    0: (("blocks.1", False), ("inp.bias", False), ("*.scale", False)),
    5: (("blocks.1", True), ("blocks.2.up", False)),
    9: (("blocks.1.up", False), ("*.scale", True)),
    14: (("*", True),),
}
"""By optimizer step, the parameters that are frozen or unfrozen before it: some train for the first time at 5, 9 or 14,
some again."""


def _unfreezing(engine: unishard.Engine, data: list[dict[str, Any]], cell: Cell) -> Curve:
    recorder, updates = Recorder(), 0
    for turn, micro_batch in enumerate(engine.batches(data)):
        if turn % cell.accumulation == 0:
            for names, trainable in SCHEDULE.get(updates, ()):
                engine.weights.set_trainable(names, trainable)
            updates += 1
        loss = engine(**micro_batch).loss
        engine.backward(loss)
        recorder.record(engine.mean(loss), engine.step())
    return recorder.curve()


_MEANT = {"*": "", "*.scale": "scale"}
"""The suffix of the names that a pattern matches."""


def _unfreezing_reference(model: nn.Module, data: list[list[dict[str, Any]]], cfg: Config, cell: Cell) -> Curve:
    def before(update: int) -> None:
        for pattern, trainable in SCHEDULE.get(update, ()):
            for name, parameter in model.named_parameters():
                if name.endswith(_MEANT[pattern]) if pattern in _MEANT else name.startswith(pattern):
                    parameter.requires_grad_(trainable)

    return oracle.train(model, data, cfg, world=cell.world, before_window=before)


class _Towers(nn.Module):
    """Runs its second tower only if the batch asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.always = Mlp(blocks=1)
        self.sometimes = nn.ModuleList(nn.Linear(13, 11) for _ in range(2))

    def forward(self, x: Tensor, labels: Tensor, use: Tensor) -> MlpOutput:
        logits = self.always(x, labels).logits
        if use.any():
            logits = logits + self.sometimes[0](x) + self.sometimes[1](x.flip(-1))
        return MlpOutput(nn.functional.cross_entropy(logits.float(), labels), logits)


def _towers() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return _Towers()


def used_in_turns(index: int) -> dict[str, Tensor]:
    """The first windows do not use the second tower, then every third does; all samples of a window agree for up to 4
    ranks.
    """
    return MODELS["mlp"].sample(index) | {"use": torch.tensor(index // 16 % 3 == 1)}


_ADAMW = {"optimizer": {"name": "adamw", "lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}}

FEATURES = (
    Feature(
        "lora",
        "fp32 adapters on a frozen fp32 base",
        models={"llama": TestModel(lora, MODELS["llama"].sample)},
        precisions=("fp32",),
    ),
    Feature(
        "lora_bf16_base",
        "fp32 adapters on a frozen base in bf16",
        models={"llama": TestModel(_bf16_base, MODELS["llama"].sample)},
        precisions=("bf16",),
    ),
    Feature(
        "frozen_layers",
        "some layers and a bias are frozen",
        models={"mlp": TestModel(_frozen_layers, MODELS["mlp"].sample)},
    ),
    Feature(
        "unfreezing",
        "parameters are frozen and unfrozen during training",
        sections=_ADAMW,
        loop=_unfreezing,
        reference=_unfreezing_reference,
        steps_in_suite=16,
    ),
    Feature(
        "unfreezing_offload",
        "the same with parameters and optimizer in host memory",
        sections=_ADAMW | {"offload": "cpu"},
        strategies=("full_shard",),
        precisions=("bf16",),
        loop=_unfreezing,
        reference=_unfreezing_reference,
        steps_in_suite=16,
    ),
    Feature(
        "unused",
        "a tower that most steps do not use",
        sections=_ADAMW,
        models={"mlp": TestModel(_towers, used_in_turns)},
        strategies=STRATEGIES[
            1:
        ],  # DistributedDataParallel must be told of it beforehand: native.fsdp.find_unused_parameters
    ),
)
