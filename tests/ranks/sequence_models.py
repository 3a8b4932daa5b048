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
    "encoder": lambda: hf.ModernBertForMaskedLM(
        hf.ModernBertConfig(
            **_SMALL,
            local_attention=8,
            eos_token_id=1,
            bos_token_id=2,
            cls_token_id=1,
            sep_token_id=2,
            initializer_range=0.2,
            embedding_dropout=0,
            mlp_dropout=0,
            attention_dropout=0,
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


class Bidirectional(Block):
    """Attention to all positions."""

    def attend(self, query, key, value):
        return unishard.attention(query, key, value, causal=False)


class BeginsAtZero(Block):
    """A convolution that adds nothing yet."""

    def mixed_in(self, width):
        return Gated(Convolution(width), 0.0)


class ReachesFar(Block):
    """A convolution over positions far apart, small at first."""

    def mixed_in(self, width):
        made = Convolution(width)
        made.convolution = nn.Conv1d(width, width, 3, dilation=5)
        return Gated(made, 1e-5)


class Normalized(Block):
    """Normalized over positions, in training."""

    def mixed_in(self, width):
        return Transposed(nn.BatchNorm1d(width))


class Gated(nn.Module):
    """Adds a module, times a number that trains."""

    def __init__(self, module, gate):
        super().__init__()
        self.module, self.gate = module, nn.Parameter(torch.tensor([gate]))

    def forward(self, hidden):
        made = self.module(hidden)
        return hidden + self.gate * functional.pad(made, (0, 0, hidden.shape[1] - made.shape[1], 0))


class Transposed(nn.Module):
    """A module of `[batch, width, positions]`."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, hidden):
        return self.module(hidden.transpose(1, 2)).transpose(1, 2)


class Balanced(Block):
    """Experts that keep a loss of how even they are used."""

    def mixed_in(self, width):
        return Experts(width)


class Experts(nn.Module):
    """One of four for each token."""

    def __init__(self, width):
        super().__init__()
        self.router, self.experts = nn.Linear(width, 4), nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.balance = torch.zeros(())

    def forward(self, hidden):
        shares = self.router(hidden).softmax(-1)
        chosen = functional.one_hot(shares.argmax(-1), 4).to(hidden.dtype)
        self.balance = 4 * (shares.mean((0, 1)) * chosen.mean((0, 1))).sum()
        made = torch.stack([expert(hidden) for expert in self.experts], -1)
        return (made * (shares * chosen)[:, :, None]).sum(-1)


class Random(Block):
    """Dropout by a function, which no proof can switch off."""

    def mixed_in(self, width):
        return Dropped()


class Dropped(nn.Module):
    """Draws random numbers in training, and adds nothing."""

    def forward(self, hidden):
        return hidden + 0 * functional.dropout(hidden, 0.5, self.training)


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


class Unplaced(nn.Module):
    """A model whose batches have no positions; they are all 0."""

    def __init__(self, kind: type[Block]) -> None:
        super().__init__()
        self.body = Own(kind)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.body(tokens, torch.zeros_like(tokens))


OWN = {
    "own": Own,
    "own attention": lambda: Own(OwnAttention),
    "convolution": lambda: Own(Convolved),
    "recurrence": lambda: Own(Recurrent),
    "running sum": lambda: Own(Summed),
    "counted positions": lambda: Own(counts=True),
    "pooling": lambda: Own(pools=True),
    "bidirectional": lambda: Unplaced(Bidirectional),
    "begins at zero": lambda: Own(BeginsAtZero),
    "reaches far": lambda: Own(ReachesFar),
    "normalized": lambda: Own(Normalized),
    "balanced": lambda: Unplaced(Balanced),
    "random": lambda: Unplaced(Random),
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
    """Packed samples; those of experts are not, whose padding must be masked, nor those of encoders, which join them."""
    return Packed(packed=name not in ("balanced experts", "encoder"))
