"""Build an adapter from a model and the native config."""

from __future__ import annotations

import warnings
from inspect import signature
from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from unishard.contract.adapter import InferenceAdapter
from unishard.contract.backend import OptimizerBuilder
from unishard.contract.kit.kept_fp32 import is_kept
from unishard.contract.kit.replicated import is_replicated
from unishard.contract.plan import RunPlan
from unishard.distributed import devices
from unishard.errors import BackendError
from unishard_fsdp import collective_settings, options, sharding
from unishard_fsdp.conditional import ConditionalParameters
from unishard_fsdp.ddp import AveragingHook, wrap_ddp
from unishard_fsdp.ddp_adapter import DDPAdapter
from unishard_fsdp.fsdp_adapter import FSDPAdapter
from unishard_fsdp.inference import FSDPInferenceAdapter
from unishard_fsdp.private import PRIVATE_API, numbers
from unishard_fsdp.replicated_parameters import ReplicatedParameters
from unishard_fsdp.spec import FSDPSpec
from unishard_fsdp.unit_forwards import UnitForwards

_SYNCS_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)
"""The argument of DistributedDataParallel, which torch 2.13 renamed."""


def build(model: nn.Module, plan: RunPlan) -> InferenceAdapter:
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
    if optimizer is None:
        fully = cast(options.FullyShard, native)
        sharding.apply_fully_shard(model, units.gathered, device, fully, forwards, frozen=precision)
        return FSDPInferenceAdapter(precision, model, device, forwards)
    if isinstance(native, options.DistributedDataParallel):
        return _ddp(model, spec, native, device, optimizer)
    _require(native, patched=bool(units.conditional), mixed=precision.compute != "fp32")
    # A plain last layer returns one; what writes to it is refused by unishard.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(.*\) returned a view tensor", UserWarning)
    embeddings: list[nn.Module] = []
    if isinstance(native, options.Replicate):
        sharding.apply_replicate(model, units.casting, device, native, forwards)
    else:
        embeddings = sharding.apply_fully_shard(model, units.gathered, device, native, forwards)
    conditional = ConditionalParameters(
        [
            parameter
            for unit in units.conditional
            for parameter in unit.module.parameters()
            if not is_replicated(parameter)
        ],
        device,
    )
    built = optimizer(_named(model))
    return FSDPAdapter(
        spec,
        precision,
        model,
        built,
        device,
        native=native,
        root=cast(FSDPModule, model),
        forwards=forwards,
        conditional=conditional,
        embeddings=embeddings,
        replicated=ReplicatedParameters(model, precision),
    )


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
) -> DDPAdapter:
    sharding.load(model, (), device)
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

    return DDPAdapter(spec, model, optimizer(_named(model)), device, native=native, wrap=wrap)


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
