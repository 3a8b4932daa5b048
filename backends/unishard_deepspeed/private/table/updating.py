"""Private names needed by unusual updates."""

from __future__ import annotations

from unishard.contract.private_api import PrivateApi
from unishard_deepspeed.private.table.classes import BF16, FRAGMENT, OFFLOAD, RUN, SOURCE, STAGE_3, STAGES_1_2, TAG, of

_USE_ALL = "let every parameter be used in every micro-batch, or install a tested DeepSpeed"
_SKIP = "set training.nonfinite to skip"
_LINKS = "_hp_optimizer_states_linked"

UPDATING = (
    PrivateApi(
        name="unused-bf16-stage-1",
        case="An update with an unused parameter, with shard_optimizer in bf16,",
        names=(*of(BF16, "_hp_mapping", _LINKS), *of(FRAGMENT, "hp_fragment_address", "param_group_index")),
        versions=RUN,
        link=SOURCE["bf16-stage-1"],
        instead=_USE_ALL,
    ),
    PrivateApi(
        name="unused-stages-1-2",
        case="An update with an unused parameter, with shard_optimizer or shard_grad_op,",
        names=(*of(STAGES_1_2, "_hp_mapping", _LINKS), *of(FRAGMENT, "hp_fragment_address", "param_group_index")),
        versions=RUN,
        link=SOURCE["stages-1-2"],
        instead=_USE_ALL,
    ),
    PrivateApi(
        name="unused-stage-3",
        case="An update with an unused parameter, with full_shard,",
        names=of(STAGE_3, "grad_position", "get_param_id", "fp32_partitioned_groups_flat"),
        versions=RUN,
        link=SOURCE["stage-3"],
        instead=_USE_ALL,
    ),
    PrivateApi(
        name="kept-parameters-stages-1-2",
        case="precision.keep_fp32 with shard_grad_op",
        names=of(STAGES_1_2, "_gradient_reduction_buffer_dtype"),
        versions=RUN,
        link=SOURCE["stages-1-2"],
        instead="set precision.keep_fp32 to [], or sharding.strategy to full_shard",
    ),
    PrivateApi(
        name="kept-parameters-stage-3",
        case="precision.keep_fp32 with full_shard",
        names=(*of("deepspeed.runtime.zero.stage3", "defragment"), *of(STAGE_3, "_set_fp16_partitioned_groups_flat")),
        versions=RUN,
        link=SOURCE["stage-3"],
        instead="set precision.keep_fp32 to [], or sharding.strategy to shard_grad_op",
    ),
    PrivateApi(
        name="stale-gradients",
        case="A micro-batch that does not use a parameter, with full_shard,",
        names=of(STAGE_3, "grad_partitions_flat_buffer"),
        versions=RUN,
        link=SOURCE["stage-3"],
        instead=_USE_ALL,
    ),
    PrivateApi(
        name="gathers-stage-3",
        case="A gather behind an update without a wait of the host, with full_shard on CUDA,",
        names=(*of(STAGE_3, "parameter_offload"), *of(OFFLOAD, "_DeepSpeedZeRoOffload__allgather_stream")),
        versions=RUN,
        link=f"{TAG}/runtime/zero/partitioned_param_coordinator.py#L606",
        instead="nothing: the host then waits for each update",
    ),
    PrivateApi(
        name="stale-offloaded-stages-1-2",
        case="An update with offload.optimizer that is skipped, or does not use a parameter, with shard_optimizer or "
        "shard_grad_op,",
        names=of(STAGES_1_2, "single_partition_of_fp32_groups", "averaged_gradients", "accumulated_grads_in_cpu"),
        versions=RUN,
        link=SOURCE["stages-1-2"],
        instead="set offload.optimizer to none, or install a tested DeepSpeed",
    ),
    PrivateApi(
        name="stale-offloaded-stage-3",
        case="An update with offload.optimizer that is skipped, or does not use a parameter, with full_shard,",
        names=of(STAGE_3, "fp32_partitioned_groups_flat"),
        versions=RUN,
        link=SOURCE["stage-3"],
        instead="set offload.optimizer to none, or install a tested DeepSpeed",
    ),
    PrivateApi(
        name="divisor-bf16-stage-1",
        case="backward with num_items, with shard_optimizer in bf16,",
        names=of(BF16, "fp32_groups_gradients_flat"),
        versions=RUN,
        link=SOURCE["bf16-stage-1"],
        instead="pass mean losses",
    ),
    PrivateApi(
        name="divisor-stages-1-2",
        case="fp16, and backward with num_items, with shard_optimizer or shard_grad_op,",
        names=of(STAGES_1_2, "loss_scale"),
        versions=RUN,
        link=SOURCE["stages-1-2"],
        instead="set precision to bf16, and pass mean losses",
    ),
    PrivateApi(
        name="divisor-stage-3",
        case="fp16, and backward with num_items, with full_shard,",
        names=of(STAGE_3, "loss_scale"),
        versions=RUN,
        link=SOURCE["stage-3"],
        instead="set precision to bf16, and pass mean losses",
    ),
    PrivateApi(
        name="clipping",
        case="engine.step with another clip_grad_norm than training.gradient_clipping",
        names=(*of(BF16, "clip_grad"), *of(STAGES_1_2, "clip_grad"), *of(STAGE_3, "clip_grad")),
        versions=RUN,
        link="https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/docs/_pages/config-json.md",
        instead="set training.gradient_clipping for the whole run",
    ),
    PrivateApi(
        name="nonfinite-stage-0",
        case="fp16 with no_shard",
        names=of("deepspeed.runtime.fp16.unfused_optimizer", "is_invalid_grad_norm"),
        versions=RUN,
        link=SOURCE["stage-0"],
        instead="set precision to bf16",
    ),
    PrivateApi(
        name="nonfinite-bf16-stage-1",
        case="training.nonfinite: ignore with shard_optimizer in bf16",
        names=of("deepspeed.runtime.bf16_optimizer", "is_invalid_grad_norm"),
        versions=RUN,
        link=SOURCE["bf16-stage-1"],
        instead=_SKIP,
    ),
    PrivateApi(
        name="nonfinite-stages-1-2",
        case="training.nonfinite: ignore with shard_optimizer or shard_grad_op",
        names=(*of("deepspeed.runtime.zero.stage_1_and_2", "is_invalid_grad_norm"), *of(STAGES_1_2, "check_overflow")),
        versions=RUN,
        link=SOURCE["stages-1-2"],
        instead=_SKIP,
    ),
    PrivateApi(
        name="nonfinite-stage-3",
        case="training.nonfinite: ignore with full_shard",
        names=of("deepspeed.runtime.zero.stage3", "is_invalid_grad_norm"),
        versions=RUN,
        link=SOURCE["stage-3"],
        instead=_SKIP,
    ),
)
