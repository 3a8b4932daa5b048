"""Build an adapter from a model and the native config."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from inspect import signature
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from unishard.config import Precision
from unishard.contract.adapter import ShardedModel
from unishard.contract.backend import OptimizerBuilder
from unishard.contract.kit.kept_fp32 import is_kept
from unishard.contract.kit.replicated import is_replicated
from unishard.contract.kit.skipping import DeviceSkip
from unishard.contract.plan import RunPlan
from unishard.distributed import devices
from unishard.distributed.slices import holders_of
from unishard.errors import BackendError
from unishard_fsdp import options
from unishard_fsdp.cases.conditional_parameters import ConditionalParameters
from unishard_fsdp.cases.embeddings import UngatheredEmbeddings
from unishard_fsdp.cases.host_copies import HostCopies
from unishard_fsdp.cases.prefetched_units import PrefetchedUnits
from unishard_fsdp.cases.replicated_parameters import ReplicatedParameters
from unishard_fsdp.cases.toggled_parameters import ToggledParameters
from unishard_fsdp.cases.unreduced_gradients import UnreducedGradients
from unishard_fsdp.ddp.averaging import AveragingHook, wrap_ddp
from unishard_fsdp.ddp.model import DDPModel, DDPUpdates
from unishard_fsdp.gradients.stepped_shards import ShardViews
from unishard_fsdp.gradients.torch_gradients import TorchGradients
from unishard_fsdp.model import FSDPModel
from unishard_fsdp.private import PRIVATE_API, numbers
from unishard_fsdp.sharding import applying, collective_settings
from unishard_fsdp.spec import FSDPSpec
from unishard_fsdp.units.unit_forwards import UnitForwards
from unishard_fsdp.units.unit_parameters import own_parameters
from unishard_fsdp.updates import FSDPUpdates

_logger = logging.getLogger("unishard")
_SYNCS_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)
"""The argument of DistributedDataParallel, which torch 2.13 renamed."""


def build(model: nn.Module, plan: RunPlan) -> ShardedModel:
    """Shard a model in place and put an adapter around it. Collective.

    The optimizer is built last: `fully_shard` replaces the parameters by their shards.
    """
    spec, optimizer = cast(FSDPSpec, plan.engine), plan.optimizer
    native, precision, units = spec.options, plan.model.precision, plan.model.units
    device = devices.device_of(plan.topology)
    collective_settings.require(vars(native))
    collective_settings.require_device(vars(native), device)
    if any(is_kept(parameter) for parameter in model.parameters()):
        PRIVATE_API["kept-parameters"].require()
    forwards = UnitForwards(model, device, differs=bool(units.conditional))
    numbers.read_in_full()
    if isinstance(native, options.DistributedDataParallel):
        return _ddp(model, spec, native, device, cast(OptimizerBuilder, optimizer))
    if optimizer is not None:
        _require(native, patched=bool(units.conditional), mixed=_is_mixed(precision))
        # A plain last layer returns one; what writes to it is refused by unishard.
        warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(.*\) returned a view tensor", UserWarning)
    embeddings: list[nn.Module] = []
    if isinstance(native, options.Replicate):
        applying.apply_replicate(model, units.casting, device, native, forwards)
    else:
        frozen = precision if optimizer is None else None
        embeddings = applying.apply_fully_shard(model, units.gathered, device, native, forwards, frozen=frozen)
    built = None if optimizer is None else optimizer(_named(model))
    sharded = FSDPModel(model, device, spec, precision, forwards)
    if isinstance(native, options.FullyShard) and native.prefetch_numel and PRIVATE_API["pending-gathers"].works:
        sharded.cases.append(PrefetchedUnits(sharded.modules()))
    if built is not None:
        optional = [each for unit in units.conditional for each in unit.module.parameters() if not is_replicated(each)]
        sharded.updates = _updates(sharded, spec, built, embeddings, optional)
    return sharded


def _updates(
    model: FSDPModel,
    spec: FSDPSpec,
    optimizer: torch.optim.Optimizer,
    embeddings: Sequence[nn.Module],
    optional: Sequence[nn.Parameter],
) -> FSDPUpdates:
    """Give a model the cases of its run, and what trains it.

    Args:
        model: Sharded.
        spec: What is built.
        optimizer: Of its shards.
        embeddings: Those that are not gathered in backward.
        optional: Sharded parameters that a rank may skip.
    """
    native, device, modules, cases = model.native, model.device, model.modules(), model.cases
    late, shards = _averages_late(native), isinstance(native, options.FullyShard)
    toggled = ToggledParameters(model.module, modules, mixed=_is_mixed(model.precision))
    cases.append(toggled)
    if embeddings:
        cases.append(UngatheredEmbeddings(embeddings))
    if unreduced := _unreduced(model, between_groups=late):
        if optional:  # ranks use different parameters
            unreduced.patch_all()
        else:
            cases.append(unreduced)
    if optional:
        cases.append(ConditionalParameters(optional, modules, device))
    whole: Sequence[nn.Parameter] = ()
    if any(map(is_replicated, model.module.parameters())):
        replicated = ReplicatedParameters(model.module, model.precision)
        model.masters, whole = replicated.masters, replicated.trained
        cases.append(replicated)
    on_host = None
    if isinstance(native, options.FullyShard) and native.host_optimizer:
        pin_memory = native.host_optimizer.pin_memory and device.type == "cuda"
        in_units = [own_parameters(module) for module in reversed(modules)]  # as backward reduces them
        on_host = HostCopies(optimizer, model.masters, device, in_units, pin_memory=pin_memory)
        cases.append(on_host.gradients)
    stepped = on_host or ShardViews(optimizer, model.masters)
    gradients = TorchGradients(
        model.trained,
        device,
        stepped,
        steps_always=spec.steps_always,
        copies=_copies(native),
        skip=None if on_host else DeviceSkip(optimizer),
        own_hooks=stepped.hooks,
        before_change=stepped.before_change,
        masters=model.masters,
        others=dict.fromkeys(whole, dist.get_world_size()) if shards else _holders(model.trained),
    )
    skippable = {*(model.trained if native.reduce_scatter_unused_params else optional), *whole}
    return FSDPUpdates(model, gradients, stepped, toggled, averages_late=late, skippable=skippable)


def _holders(parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, int]:
    """How many ranks hold each slice."""
    groups = {each: holders_of(each) for each in parameters}
    return {each: dist.get_world_size(group) for each, group in groups.items() if group is not None}


def _is_mixed(precision: Precision) -> bool:
    """Whether gradients are summed in another dtype than they are computed in."""
    return precision.compute != "fp32"


def _unreduced(model: FSDPModel, *, between_groups: bool) -> UnreducedGradients | None:
    """What patches FSDP2 where gradients wait for the last micro-batch; None if they do not, or torch needs none."""
    if between_groups and PRIVATE_API["hybrid-accumulation"].needed:
        return UnreducedGradients(model.modules(), between_groups=True)
    waits = _is_mixed(model.precision) and model.native.requires_gradient_sync == "last_micro_batch"
    return UnreducedGradients(model.modules()) if waits and PRIVATE_API["mixed-accumulation"].needed else None


def _copies(native: options.FullyShard | options.Replicate) -> int:
    """Number of copies of each gradient over all ranks."""
    if isinstance(native, options.Replicate):
        return dist.get_world_size()
    return native.mesh.replicate if native.mesh else 1


def _averages_late(native: options.FullyShard | options.Replicate) -> bool:
    """Whether gradients are averaged between groups only at the end of a window, if this torch supports it."""
    if not isinstance(native, options.FullyShard) or native.requires_all_reduce != "last_micro_batch":
        return False
    hybrid = PRIVATE_API["hybrid-accumulation"]
    if not hybrid.works and dist.get_rank() == 0:
        _logger.warning("%s", hybrid.refusal())
    return hybrid.works


def _require(native: options.FullyShard | options.Replicate, *, patched: bool, mixed: bool) -> None:
    """Check that this torch supports the run, before anything is changed.

    Args:
        native: The native config.
        patched: Whether the model has conditional modules.
        mixed: Whether gradients are summed in another dtype than they are computed in.

    Raises:
        BackendError: A private name that the run needs is missing, or a setting needs a newer torch.
    """
    if patched:
        PRIVATE_API["conditional-modules"].require()
        if mixed and native.requires_gradient_sync == "last_micro_batch":
            PRIVATE_API["mixed-accumulation"].require()
    if native.reduce_scatter_unused_params:
        require_unused_params()


def require_unused_params() -> None:
    """Check that this torch has the setting `reduce_scatter_unused_params`.

    Raises:
        BackendError: It needs a newer one.
    """
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise BackendError(
            "native.fsdp.reduce_scatter_unused_params needs torch 2.13 or newer, and this is torch "
            f"{torch.__version__}; remove it, and name the classes that a rank may skip in sharding.conditional_modules"
        )


def _ddp(
    model: nn.Module,
    spec: FSDPSpec,
    native: options.DistributedDataParallel,
    device: torch.device,
    optimizer: OptimizerBuilder,
) -> DDPModel:
    applying.load(model, (), device)
    if native.conditional_modules:
        # DDP warns if a rank used all parameters in the first step, but later steps may differ (torch 2.13,
        # reducer.cpp).
        warnings.filterwarnings("ignore", "find_unused_parameters=True was specified", UserWarning)

    def wrap(averaging: AveragingHook) -> DistributedDataParallel:
        return wrap_ddp(
            averaging,
            module=model,
            device_ids=[device.index] if device.type == "cuda" else None,
            init_sync=False,  # `load` has broadcast everything
            bucket_cap_mb=native.bucket_cap_mb,  # torch 2.13 multiplies it by 2**20 and rounds
            find_unused_parameters=native.find_unused_parameters or bool(native.conditional_modules),
            static_graph=native.static_graph,
            gradient_as_bucket_view=native.gradient_as_bucket_view,
            **{_SYNCS_BUFFERS: native.forward_sync_buffers},
        )

    built = optimizer(_named(model))
    replicated = DDPModel(model, device, native, wrap)
    replicated.updates = DDPUpdates(replicated, spec, native, built)
    return replicated


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
