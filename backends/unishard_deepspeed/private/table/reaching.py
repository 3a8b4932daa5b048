"""Private names needed to read or change a run: gradients, master weights, discarded windows, checkpoints."""

from __future__ import annotations

from unishard.contract.private_api import PrivateApi
from unishard_deepspeed.private.table.classes import (
    BF16,
    ENGINE,
    FRAGMENT,
    INIT,
    RUN,
    SOURCE,
    STAGE_3,
    STAGES_1_2,
    TAG,
    of,
)

_GRADIENTS = "engine.grad, set_grad and grad_norms"
_MASTERS = "engine.parameter, set_parameter, gathered and parameter_norms"
_CHECKPOINTS = "A checkpoint"
_DIRECTLY = "read and write them at the end of the run, or install a tested DeepSpeed"
_TO_THE_END = "end every accumulation window with engine.step, or install a tested DeepSpeed"
_INSTALL = "install a tested DeepSpeed"
_EARLY = of(ENGINE, "_running_engine_step", "enable_backward_allreduce", "allreduce_gradients")
_FRAGMENTS = of(FRAGMENT, "lp_fragment_address", "hp_fragment")
_PARTS = of(INIT, "ds_numel", "ds_zero_partition_rank", "ds_process_group", "ds_id")
_LINKS = ("_hp_optimizer_states_linked", "_lazy_init_hp_params_optimizer_state")

REACHING = (
    PrivateApi("gradients-stage-0", f"{_GRADIENTS}, with no_shard,", _EARLY, RUN, SOURCE["engine"], _DIRECTLY),
    PrivateApi(
        name="gradients-bf16-stage-1",
        case=f"{_GRADIENTS}, with shard_optimizer in bf16,",
        names=(*_EARLY, *of(BF16, "bf16_groups", "fp32_groups_has_gradients", "fp32_groups_gradients")),
        versions=RUN,
        link=SOURCE["bf16-stage-1"],
        instead=_DIRECTLY,
    ),
    PrivateApi(
        name="gradients-stages-1-2",
        case=f"{_GRADIENTS}, with shard_optimizer or shard_grad_op,",
        names=(
            *_EARLY,
            *of(
                STAGES_1_2,
                "finalize_gradient_accumulation_boundary",
                "dp_process_group",
                "params_in_partition",
                "averaged_gradients",
            ),
            *of(
                STAGES_1_2,
                "_zero_padding",
                "grad_position",
                "get_param_id",
                "single_partition_of_fp32_groups",
                "_hp_mapping",
            ),
            *of(STAGES_1_2, "norm_for_param_grads", "local_overflow", "update_offload_overflow_tracker", "cpu_offload"),
            *of(FRAGMENT, "lp_fragment_address"),
        ),
        versions=RUN,
        link=SOURCE["stages-1-2"],
        instead=_DIRECTLY,
    ),
    PrivateApi(
        name="gradients-stage-3",
        case=f"{_GRADIENTS}, with full_shard,",
        names=(
            *_EARLY,
            *_PARTS,
            *of(
                STAGE_3,
                "finalize_gradient_accumulation_boundary",
                "_get_fp32_grad_state_partition",
                "norm_for_param_grads",
            ),
            *of(STAGE_3, "get_param_id", "_constant_buffered_norm2"),
        ),
        versions=RUN,
        link=SOURCE["stage-3"],
        instead=_DIRECTLY,
    ),
    PrivateApi(
        name="master-weights-bf16-stage-1",
        case=f"{_MASTERS}, with shard_optimizer in bf16,",
        names=(*of(BF16, "_hp_mapping", "dp_process_group"), *_FRAGMENTS),
        versions=RUN,
        link=SOURCE["bf16-stage-1"],
        instead=_DIRECTLY,
    ),
    PrivateApi(
        name="master-weights-stages-1-2",
        case=f"{_MASTERS}, with shard_optimizer or shard_grad_op,",
        names=(*of(STAGES_1_2, "_hp_mapping", "dp_process_group"), *_FRAGMENTS),
        versions=RUN,
        link=SOURCE["stages-1-2"],
        instead=_DIRECTLY,
    ),
    PrivateApi(
        name="master-weights-stage-3",
        case=f"{_MASTERS}, with full_shard,",
        names=(*_PARTS, *of(STAGE_3, "grad_position", "get_param_id", "_get_fp32_opt_state_partition")),
        versions=RUN,
        link=SOURCE["stage-3"],
        instead=_DIRECTLY,
    ),
    PrivateApi(
        "discard-stage-0",
        "engine.discard, or a load,",
        of(ENGINE, "_unmanaged_backward_count"),
        RUN,
        SOURCE["engine"],
        _TO_THE_END,
    ),
    PrivateApi(
        name="discard-stages-1-2",
        case="engine.discard, or a load, with shard_optimizer or shard_grad_op,",
        names=(
            *of(ENGINE, "_unmanaged_backward_count"),
            *of(
                STAGES_1_2,
                "micro_step_id",
                "_offload_accumulated_param_ids",
                "_epilogue_ran_this_backward",
                "averaged_gradients",
            ),
            *of(STAGES_1_2, "all_grad_tensors", "reset_cpu_buffers"),
        ),
        versions=RUN,
        link=SOURCE["stages-1-2"],
        instead=_TO_THE_END,
    ),
    PrivateApi(
        name="discard-stage-3",
        case="engine.discard, or a load, with full_shard,",
        names=(
            *of(ENGINE, "_unmanaged_backward_count"),
            *of(STAGE_3, "_pre_step", "_partition_all_parameters", "grad_partitions_flat_buffer", "averaged_gradients"),
            *of(STAGE_3, "reset_cpu_buffers"),
        ),
        versions=RUN,
        link=SOURCE["stage-3"],
        instead=_TO_THE_END,
    ),
    PrivateApi(
        name="checkpoints-bf16-stage-1",
        case=f"{_CHECKPOINTS}, with shard_optimizer in bf16,",
        names=(
            *of(BF16, "_hp_mapping", "update_lp_params", *_LINKS),
            *of(FRAGMENT, "hp_fragment_address", "param_group_index", "optim_fragment"),
        ),
        versions=RUN,
        link=SOURCE["bf16-stage-1"],
        instead=_INSTALL,
    ),
    PrivateApi(
        name="checkpoints-stages-1-2",
        case=f"{_CHECKPOINTS}, with shard_optimizer or shard_grad_op,",
        names=(
            *of(STAGES_1_2, "_hp_mapping", "update_lp_params", *_LINKS),
            *of(FRAGMENT, "hp_fragment_address", "param_group_index", "optim_fragment"),
        ),
        versions=RUN,
        link=SOURCE["stages-1-2"],
        instead=_INSTALL,
    ),
    PrivateApi(
        name="checkpoints-stage-3",
        case=f"{_CHECKPOINTS}, with full_shard,",
        names=(
            *of(STAGE_3, "grad_position", "get_param_id", "fp32_partitioned_groups_flat", "sub_group_to_group_id"),
            *of(STAGE_3, "_partition_all_parameters", "_reassign_or_swap_out_partitioned_parameters"),
        ),
        versions=RUN,
        link=SOURCE["stage-3"],
        instead=_INSTALL,
    ),
    PrivateApi(
        name="early-gradients-bf16-stage-1",
        case="A weight that the loss uses outside the forward, with shard_optimizer in bf16,",
        names=of(BF16, "backward_prologue", "clear_lp_grads"),
        versions=RUN,
        link=SOURCE["engine"],
        instead="read the weight inside the forward, or choose shard_grad_op",
    ),
    PrivateApi(
        name="unsharded-stage-3",
        case="engine.unsharded, with full_shard,",
        names=of(INIT, "is_external_param"),
        versions=RUN,
        link=f"{TAG}/runtime/zero/partitioned_param_coordinator.py",
        instead="choose shard_grad_op, or install a tested DeepSpeed",
    ),
)
