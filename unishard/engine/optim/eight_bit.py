"""AdamW with moments of 8 bits: build it in place of bitsandbytes' optimizer, and say how the model is sharded."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unishard import config
from unishard.contract.adapter import Updates
from unishard.distributed.layout import Layout
from unishard.eight_bit.adamw import AdamW8bit, run_whole
from unishard.eight_bit.kernel_hint import hide_kernel_hint
from unishard.engine.optim.empty_groups import let_copy_step
from unishard.engine.optim.stepped_by_name import stepped_by_name

_logger = logging.getLogger("unishard")


def adamw_8bit_of(cfg: config.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Build bitsandbytes' optimizer, in whose place `on_blocks` puts one that steps shards."""
    hide_kernel_hint()
    from bitsandbytes.optim import AdamW8bit

    built: torch.optim.Optimizer = AdamW8bit(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps)
    return built


def is_adamw_8bit(optimizer: object) -> bool:
    """Whether an optimizer is an Adam or AdamW of bitsandbytes with moments of 8 bits, of whatever class.

    Both decouple the weight decay, and make the same update (bitsandbytes 0.50, optim/adam.py and adamw.py).
    """
    if type(optimizer).__module__.partition(".")[0] != "bitsandbytes":
        return False
    found: Any = optimizer
    return bool(getattr(found, "optimizer_name", "") == "adam" and found.args.optim_bits == 8)


def problems_of(optimizer: Any) -> Iterator[str]:
    """What `AdamW8bit` does not do of a bitsandbytes optimizer for which `is_adamw_8bit`."""
    kind = type(optimizer).__name__
    for name, off in (("max_unorm", 0.0), ("skip_zeros", False), ("percentile_clipping", 100)):
        if getattr(optimizer.args, name, off) != off:
            yield f"{kind} has {name}={getattr(optimizer.args, name)}, which is not supported; remove it"
    for override in _overrides(optimizer).values():
        if override.keys() - {"optim_bits"} or override.get("optim_bits") not in (8, 32):
            yield (
                f"{kind} has an override {override} of GlobalOptimManager; only optim_bits of 8 or 32 is supported: "
                "put other options into a parameter group"
            )


def follow_overrides(optimizer: Any, moved: Mapping[int, Tensor]) -> None:
    """Let the overrides of bitsandbytes' GlobalOptimManager, which are by identity, hold for the sharded parameters."""
    if is_adamw_8bit(optimizer):
        known = optimizer.mng.pid2config
        known.update({id(moved[number]): known[number] for number in moved.keys() & known.keys()})


def on_blocks(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> torch.optim.Optimizer:
    """The optimizer; in place of bitsandbytes' AdamW of 8 bits one with the same groups and options that steps shards.

    Its group dicts stay the same, so a scheduler on the optimizer still writes the live learning rates.

    Args:
        optimizer: Has not stepped yet.
        names: Names of its parameters, by `id`.
    """
    if not is_adamw_8bit(optimizer):
        return optimizer
    given: Any = optimizer
    full = {names[number] for number, each in _overrides(given).items() if number in names and each["optim_bits"] == 32}
    if given.is_paged and (not dist.is_initialized() or dist.get_rank() == 0):
        _logger.warning("%s: its state is not paged to the host, but lies on the device", type(optimizer).__name__)
    own: AdamW8bit = object.__new__(AdamW8bit)
    own.__setstate__(
        {
            **vars(optimizer),
            "from_size": given.args.min_8bit_size,
            "full": frozenset(full),
            "moments": {},
            "small": {},
            "codes_of": None,
            "run": run_whole,
            "_sharing": None,
        }
    )
    vars(own).pop("step", None)  # a scheduler has set a `step` that is bound to `optimizer`
    let_copy_step()
    return own


def share_blocks(updates: Updates, names: Sequence[Sequence[str]], layout: Mapping[str, Layout], rank: int) -> None:
    """Let AdamW of 8 bits know how its parameters are sharded; does nothing for others.

    Args:
        updates: Of the sharded model.
        names: Of the parameters in each group of the optimizer.
        layout: Which elements of each the ranks hold.
        rank: Which one this is.
    """
    if isinstance(updates.torch_optimizer, AdamW8bit):
        updates.torch_optimizer.share(names, layout, rank, stepped_by_name(updates))


def _overrides(optimizer: Any) -> dict[int, dict[str, Any]]:
    """What GlobalOptimManager says of single parameters, by `id`: by themselves, or by their module and attribute.

    It knows those of all optimizers and models (bitsandbytes 0.50, optim/optimizer.py).
    """
    manager = optimizer.mng
    held = {id(each) for group in optimizer.param_groups for each in group["params"]}
    by_module = {id(getattr(module, name)): options for module, name, options in manager.module_weight_config_triple}
    every = {**by_module, **manager.pid2config}
    return {number: every[number] for number in held & every.keys()}
