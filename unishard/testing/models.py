"""Tiny models whose sizes no world size divides, and data that depends only on a sample's global index."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

_WORD = 97


class MlpOutput(NamedTuple):
    """What `Mlp` returns."""

    loss: Tensor
    """Scalar, fp32: mean cross entropy of the batch."""
    logits: Tensor
    """`(batch, classes)`, in the compute dtype."""


class Block(nn.Module):
    """A residual block whose scale is a parameter with one element: most ranks hold an empty shard of it."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, hidden)` to the same."""
        change: Tensor = self.down(functional.gelu(self.up(self.norm(x))))
        return x + self.scale * change


class Mlp(nn.Module):
    """An MLP with odd sizes, biases, parameters of one element, and a buffer that affects the result."""

    center: Tensor

    def __init__(
        self, features: int = 13, hidden: int = 23, inner: int = 37, classes: int = 11, blocks: int = 3
    ) -> None:
        super().__init__()
        self.register_buffer("center", torch.linspace(-0.3, 0.3, features))
        self.inp = nn.Linear(features, hidden)
        self.blocks = nn.ModuleList(Block(hidden, inner) for _ in range(blocks))
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor, labels: Tensor) -> MlpOutput:
        """The loss of a batch.

        Args:
            x: `(batch, features)`, floating.
            labels: `(batch,)`, int64.
        """
        hidden = self.inp(x - self.center.to(x.dtype))
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        return MlpOutput(functional.cross_entropy(logits.float(), labels), logits)


def mlp(seed: int = 7) -> nn.Module:
    """The tiny MLP, the same on every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Mlp()


def llama(seed: int = 7, **changes: Any) -> nn.Module:
    """A tiny Hugging Face Llama from a config, the same on every call.

    Args:
        seed: Seed of its parameters.
        changes: Fields of `LlamaConfig` to override.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": _WORD,
        "hidden_size": 24,
        "intermediate_size": 41,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32,
        "tie_word_embeddings": False,
        "use_cache": False,
        "attn_implementation": "eager",
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = LlamaForCausalLM(LlamaConfig(**(sizes | changes)))
        return model


def _features(index: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 + index)
    x = torch.randn(13, generator=generator)
    teacher = torch.randn(11, 13, generator=torch.Generator().manual_seed(3))
    return {"x": x, "labels": (teacher @ x).argmax()}


def _tokens(index: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 + index)
    start, stride = torch.randint(0, _WORD, (2,), generator=generator).tolist()
    tokens = (start + (1 + stride % 5) * torch.arange(11)) % _WORD
    return {"input_ids": tokens, "labels": tokens}


@dataclass(frozen=True, slots=True)
class TestModel:
    """A model and its data."""

    __test__ = False  # else pytest would collect it as a test class

    build: Callable[[], nn.Module]
    sample: Callable[[int], dict[str, Tensor]]
    """Returns a sample by its index in the global order."""


MODELS: dict[str, TestModel] = {"mlp": TestModel(mlp, _features), "llama": TestModel(llama, _tokens)}
"""By the name that a `Cell` uses."""


def batch(model: str, first: int, size: int) -> dict[str, Tensor]:
    """Samples `first` to `first + size - 1` of the global order, stacked, for the model of a name in `MODELS`."""
    return batch_of(MODELS[model], first, size)


def batch_of(model: TestModel, first: int, size: int) -> dict[str, Tensor]:
    """Samples `first` to `first + size - 1` of the global order, stacked.

    Args:
        model: The model that the data is for.
        first: Global index of the first sample.
        size: Number of samples.
    """
    samples = [model.sample(index) for index in range(first, first + size)]
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
