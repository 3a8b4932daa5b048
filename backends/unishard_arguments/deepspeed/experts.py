"""Experts over ranks: what the keys of AutoEP say (DeepSpeed 0.19.8, module_inject/auto_ep_config.py), and how it says
the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.config import Config
from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.contract.entries import DocumentValues, Key, KeyEffect
from unishard.contract.field_rows import row, when_default
from unishard.contract.key_rows import boolean, drops, integer
from unishard.contract.rules import Fit, Rule, unsupported
from unishard_arguments.deepspeed.facts import dropped, grouped, quiet

_BLOCK = "expert_parallel"
_ENABLED, _SIZE = f"{_BLOCK}.enabled", f"{_BLOCK}.autoep_size"
_SAME = "other kernels and another exchange of tokens: the same math"


def _enabled(document: DocumentValues) -> bool:
    return bool(quiet(boolean, document.get(_ENABLED), False))


def _switched(value: Any, document: DocumentValues) -> KeyEffect:
    return dropped("autoep_size says how many ranks" if boolean(value) else "is off")


def _sized(value: Any, document: DocumentValues) -> KeyEffect:
    size = integer(1)(value)
    if size == 1 or not _enabled(document):
        return dropped("is off: each rank has all experts")
    return grouped("parallel.expert.size", size, _SAME, document)


def _must_be(usual: Any, why: str) -> Key:
    """A key that counts where AutoEP replaces layers, and must have DeepSpeed's default there."""

    def read(value: Any, document: DocumentValues) -> KeyEffect:
        if value == usual:
            return dropped("DeepSpeed's default")
        return KeyEffect(Fit.UNSUPPORTED, why) if _enabled(document) else dropped("is off")

    return Key(read, (), Fit.UNSUPPORTED, why)


_ROUTES = "makes other layers than the model's own; remove it, and write that into the config of the model"
_USUAL: Mapping[str, Any] = {
    **dict.fromkeys(["score_func", "score_apply", "top_k", "routed_scaling_factor"], "auto"),
    **dict.fromkeys(["route_norm", "num_expert_groups", "num_limited_groups", "expert_activation"]),
    "route_scale": 1.0,
}
"""Keys that say how tokens are routed and computed, and their defaults, which are those of the model."""
_REFUSED: Mapping[str, tuple[Any, str]] = {
    **{name: (usual, _ROUTES) for name, usual in _USUAL.items()},
    "expert_tensor_parallel_size": (1, "splits single experts, which DeepSpeed 0.19.8 refuses as well; write 1"),
    "load_balance_coeff": (None, "DeepSpeed 0.19.8 refuses it as well; remove it"),
}
_DROPPED: Mapping[str, str] = {
    "unishard finds the experts of a model itself": (
        "preset_model moe_layer_pattern expert_pattern router_pattern expert_w1 expert_w2 expert_w3 num_experts_attr "
        "top_k_attr has_shared_experts shared_experts_pattern shared_experts_gate_pattern"
    ),
    "affects only time and memory": (
        "use_grouped_mm disable_triton_grouped_mm combine_impl row_weighting_impl gate_up_impl async_split_plan "
        "comm_backend comm_num_sm comm_qp_margin comm_max_tokens_per_rank"
    ),
    "a check of AutoEP's own": "validate_folding_routing",
}

KEYS: Mapping[str, Key] = {
    _ENABLED: Key(_switched, (), Fit.IGNORED, "without it the others are off"),
    _SIZE: Key(_sized, ("parallel.expert.size",), Fit.EQUIVALENT, _SAME),
    **{f"{_BLOCK}.{name}": _must_be(*usual) for name, usual in _REFUSED.items()},
    **{f"{_BLOCK}.{name}": drops(why) for why, listed in _DROPPED.items() for name in listed.split()},
}


def _experts(cfg: Config, topology: Topology) -> Native:
    size = cfg.parallel.expert.size
    return {_BLOCK: {"enabled": True, "autoep_size": size}} if size > 1 else {}


RULES: Mapping[str, Rule] = {
    "parallel.expert.size": row(
        Fit.EQUIVALENT,
        _SIZE,
        f"AutoEP, for the models that DeepSpeed has presets of; {_SAME}",
        when_default("parallel.expert.size"),
        unsupported(
            "full_shard with parallel.sequence",
            lambda cfg: cfg.parallel.sequence.on and cfg.sharding.strategy == "full_shard",
            "DeepSpeed 0.19.8 refuses both at stage 3; set sharding.strategy to shard_grad_op",
        ),
        to=_experts,
    ),
}
