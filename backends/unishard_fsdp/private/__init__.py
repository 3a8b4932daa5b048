"""Private names of torch that rare cases need; the modules here use them. Imports no torch.

Every other module of this package uses documented names only.
"""

from __future__ import annotations

from unishard.contract.private_api import PrivateApi, by_name

__all__ = ["PRIVATE_API"]

_RUN = "torch 2.11 to 2.15"
_SOURCE = "https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_fully_shard"
_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState."


def _group(names: str) -> tuple[str, ...]:
    return tuple(
        f"torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.{name}" for name in names.split()
    )


def _parameter(names: str) -> tuple[str, ...]:
    return tuple(f"torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.{name}" for name in names.split())


_GROUPS = (
    "torch.distributed.fsdp:FSDPModule._get_fsdp_state",
    f"{_STATE}_fsdp_param_groups or {_STATE}_fsdp_param_group",
    *_group("fsdp_params"),
)
_SUMS = (
    *_GROUPS,
    *_group("post_backward reduce_grads"),
    *_parameter("_unsharded_param unsharded_param unsharded_accumulated_grad accumulate_unsharded_grad_if_needed"),
    *_parameter("to_accumulated_grad_if_needed reduce_dtype"),
)

PRIVATE_API = by_name(
    PrivateApi(
        name="mixed-accumulation",
        case="Accumulation without reduction in bf16 or fp16, where a micro-batch does not use all of a unit,",
        names=_SUMS,
        versions="torch 2.11 to 2.14",
        link=f"{_SOURCE}/_fsdp_collectives.py#L552",
        instead="name the class of the unused module in sharding.units, or set native.fsdp.requires_gradient_sync to "
        "every_micro_batch",
        until="2.15",
    ),
    PrivateApi(
        name="hybrid-accumulation",
        case="A hybrid strategy that averages between groups only at the end of a window",
        names=(
            *_SUMS,
            *_group("all_reduce_grads _partial_reduce_output"),
            *_parameter("padded_sharded_param_size"),
        ),
        versions="torch 2.11 to 2.14",
        link=f"{_SOURCE}/_fsdp_collectives.py#L634",
        instead="nothing to do: gradients are averaged between groups in each micro-batch",
        until="2.15",
    ),
    PrivateApi(
        name="pending-gathers",
        case="Gathering units ahead, with full_shard,",
        names=(*_GROUPS, *_group("wait_for_unshard")),
        versions=_RUN,
        link=f"{_SOURCE}/_fsdp_param_group.py#L373",
        instead="nothing to do: units are not gathered ahead",
    ),
    PrivateApi(
        name="shard-memory",
        case="offload.params: nvme",
        names=(
            *_GROUPS,
            *_parameter("_sharded_param_data sharded_param"),
            "torch.distributed.tensor:DTensor._local_tensor",
        ),
        versions=_RUN,
        link=f"{_SOURCE}/_fsdp_param.py#L995",
        instead="set offload.params to cpu",
    ),
    PrivateApi(
        name="slices",
        case="parallel.expert or parallel.tensor",
        names=(
            "torch.distributed.fsdp._fully_shard._fsdp_common:ShardPlacementResult",
            "torch.distributed.fsdp._fully_shard._fsdp_common:FSDPMeshInfo",
            "torch.distributed.fsdp._fully_shard._fsdp_common:HSDPMeshInfo",
        ),
        versions="torch 2.12 to 2.15",
        link=f"{_SOURCE}/_fsdp_common.py",
        instead="install torch 2.12 or newer, choose backend: deepspeed, or remove the section parallel",
    ),
    PrivateApi(
        name="released-modules",
        case="engine.framework.release()",
        names=("torch.distributed._composable_state:_module_state_mapping",),
        versions=_RUN,
        link="https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/_composable_state.py#L11",
        instead="build the model again, and load its weights with engine.weights.load",
    ),
    PrivateApi(
        name="conditional-modules",
        case="sharding.conditional_modules with a sharded strategy",
        names=(
            *_GROUPS,
            *_group("post_backward reduce_grads _training_state"),
            "torch.distributed.fsdp._fully_shard._fsdp_common:TrainingState.POST_BACKWARD",
            *_parameter("_unsharded_param unsharded_param unsharded_accumulated_grad sharded_param"),
        ),
        versions=_RUN,
        link=f"{_SOURCE}/_fsdp_state.py#L395",
        instead="use every module in every forward and remove sharding.conditional_modules, or choose backend "
        "deepspeed",
    ),
    PrivateApi(
        name="kept-parameters",
        case="precision.keep_fp32, where parameters of a unit stay in fp32 beside others in bf16 or fp16,",
        names=(
            *_GROUPS,
            *_group("_init_mp_dtypes post_backward reduce_grads"),
            *_parameter("param_dtype sharded_param _unsharded_param accumulate_unsharded_grad_if_needed"),
            *_parameter("to_accumulated_grad_if_needed"),
        ),
        versions=_RUN,
        link=f"{_SOURCE}/_fsdp_param.py#L586",
        instead="set precision.keep_fp32 to [], choose backend deepspeed, or train in fp32",
    ),
    PrivateApi(
        name="discard",
        case="engine.discard() in a window whose gradients are not reduced yet",
        names=(
            *_GROUPS,
            *_group("_partial_reduce_output"),
            *_parameter("_unsharded_param unsharded_accumulated_grad"),
        ),
        versions="torch 2.11 to 2.14",
        link=f"{_SOURCE}/_fsdp_param_group.py#L511",
        instead="set native.fsdp.requires_gradient_sync to every_micro_batch",
        until="2.15",
    ),
    PrivateApi(
        name="trainable-dtypes",
        case="Parameters that are frozen or unfrozen after prepare in bf16 or fp16",
        names=(*_GROUPS, *_group("_init_mp_dtypes")),
        versions=_RUN,
        link=f"{_SOURCE}/_fsdp_param_group.py#L273",
        instead="set requires_grad before unishard.prepare, or train in fp32",
    ),
    PrivateApi(
        name="local-tensors",
        case="An update that asks no parameter for a new view of its shard",
        names=("torch.distributed.tensor:DTensor._local_tensor",),
        versions=_RUN,
        link="https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/tensor/_api.py#L604",
        instead="nothing to do: an update takes some microseconds more for each parameter",
    ),
    PrivateApi(
        name="numbers",
        case="A number of a sharded weight, as float(weight.norm()),",
        names=(
            "torch.distributed.tensor:DTensor._op_dispatcher._custom_op_handlers",
            "torch:ops.aten._local_scalar_dense",
        ),
        versions=_RUN,
        link="https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/tensor/_sharding_prop.py#L745",
        instead="read weights with engine.weights.read(name), and their norms with engine.weights.norms()",
    ),
    PrivateApi(
        name="ddp-buckets",
        case="DistributedDataParallel on more than two ranks that adds up gradients in the same order after a restart",
        names=(
            "torch.nn.parallel:DistributedDataParallel._build_params_for_reducer",
            "torch.nn.parallel:DistributedDataParallel.reducer",
            "torch.distributed:Reducer._push_all_rebuilt_params",
            "torch.distributed:Reducer._rebuild_buckets",
        ),
        versions=_RUN,
        link="https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/distributed/c10d/reducer.cpp#L1799",
        instead="nothing to do: a resumed run differs from an uninterrupted one in the last digits of its first update",
    ),
)
