"""Small models for `parallel.sequence`: those of transformers by kind of attention, and own ones that mix positions."""

from __future__ import annotations

import torch
import transformers as hf
from torch import nn
from torch.nn import functional

import unishard

VOCABULARY, LENGTH = 64, 23
_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
_WINDOWS = {"head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

TRANSFORMERS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_SMALL)),
    "three heads": lambda: hf.LlamaForCausalLM(
        hf.LlamaConfig(**_SMALL | {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1})
    ),
    "windows": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**_SMALL, **_WINDOWS)),
    "softcap": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**_SMALL, **_WINDOWS, attn_logit_softcapping=5.0, attn_implementation="eager")
    ),
    "sinks": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(**_SMALL, **_WINDOWS, **_EXPERTS, attn_implementation="eager")
    ),
    "chunks": lambda: hf.Llama4ForCausalLM(
        hf.Llama4TextConfig(
            **_SMALL,
            head_dim=8,
            attention_chunk_size=5,
            intermediate_size_mlp=64,
            num_local_experts=2,
            layer_types=["chunked_attention", "full_attention"],
        )
    ),
    "balanced experts": lambda: hf.MixtralForCausalLM(
        hf.MixtralConfig(**_SMALL, **_EXPERTS, output_router_logits=True, router_aux_loss_coef=0.1)
    ),
}


class Block(nn.Module):
    """Attention by `attend`, and what a subclass mixes in."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.projection = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mixer = self.mixed_in(width)

    def mixed_in(self, width: int) -> nn.Module:
        return nn.Identity()

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return unishard.attention(query, key, value)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows, length, width = hidden.shape
        parts = self.projection(hidden).view(rows, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        attended = self.attend(*parts).transpose(1, 2).reshape(rows, length, width)
        return hidden + self.mixer(self.out(attended))


class OwnAttention(Block):
    """Attention that sees only what a rank has."""

    def attend(self, query, key, value):
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


class Convolved(Block):
    """A causal convolution behind attention."""

    def mixed_in(self, width):
        return Convolution(width)


class Convolution(nn.Module):
    """Over three positions."""

    def __init__(self, width):
        super().__init__()
        self.convolution = nn.Conv1d(width, width, 3)

    def forward(self, hidden):
        return self.convolution(functional.pad(hidden.transpose(1, 2), (2, 0))).transpose(1, 2)


class Recurrent(Block):
    """A recurrence behind attention."""

    def mixed_in(self, width):
        return Recurrence(width)


class Recurrence(nn.Module):
    """A GRU."""

    def __init__(self, width):
        super().__init__()
        self.gru = nn.GRU(width, width, batch_first=True)

    def forward(self, hidden):
        return self.gru(hidden)[0]


class Summed(Block):
    """A running sum over positions behind attention."""

    def mixed_in(self, width):
        return RunningSum()


class RunningSum(nn.Module):
    """Of all positions before."""

    def forward(self, hidden):
        return hidden.cumsum(1) / hidden.shape[1]


class Own(nn.Module):
    """A causal language model around blocks of a kind; returns logits."""

    def __init__(self, kind: type[Block] = Block, *, counts: bool = False, pools: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.positions = nn.Embedding(128, 32)
        self.blocks = nn.ModuleList(kind() for _ in range(2))
        self.head = nn.Linear(32, VOCABULARY)
        self.counts, self.pools = counts, pools

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(input_ids.shape[1]) if self.counts else position_ids
        hidden = self.embedding(input_ids) + self.positions(places)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean(1) if self.pools else hidden)


OWN = {
    "own": Own,
    "own attention": lambda: Own(OwnAttention),
    "convolution": lambda: Own(Convolved),
    "recurrence": lambda: Own(Recurrent),
    "running sum": lambda: Own(Summed),
    "counted positions": lambda: Own(counts=True),
    "pooling": lambda: Own(pools=True),
}


def build(name: str) -> nn.Module:
    """A model, with the same weights each time."""
    torch.manual_seed(0)
    return {**TRANSFORMERS, **OWN}[name]().train()


class Packed(torch.utils.data.Dataset):
    """Samples of two documents, of which some have fewer labels."""

    def __init__(self, number: int = 48, length: int = LENGTH, *, packed: bool = True) -> None:
        self._number, self._length, self._packed = number, length, packed

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(1, VOCABULARY, (self._length,), generator=torch.Generator().manual_seed(index))
        labels, cut = tokens.clone(), 5 + index % 9
        labels[: 2 * (index % 6)] = -100
        sample = {"input_ids": tokens, "labels": labels}
        if self._packed:
            sample["position_ids"] = torch.cat([torch.arange(cut), torch.arange(self._length - cut)])
        return sample


def batch_of(dataset: Packed, first: int, count: int = 2) -> dict[str, torch.Tensor]:
    """A whole batch, for plain torch."""
    samples = [dataset[first + each] for each in range(count)]
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def data_for(name: str) -> Packed:
    """Packed samples; those of experts are not, whose padding must be masked."""
    return Packed(packed=name != "balanced experts")
