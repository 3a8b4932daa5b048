"""Training scripts that do not know unishard: raw DeepSpeed, and FSDP2 as torch ships it. Each saves, or loads, as its
tool does."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from unishard.config.topology import Topology
from unishard.failures.lifetime import ensure
from unishard_deepspeed.start import load, quiet

STEPS, MORE = 3, 2
"""Before the checkpoint, and after it."""
MOMENTS = ("exp_avg", "exp_avg_sq")


class Model(nn.Module):
    """Odd sizes, a tie, a frozen parameter, a buffer, and a parameter with one element (DeepSpeed 0.19.8 broadcasts
    none of dim 0)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(7, 13)
        self.second = nn.Linear(13, 5)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.third = nn.Linear(5, 7)
        self.third.weight.requires_grad_(False)
        self.inward = nn.Linear(7, 7, bias=False)
        self.outward = nn.Linear(7, 7, bias=False)
        self.outward.weight = self.inward.weight
        self.register_buffer("shift", torch.arange(7.0) / 7)

    def forward(self, inputs):
        hidden = torch.relu(self.first(inputs + self.shift.to(inputs.dtype)))
        hidden = self.third(torch.relu(self.second(hidden))) * self.scale
        return self.outward(torch.tanh(self.inward(hidden))).float().square().mean()


def adamw(model, groups):
    """In two parameter groups: those with decay, and a rate and no decay of their own for the rest. Frozen ones are
    left out."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if groups == 1:
        return torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)
    large = [parameter for parameter in trained if parameter.ndim > 1]
    small = [parameter for parameter in trained if parameter.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": large, "weight_decay": 0.1}, {"params": small, "weight_decay": 0.0, "lr": 2e-2}], lr=1e-2
    )


def batch(step, rank, dtype=torch.float32):
    return torch.randn(2, 7, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)


# -- DeepSpeed -------------------------------------------------------------------------------------


def engine_of(deepspeed, model, stage, precision, groups, **config):
    config |= {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    if precision != "fp32":
        config["bf16"] = {"enabled": True}
    if precision == "bf16+fp32":  # a wrapper of its own (DeepSpeed 0.19.8, runtime/bf16_optimizer.py)
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    with quiet():
        engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model, groups), config=config)
    return engine


def trained(engine, steps, rank, precision):
    losses = []
    for step in steps:
        loss = engine(batch(step, rank, torch.float32 if precision == "fp32" else torch.bfloat16))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def gathered(engine):
    """Masters and moments of each trainable parameter, by DeepSpeed's own functions; those know nothing of stage 0."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if engine.zero_optimization_stage() == 0:
        return replicated(engine)
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        # Stages 1 and 2 link the states of the first group alone (DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py).
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    named = {name: parameter for name, parameter in engine.module.named_parameters() if parameter.requires_grad}
    found = {f"model.{name}": safe_get_full_fp32_param(parameter).clone() for name, parameter in named.items()}
    for key in MOMENTS:
        found |= {
            f"optim.state.{name}.{key}": safe_get_full_optimizer_state(each, key).clone()
            for name, each in named.items()
        }
    return found


def replicated(engine):
    """The same at stage 0, where each rank has all of it."""
    optimizer = engine.optimizer
    groups = zip(getattr(optimizer, "fp16_groups", ()), getattr(optimizer, "fp32_groups", ()), strict=True)
    masters = {parameter: master for each in groups for parameter, master in zip(*each, strict=True)}
    found = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            master = masters.get(parameter, parameter)
            state = getattr(optimizer, "optimizer", optimizer).state[master]
            found |= {f"model.{name}": master.detach().clone()}
            found |= {f"optim.state.{name}.{key}": state[key].clone() for key in (*MOMENTS, "step")}
    return found


def save_deepspeed(cells, root):
    """For each cell of stage, precision and number of groups: state when it was saved, and the losses that followed."""
    topology = ensure(Topology.from_environment())
    deepspeed = load(topology)
    seen = {}
    for cell in cells:
        stage, precision, groups = cell
        engine = engine_of(deepspeed, Model(), stage, precision, groups)
        trained(engine, range(STEPS), topology.rank, precision)
        engine.save_checkpoint(f"{root}/{stage}-{precision}-{groups}", client_state={"epoch": 1})
        state = gathered(engine)
        seen[cell] = state, trained(engine, range(STEPS, STEPS + MORE), topology.rank, precision)
        engine.destroy()
    return seen


def load_universal(cells, root):
    """For each cell: the losses of a real engine that goes on from the Universal Checkpoint of that name."""
    topology = ensure(Topology.from_environment())
    deepspeed = load(topology)
    seen = {}
    for cell in cells:
        stage, precision, groups = cell
        engine = engine_of(deepspeed, Model(), stage, precision, groups, checkpoint={"load_universal": True})
        with quiet():
            engine.load_checkpoint(f"{root}/{stage}-{precision}-{groups}")
        steps = engine.global_steps
        seen[cell] = steps, trained(engine, range(STEPS, STEPS + MORE), topology.rank, precision)
        engine.destroy()
    return seen


# -- FSDP2 -----------------------------------------------------------------------------------------


def sharded():
    topology = ensure(Topology.from_environment())
    model = Model()
    fully_shard(model)
    return topology.rank, model, adamw(model, 2)


def stepped(model, optimizer, steps, rank):
    losses = []
    for step in steps:
        loss = model(batch(step, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole_state(model, optimizer):
    """Every tensor, whole."""
    tensors, states = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    found = {f"model.{name}": value.clone() for name, value in tensors.items()}
    for name, state in states["state"].items():
        found |= {f"optim.state.{name}.{key}": value.clone() for key, value in state.items()}
    return found, states["param_groups"]


def save_fsdp(root):
    """Nested, flattened, and as Accelerate's own functions do it."""
    from accelerate import PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer

    rank, model, optimizer = sharded()
    stepped(model, optimizer, range(STEPS), rank)
    tensors, states = get_state_dict(model, optimizer)
    dcp.save({"model": tensors, "optim": states}, checkpoint_id=f"{root}/nested")
    tensors, states = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    dcp.save({"model": tensors, "optimizer": states}, checkpoint_id=f"{root}/flattened")
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    PartialState(cpu=True)  # its functions log
    here = SimpleNamespace(num_processes=2, process_index=rank)
    save_fsdp_model(plugin, here, model, f"{root}/accelerate")
    save_fsdp_optimizer(plugin, here, optimizer, model, f"{root}/accelerate")
    state, groups = whole_state(model, optimizer)
    return state, groups, stepped(model, optimizer, range(STEPS, STEPS + MORE), rank)


def load_fsdp(folders):
    """State and losses of scripts that load a directory with torch alone, in either of its two forms."""
    seen = {}
    for folder in folders:
        for flatten in (False, True):
            options = StateDictOptions(flatten_optimizer_state_dict=flatten)
            rank, model, optimizer = sharded()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            tensors, states = get_state_dict(model, optimizer, options=options)
            dcp.load({"model": tensors, "optim": states}, checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=tensors, optim_state_dict=states, options=options)
            state, groups = whole_state(model, optimizer)
            seen[folder, flatten] = state, groups, stepped(model, optimizer, range(STEPS, STEPS + MORE), rank)
    return seen
