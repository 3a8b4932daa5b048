"""Small models that mix positions outside of attention: hybrid ones of transformers, and an own one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers as hf
from sequence_models import LENGTH, VOCABULARY, Packed
from torch import nn
from torch.overrides import TorchFunctionMode

import unishard

_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_ATTENTION = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
_DELTA_RULE = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 16}

_SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3Next": (
        "Qwen3NextConfig",
        _ATTENTION | _DELTA_RULE | _EXPERTS | {"head_dim": 16, "num_experts": 4, "shared_expert_intermediate_size": 16},
    ),
    "Qwen3_5": ("Qwen3_5TextConfig", _ATTENTION | _DELTA_RULE | {"head_dim": 16}),
    "OlmoHybrid": ("OlmoHybridConfig", _ATTENTION | _DELTA_RULE | {"linear_num_key_heads": 4}),
    "KimiLinear": (
        "KimiLinearConfig",
        _ATTENTION
        | _EXPERTS
        | {"layer_types": ["linear_attention", "full_attention"], "linear_num_heads": 4, "linear_head_dim": 8}
        | {"num_key_value_heads": 4}
        | {"q_lora_rank": None, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
        | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    "Mamba": ("MambaConfig", {"state_size": 8}),
    "Mamba2": ("Mamba2Config", {"state_size": 8, "head_dim": 8, "num_heads": 8, "n_groups": 2, "chunk_size": 16}),
    "Jamba": (
        "JambaConfig",
        _ATTENTION
        | {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
        | {"num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 8, "mamba_dt_rank": 4}
        | {"use_mamba_kernels": False},
    ),
    "Bamba": ("BambaConfig", _ATTENTION | _MAMBA2 | {"attn_layer_indices": [1]}),
    "FalconH1": ("FalconH1Config", _ATTENTION | _MAMBA2 | {"mamba_d_ssm": 64, "head_dim": 8}),
    "NemotronH": (
        "NemotronHConfig",
        _ATTENTION
        | _EXPERTS
        | {"layers_block_type": ["mamba", "attention", "moe"], "head_dim": 8, "ssm_state_size": 8, "chunk_size": 16}
        | {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "n_routed_experts": 4, "n_group": 1}
        | {"topk_group": 1, "moe_shared_expert_intermediate_size": 16},
    ),
    "GraniteMoeHybrid": (
        "GraniteMoeHybridConfig",
        _ATTENTION
        | _MAMBA2
        | {"layer_types": ["mamba", "attention"], "num_local_experts": 0, "shared_intermediate_size": 32},
    ),
    "Zamba2": (
        "Zamba2Config",
        _ATTENTION
        | {"num_hidden_layers": 3, "num_key_value_heads": 4, "layers_block_type": ["mamba", "hybrid", "mamba"]}
        | {"n_mamba_heads": 8, "mamba_ngroups": 1, "mamba_d_state": 8, "mamba_headdim": 8, "chunk_size": 16}
        | {"num_mem_blocks": 1, "adapter_rank": 4},
    ),
    "Lfm2": ("Lfm2Config", _ATTENTION | {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}),
}
HYBRID = tuple(_SIZES)


def hybrid(name: str, **changes: Any) -> Any:
    """A causal language model of a family, with the same weights each time, large enough that positions mix."""
    torch.manual_seed(0)
    config, sizes = _SIZES[name]
    layers = {} if "layers_block_type" in sizes else {"num_hidden_layers": 2}
    model = getattr(hf, f"{name}ForCausalLM")(getattr(hf, config)(**_SMALL | layers | sizes | changes)).train()
    return scaled(model, 2 if name == "Mamba" else 4)  # more, and fp32 rounds its gradients beyond the bounds


def scaled(model: nn.Module, factor: float) -> nn.Module:
    """Weights of which none is as it begins: those of 0.02 hardly mix positions, and 0 and 1 hide errors."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data *= factor
        else:
            parameter.data += 0.05 * torch.randn_like(parameter)
    return model


class _InFloat64(TorchFunctionMode):
    """Computes in float64 what a model, or unishard, computes in float32 whatever it is given."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args, kwargs = ([*args], kwargs or {})
        args = [torch.float64 if each is torch.float32 else each for each in args]
        return func(*args, **{name: torch.float64 if each is torch.float32 else each for name, each in kwargs.items()})


@contextmanager
def in_float64() -> Iterator[None]:
    """A block of forwards, and backwards by `torch.autograd.backward`, that round to float64 only."""
    torch.set_default_dtype(torch.float64)
    try:
        with _InFloat64():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


@unishard.by_heads("gates: b l h x, within: h d e -> b l h d")
def recurrence(gates: torch.Tensor, within: torch.Tensor) -> torch.Tensor:
    """A recurrence by head that is not linear in its state."""
    state, states = gates.new_zeros(gates.shape[0], gates.shape[2], gates.shape[3] // 2), []
    for position in range(gates.shape[1]):
        new, gate = gates[:, position].chunk(2, -1)
        state = torch.lerp(state, torch.tanh(new + torch.einsum("bhd,hde->bhe", state, within)), gate.sigmoid())
        states.append(state)
    return torch.stack(states, 1)


@unishard.by_heads("x: b l h d -> b l h d")
def over_all_heads(x: torch.Tensor) -> torch.Tensor:
    """Said to be by heads, and is not."""
    return x.cumsum(1) - x.mean(2, keepdim=True)


class Block(nn.Module):
    """A token shift, a causal convolution, attention, and a recurrence."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(3))
        self.mix, self.taps = nn.Parameter(torch.rand(32)), nn.Parameter(torch.randn(32, 4) * 0.3)
        self.projection, self.gates = nn.Linear(32, 96), nn.Linear(32, 64)
        self.within = nn.Parameter(torch.randn(4, 8, 8) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norms[0](x)
        x = x + torch.lerp(normed, unishard.shift(normed), self.mix)
        x = x + unishard.causal_conv(self.norms[1](x).transpose(1, 2), self.taps).transpose(1, 2)
        query, key, value = self.projection(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        x = x + unishard.attention(query, key, value).transpose(1, 2).flatten(2)
        return x + recurrence(self.gates(self.norms[2](x)).unflatten(-1, (4, 16)), self.within).flatten(2)


class Mixing(nn.Module):
    """Calls a function that mixes heads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return over_all_heads(x.unflatten(-1, (4, 8))).flatten(2)


class OwnHybrid(nn.Module):
    """A causal language model around blocks of a kind, whose loss is the script's."""

    def __init__(self, kind: type[nn.Module] = Block) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)
        self.blocks = nn.ModuleList(kind() for _ in range(2))

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def own_hybrid(kind: type[nn.Module] = Block) -> nn.Module:
    """The own model, with the same weights each time."""
    torch.manual_seed(0)
    return OwnHybrid(kind)


def samples(number: int = 12, *, packed: bool = False) -> Packed:
    """Of an odd length, so that each is padded."""
    return Packed(number, LENGTH, packed=packed)
