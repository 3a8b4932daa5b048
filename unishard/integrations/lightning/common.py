"""What both strategies share: the config, which must agree with Lightning's arguments, and an engine that Lightning
drives.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

import unishard
from unishard.config import Config
from unishard.config.data_share import data_share_of
from unishard.config.topology import Topology
from unishard.engine.engine import Engine
from unishard.errors import ConfigError, Problem
from unishard.failures import lifetime
from unishard.integrations import backward_options
from unishard.integrations.saving import refuse_copies

__all__ = ["Windows", "agree_on_precision", "begin", "config_of", "precision_of", "prepared", "refuse_clip", "share_of"]

_SHORT = {"fp32": "32", "bf16": "bf16", "fp16": "16"}

_ARGUMENTS = {"accelerator", "parallel_devices", "cluster_environment", "start_method"}
"""Those of Lightning's strategies that unishard does not decide."""


def config_of(cfg: Config | str | Path | Mapping[str, Any] | None, arguments: Mapping[str, Any]) -> Config:
    """The config of a strategy.

    Raises:
        ConfigError: It cannot be loaded, or resumes by itself; or an argument is one that only DDP has.
    """
    if wrong := sorted(arguments.keys() - _ARGUMENTS):
        problem = f"{', '.join(wrong)} would be for DDP; remove it, and write in the config what it means, such as "
        raise ConfigError([Problem("", problem + "sharding.conditional_modules for find_unused_parameters")])
    config = cfg if isinstance(cfg, Config) else unishard.load(cfg)
    if config.checkpoint.on_existing == "resume":
        problem = "resume would not reach Lightning's loops; remove it, and pass ckpt_path to fit, or call fabric.load"
        raise ConfigError([Problem("checkpoint.on_existing", problem)])
    refuse_copies(config.checkpoint.copy_to)
    return config


def precision_of(cfg: Config) -> str:
    """The word of Lightning for a config's precision."""
    compute, master = cfg.precision.compute, cfg.precision.master
    return f"{_SHORT[compute]}-{'true' if compute == master else 'mixed'}"


def agree_on_precision(cfg: Config, precision: str) -> None:
    """Check that Lightning has no precision of its own, or the same as the config.

    Raises:
        ConfigError: It has another one.
    """
    if precision not in ("32-true", precision_of(cfg)):
        short = {f"{value}-mixed": name for name, value in _SHORT.items()}.get(precision)
        write = f" and write `precision: {short}` in the config" if short else ""
        problem = (
            f"is {precision_of(cfg)} in Lightning's words, but Lightning was given {precision}; remove its argument"
        )
        raise ConfigError([Problem("precision", problem + write)])


def begin(strategy: Any, cfg: Config) -> None:
    """Start the process group of one of Lightning's strategies. Collective.

    Raises:
        ConfigError: Lightning and the launcher have another number of ranks, or another kind of device.
    """
    size = strategy.num_nodes * strategy.num_processes
    if isinstance(strategy.cluster_environment, LightningEnvironment):  # which tells its processes only a part
        count, local = strategy.num_processes, strategy.local_rank
        variables = {"RANK": strategy.node_rank * count + local, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": count}
        for name, value in (variables | {"WORLD_SIZE": size}).items():
            os.environ.setdefault(name, str(value))
    topology = Topology.from_environment()
    if topology.world_size != size:
        problem = f"devices={strategy.num_processes}, num_nodes={strategy.num_nodes} are {size} ranks, but the launcher"
        raise ConfigError([Problem("", f"{problem} has started {topology.world_size}; set them to what it starts")])
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if strategy.root_device.type != kind:
        problem = f"Lightning's accelerator is {strategy.root_device.type}, but unishard computes on {kind}"
        raise ConfigError(
            [Problem("", f"{problem}; pass accelerator='auto', or hide the GPUs by CUDA_VISIBLE_DEVICES=''")]
        )
    lifetime.ensure(topology, cfg.communication)


def share_of(strategy: Any, cfg: Config) -> dict[str, int]:
    """Which samples a rank reads, for Lightning's sampler; ranks that share samples read the same.

    Raises:
        ConfigError: The ranks that share samples do not divide the ranks.
    """
    ranks = strategy.num_nodes * strategy.num_processes
    share = data_share_of(cfg, Topology(world_size=ranks, rank=strategy.global_rank))
    return {"num_replicas": share.of, "rank": share.number}


class Windows:
    """Translates Lightning's order of calls into the engine's. The coming micro-batch ends its window unless told;
    where no step follows, the window goes on.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._last = True
        self._clip: float | EllipsisType = ...
        engine.framework.set_boundary(True)

    @contextmanager
    def open(self) -> Iterator[None]:
        """A block with a forward and a backward after which the window goes on."""
        self._say(last=False)
        yield
        self._say(last=True)

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run the backward of a divided loss."""
        backward_options.check(options)
        self.engine.framework.scaled_backward(loss)
        if not self._last:
            self.engine.step()

    def clip(self, max_norm: float) -> Tensor:
        """The norm of the gradients, which the step will clip."""
        self._clip = float(max_norm)
        return self.engine.gradients.norm()

    def step(self) -> None:
        """Update the parameters."""
        clip, self._clip = self._clip, ...
        self.engine.step(clip)
        self._say(last=True)

    def _say(self, *, last: bool) -> None:
        self._last = last
        self.engine.framework.set_boundary(last)


def prepared(cfg: Config, module: nn.Module, optimizers: Sequence[Optimizer], *methods: str) -> Windows:
    """Prepare a module for training. Its calls, methods and parts then run through its engine. Collective.

    Raises:
        ConfigError: There is no optimizer, or several; ranks share samples, and the module has more than one model; or
            as in `unishard.prepare`.
    """
    if len(optimizers) != 1:
        problem = f"{len(optimizers)} optimizers for one module; an engine has one, with parameter groups"
        raise ConfigError([Problem("optimizer", problem)])
    splits = cfg.parallel.sequence.on
    inner = _model_in(module) if splits else ""
    engine = unishard.prepare(module, cfg, optimizers[0], reseed=False)
    if splits:  # a step gets whole samples; the model that it calls splits them
        engine.framework.routed(parts=[inner], itself=not inner)
    else:
        engine.framework.routed(*methods, parts=_parts_of(module))
    return Windows(engine)


def refuse_clip(problem: str) -> ConfigError:
    """The error of a clipping that engines cannot do."""
    return ConfigError([Problem("training.gradient_clipping", f"{problem}; engines clip by the norm of all gradients")])


def _model_in(module: nn.Module) -> str:
    """The model whose calls get parts of samples: the one inside a LightningModule; otherwise the module, whose name is
    empty.

    Raises:
        ConfigError: A LightningModule has parameters beside those of one model.
    """
    if not isinstance(module, LightningModule):
        return ""
    parts = _parts_of(module)
    if len(parts) == 1 and {*module.get_submodule(parts[0]).parameters()} == {*module.parameters()}:
        return parts[0]
    problem = (
        f"splits the samples of one model, but {type(module).__name__} has parameters in "
        f"{', '.join([*parts, 'its own attributes'] if [*module.parameters(recurse=False)] else parts)}; put them "
        "into one module that computes all that depends on them"
    )
    raise ConfigError([Problem("parallel.sequence.size", problem)])


def _parts_of(module: nn.Module) -> list[str]:
    """The modules that a loop may call directly: children, and those inside containers, which have no forward."""
    names: list[str] = []
    for name, child in module.named_children():
        if type(child).forward is nn.Module.forward:
            names += [f"{name}.{inner}" for inner in _parts_of(child)]
        elif next(child.parameters(), None) is not None:
            names.append(name)
    return names
