"""Where a file has the Trainer's arguments, and where those of its strategy; Lightning's names and classes of
strategies (2.6.6, pytorch/strategies and fabric/strategies), and what each runs.

LightningCLI writes `trainer: {strategy: {class_path, init_args}}`, below the subcommand or not; people write only the
Trainer's arguments, or a strategy's class with its arguments; Hydra says `_target_` for `class_path` and has the
arguments beside it; latent-diffusion and its kin say `target` and `params`, and may have the strategy beside the
Trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from unishard.config.describe import shown
from unishard.contract.entries import Path, Unreadable
from unishard.formats.names import each

CLASS = ("class_path", "_target_", "target")
"""The keys that name a class: jsonargparse's, Hydra's, and that of latent-diffusion."""
ARGUMENTS = ("init_args", "dict_kwargs", "params")
"""Sections with its arguments."""
_SUBCOMMANDS = ("fit", "validate", "test", "predict")


class Shape(NamedTuple):
    """Where things stand in a file."""

    top: Path
    """What surrounds everything: the subcommand, `lightning` as in latent-diffusion and its kin, or nothing."""
    trainer: Path
    """The Trainer's arguments."""
    strategy: Path
    """The strategy: a name or a class; the same as `trainer` in a file that is a strategy's class and arguments."""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Shape:
        """That of a file."""
        top = next(((word,) for word in _SUBCOMMANDS if _section(data.get(word)) and len(data) <= 2), ())
        if _section(data.get("lightning")) and _section(data["lightning"].get("trainer")):
            top = ("lightning",)
        inner = data[top[0]] if top else data
        root = next((word for word in ("trainer", "fabric") if _section(inner.get(word))), None)
        if root:
            apart = top == ("lightning",) and "strategy" in inner and "strategy" not in inner[root]
            return cls(top, (*top, root), (*top, "strategy") if apart else (*top, root, "strategy"))
        named = next((inner[word] for word in CLASS if isinstance(inner.get(word), str)), "")
        if named and short(named) not in ("Trainer", "Fabric"):
            return cls(top, top, top)
        return cls(top, top, (*top, "strategy"))

    def trainer_in(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """The section with the Trainer's arguments."""
        return _at(data, self.trainer)

    def beside(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """What stands beside the Trainer's section; nothing where there is no such section."""
        if self.trainer == self.top:
            return {}
        return {
            key: value
            for key, value in _at(data, self.top).items()
            if (*self.top, key) not in (self.trainer, self.strategy)
        }

    @property
    def apart(self) -> bool:
        """Whether the strategy stands beside the Trainer's section, as in latent-diffusion."""
        return not self.bare and self.strategy[:-1] != self.trainer

    def apart_in(self, data: Mapping[str, Any]) -> Any:
        """The strategy that stands there."""
        return _at(data, self.top)[self.strategy[-1]]

    @property
    def bare(self) -> bool:
        """Whether the file itself is the strategy's class."""
        return self.strategy == self.trainer


class Built(NamedTuple):
    """A class and its arguments."""

    path: str
    key: str
    """Which word named the class; empty for only a name."""
    arguments: Mapping[str, Any]
    inside: Mapping[str, Path]
    """Where each argument stands below it."""
    others: tuple[str, ...] = ()
    """Keys beside the class and its section of arguments."""


def named(value: Any) -> Any:
    """The value, or the name that Hydra looks up in `{_target_: hydra.utils.get_class, path: a.B}` and the like."""
    looks_up = isinstance(value, Mapping) and str(value.get("_target_")).startswith("hydra.utils.get_")
    return value.get("path", value) if looks_up else value


def built(value: Any) -> Built | None:
    """A class with arguments, as jsonargparse or Hydra says it, or only its name; None for anything else."""
    value = named(value)
    if isinstance(value, str) and value:
        return Built(value, "", {}, {})
    if not isinstance(value, Mapping):
        return None
    key = next((word for word in CLASS if isinstance(value.get(word), str)), None)
    if key is None:
        return None
    beside = {str(name): item for name, item in value.items() if name not in (*CLASS, *ARGUMENTS)}
    sections = [word for word in ARGUMENTS if word in value]
    if not sections:
        return Built(value[key], key, beside, dict.fromkeys(beside, ()))
    arguments: dict[str, Any] = {}
    inside: dict[str, Path] = {}
    for word in sections:
        section = value[word] if isinstance(value[word], Mapping) else {}
        arguments |= {str(name): item for name, item in section.items()}
        inside |= dict.fromkeys(map(str, section), (word,))
    return Built(value[key], key, arguments, inside, tuple(beside))


def short(path: Any) -> str:
    """The last word of a dotted name, such as a class without its module."""
    return str(path).rpartition(".")[2]


def _section(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value)


def _at(data: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    found: Any = data
    for name in path:
        found = found[name]
    return found  # type: ignore[no-any-return]  # `of` has looked


_NVME = {
    "stage": 3,
    "offload_optimizer": True,
    "offload_parameters": True,
    "remote_device": "nvme",
    "offload_params_device": "nvme",
    "offload_optimizer_device": "nvme",
}
NAMES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "auto": ("DDPStrategy", {}),
    "ddp": ("DDPStrategy", {}),
    **{
        f"ddp{start}{unused}": ("DDPStrategy", {})
        for start in ("", "_spawn", "_fork", "_notebook")
        for unused in ("", "_find_unused_parameters_true", "_find_unused_parameters_false")
    },
    "single_device": ("DDPStrategy", {}),
    "fsdp": ("FSDPStrategy", {}),
    "fsdp_cpu_offload": ("FSDPStrategy", {"cpu_offload": True}),
    "deepspeed": ("DeepSpeedStrategy", {}),
    "deepspeed_stage_1": ("DeepSpeedStrategy", {"stage": 1}),
    "deepspeed_stage_1_offload": ("DeepSpeedStrategy", {"stage": 1, "offload_optimizer": True}),
    "deepspeed_stage_2": ("DeepSpeedStrategy", {"stage": 2}),
    "deepspeed_stage_2_offload": ("DeepSpeedStrategy", {"stage": 2, "offload_optimizer": True}),
    "deepspeed_stage_3": ("DeepSpeedStrategy", {"stage": 3}),
    "deepspeed_stage_3_offload": (
        "DeepSpeedStrategy",
        {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
    ),
    "deepspeed_stage_3_offload_nvme": ("DeepSpeedStrategy", _NVME),
}
"""What each name of the registry runs, and the arguments that it stands for."""

_FORMER: Mapping[str, str] = {
    "fsdp_native": "fsdp",
    "fsdp_native_full_shard_offload": "fsdp_cpu_offload",
    "ddp_find_unused_parameters": "ddp_find_unused_parameters_true",
    "ddp2": "ddp",
}
"""Names of Lightning 1 that 2.6.6 does not know any more, and what they are called now."""

_NO_DEVICE = "only CUDA devices and CPUs are supported; write ddp, fsdp or deepspeed"
_NEVER: Mapping[str, str] = {
    "dp": "Lightning has removed DataParallel too; write ddp",
    "ddp_sharded": "Lightning has removed FairScale; write deepspeed_stage_2, which shards the same",
    "ddp_sharded_spawn": "Lightning has removed FairScale; write deepspeed_stage_2, which shards the same",
    "fsdp_fairscale": "Lightning has removed FairScale; write fsdp",
    "horovod": "Lightning has removed Horovod; write ddp",
    "colossalai": "Colossal-AI is not supported; write deepspeed_stage_3 or fsdp",
    "bagua": "Bagua is not supported; write ddp",
    **each("xla xla_debug xla_fsdp single_xla single_tpu tpu_spawn hpu_parallel hpu_single", _NO_DEVICE),
}

CLASSES: Mapping[str, str] = {
    "DDPStrategy": "DDPStrategy",
    "SingleDeviceStrategy": "DDPStrategy",
    "FSDPStrategy": "FSDPStrategy",
    "DDPFullyShardedNativeStrategy": "FSDPStrategy",
    "DeepSpeedStrategy": "DeepSpeedStrategy",
    "ModelParallelStrategy": "ModelParallelStrategy",
}
"""What each class runs."""


class Strategy(NamedTuple):
    """A strategy that a file asks for."""

    runs: str
    """The class: `DDPStrategy`, `FSDPStrategy`, `DeepSpeedStrategy` or `ModelParallelStrategy`."""
    fabric: bool
    """Whether it is Fabric's, which has other defaults and leaves more to the training script."""
    stands_for: Mapping[str, Any]
    """The arguments that its name stands for."""
    former: str = ""
    """What its name became since Lightning 1; empty for one that is known."""


def strategy_of(found: Built | None, value: Any, *, fabric: bool) -> Strategy:
    """What a strategy's name or class runs.

    Raises:
        Unreadable: unishard has none like it, or it is no strategy at all.
    """
    if value is None:
        return Strategy("DDPStrategy", fabric, {})
    if found is None:
        raise Unreadable(
            f"must be a strategy's name or class, got {shown(value)}; write fsdp, or class_path and init_args"
        )
    class_ = short(found.path)
    if class_ in CLASSES:
        return Strategy(CLASSES[class_], fabric or ".fabric." in found.path or "_fabric" in found.path, {})
    name = _FORMER.get(found.path.lower(), found.path.lower())
    if name in NAMES and not found.key:
        runs, stands_for = NAMES[name]
        return Strategy(
            runs, fabric or name == "deepspeed_stage_1_offload", stands_for, name if name != found.path.lower() else ""
        )
    if name in _NEVER:
        raise Unreadable(f"must be a strategy that is supported: {_NEVER[name]}")
    near = get_close_matches(class_, [*NAMES, *CLASSES], 1, 0.75)
    hint = (
        f"did you mean {near[0]!r}?"
        if near
        else f"write one of {', '.join(('ddp', 'fsdp', 'deepspeed_stage_2', *CLASSES))}"
    )
    raise Unreadable(f"must be a strategy of Lightning 2.6.6, got {shown(found.path)}; {hint}")
