"""Lays out a checkpoint as DeepSpeed does, for any shapes, stage and number of ranks, without running it."""

from __future__ import annotations

from collections import OrderedDict

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

KEYS = ("fp32", "exp_avg", "exp_avg_sq")


def tensors_of(groups):
    """Master and moments of each parameter, all elements different."""
    at, found = 0, {}
    for named in groups:
        for name, shape in named.items():
            for key in KEYS:
                numel = torch.Size(shape).numel()
                found[name, key] = torch.arange(at, at + numel, dtype=torch.float32).view(shape)
                at += numel
    return found


def _partitioned(values, ranks):
    """Stages 1 and 2: all parameters of a group in a row, padded, in equal parts; and where each part has what."""
    flat = torch.cat([value.reshape(-1) for value in values.values()])
    flat = torch.cat([flat, torch.zeros(-len(flat) % ranks)])
    size, parts = len(flat) // ranks, []
    for rank in range(ranks):
        at, addresses = 0, OrderedDict()
        for name, value in values.items():
            low, high = max(at, rank * size), min(at + value.numel(), (rank + 1) * size)
            if low < high:
                addresses[name] = fragment_address(numel=high - low, start=low - rank * size)
            at += value.numel()
        parts.append((flat[rank * size : (rank + 1) * size].clone(), addresses))
    return parts


def _shared(value, ranks):
    """Stage 3: each parameter in equal parts, padded."""
    share = -(-value.numel() // ranks)
    return list(torch.cat([value.reshape(-1), torch.zeros(share * ranks - value.numel())]).split(share))


def _options(index, options):
    return {"lr": 0.1 * (index + 1), "betas": (0.9, 0.999), "weight_decay": 0.0, **options, "params": [index]}


def _state(stage, groups, tensors, rank, ranks, step, options):
    flats, addresses = [], []
    for named in groups:
        held = {key: {name: tensors[name, key] for name in named} for key in KEYS}
        if stage == 3:
            flats.append(
                {
                    key: torch.cat([_shared(value, ranks)[rank] for value in values.values()])
                    for key, values in held.items()
                }
            )
        else:
            parts = {key: _partitioned(values, ranks)[rank] for key, values in held.items()}
            flats.append({key: part for key, (part, _) in parts.items()})
            addresses.append(parts["fp32"][1])
    state = {index: {"step": step, **{key: flat[key] for key in KEYS[1:]}} for index, flat in enumerate(flats)}
    base = {"state": state, "param_groups": [_options(index, options) for index in range(len(groups))]}
    masters = [flat["fp32"] for flat in flats]
    if stage == 3:
        return {
            "zero_stage": ZeroStageEnum.weights,
            "partition_count": ranks,
            "optimizer_state_dict": base,
            "fp32_flat_groups": masters,
        }
    return {
        "zero_stage": ZeroStageEnum(stage),
        "partition_count": [ranks] * len(groups),
        "base_optimizer_state": base,
        "single_partition_of_fp32_groups": masters,
        "param_slice_mappings": addresses,
    }


def lay_out(
    root, groups, *, stage=2, ranks=2, step=None, scaler=None, frozen=None, options=None, tag="global_step7", **more
):
    """Write a checkpoint; returns what it holds of each parameter.

    Args:
        root: What `save_checkpoint` would have been given.
        groups: Shapes of the parameters by name, for each parameter group.
        step: As the optimizer counts.
        scaler: Attributes of a dynamic loss scaler.
        frozen: Tensors that do not train.
        options: Of all parameter groups, beside the usual.
        more: What the script saved beside the model.
    """
    folder, tensors, frozen = root / tag, tensors_of(groups), frozen or {}
    folder.mkdir(parents=True)
    (root / "latest").write_text(tag)
    shapes = [OrderedDict((name, torch.Size(shape)) for name, shape in named.items()) for named in groups]
    held = LossScaler(1.0)
    if scaler is not None:
        held = DynamicLossScaler(2.0**16, 2.0, scaler["scale_window"], 1.0, 1)
        vars(held).update(scaler)
    for rank in range(ranks):
        if stage == 3 or rank == 0:
            fragments = {name: _shared(value, ranks)[rank] if stage == 3 else value for name, value in frozen.items()}
            module = {name: torch.empty(0) for named in groups for name in named} if stage == 3 else {}
            model = {
                "module": OrderedDict(module | {"steps": torch.tensor([5])} | ({} if stage == 3 else frozen)),
                "buffer_names": ["steps"],
                "optimizer": None,
                "param_shapes": shapes,
                "frozen_param_shapes": None
                if stage == 1
                else OrderedDict((name, value.shape) for name, value in frozen.items()),
                "frozen_param_fragments": None if stage == 1 else fragments,
                "shared_params": {},
                "lr_scheduler": None,
                "skipped_steps": 2,
                "global_steps": 7,
                "dp_world_size": ranks,
                "mp_world_size": 1,
                "ds_config": {},
                "ds_version": "0.19.8",
                **more,
            }
            name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
            torch.save(model, folder / name)
        count = torch.tensor(5.0) if step is None else step
        state = {"loss_scaler": held, **_state(stage, groups, tensors, rank, ranks, count, options or {})}
        file = folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": state, "ds_config": {}, "ds_version": "0.19.8"}, file)
    return tensors
