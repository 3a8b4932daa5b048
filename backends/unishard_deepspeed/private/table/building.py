"""Private names needed to create or close an engine."""

from __future__ import annotations

from unishard.contract.private_api import PrivateApi
from unishard_deepspeed.private.table.classes import (
    BF16,
    ENGINE,
    INIT,
    OFFLOAD,
    RUN,
    SOURCE,
    STAGE_3,
    STAGES_1_2,
    TAG,
    of,
)

_NO_CONDITIONAL = "leave sharding.conditional_modules empty, or install a tested DeepSpeed"
_NOT_HYBRID = "choose full_shard or shard_grad_op, or install a tested DeepSpeed"

BUILDING = (
    PrivateApi(
        name="leaf-gradients",
        case="full_shard with units",
        names=(
            *of(STAGE_3, "_grad_acc_hooks", "_leaf_module_hooks", "create_reduce_and_remove_grad_hooks"),
            *of(OFFLOAD, "ds_z3_leaf_module"),
        ),
        versions=RUN,
        link="https://github.com/deepspeedai/DeepSpeed/issues/5524",
        instead="choose shard_grad_op, or install a tested DeepSpeed",
    ),
    PrivateApi(
        name="fp16-on-cpu",
        case="fp16 on a CPU",
        names=of("deepspeed.accelerator.cpu_accelerator:CPU_Accelerator", "is_fp16_supported"),
        versions=RUN,
        link=f"{TAG}/../accelerator/cpu_accelerator.py",
        instead="set precision to bf16",
    ),
    PrivateApi(
        name="nvme-parameters",
        case="offload.params: nvme",
        names=of(INIT, "param_swapper"),
        versions=RUN,
        link=f"{TAG}/runtime/zero/partition_parameters.py",
        instead="set offload.params to cpu",
    ),
    PrivateApi(
        name="empty-parameters",
        case="full_shard of a model with parameters that have no elements",
        names=of(INIT, "ds_process_group", "partition_numel"),
        versions=RUN,
        link=f"{TAG}/runtime/zero/partitioned_param_coordinator.py",
        instead="choose shard_grad_op, or remove these parameters",
    ),
    PrivateApi(
        name="second-process-group",
        case="A process group that was started again in the same process",
        names=(*of("deepspeed.utils.groups", "_release_process_group_references"), *of("deepspeed.comm.comm", "cdb")),
        versions=RUN,
        link=f"{TAG}/utils/groups.py",
        instead="start a new process for each run",
    ),
    PrivateApi(
        name="no-compiler",
        case="Starting on a CPU without compiling shm_comm",
        names=of("deepspeed.ops", "_probe_compatible_ops"),  # the table itself would be filled by a look at it
        versions=RUN,
        link=f"{TAG}/comm/torch.py",
        instead="wait half a minute for the compiler in the first run",
    ),
    PrivateApi(
        name="closed-engines",
        case="A model that is used after its engine was closed",
        names=(
            *of(ENGINE, "module_forward_pre_hook", "module_forward_post_hook"),
            *of("deepspeed.runtime.zero.parameter_offload", "FWD_MODULE_STACK"),
            *of(STAGE_3, "_z3_optimizer"),
        ),
        versions=RUN,
        link=SOURCE["engine"],
        instead="build the model anew",
    ),
    PrivateApi(
        name="freed-models",
        case="full_shard engines one after the other in a process, whose models are freed",
        names=of(
            "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator",
            "_PartitionedParameterCoordinator__params_to_release",
        ),
        versions=RUN,
        link=f"{TAG}/runtime/zero/partitioned_param_coordinator.py",
        instead="start a new process for each engine",
    ),
    PrivateApi(
        name="replica-groups-stages-1-2",
        case="hybrid_shard_grad_op",
        names=(
            *of("deepspeed.utils.groups", "mpu"),
            *of(STAGES_1_2, "finalize_gradient_accumulation_boundary", "cpu_offload", "averaged_gradients"),
            *of("deepspeed.runtime.zero.stage_1_and_2:GradPartitionBufferGroup", "flat_partition"),
            *of(STAGES_1_2, "single_partition_of_fp32_groups", "params_in_partition", "get_param_id", "grad_position"),
            *of(STAGES_1_2, "norm_for_param_grads", "bit16_groups_flat"),
        ),
        versions=RUN,
        link=SOURCE["stages-1-2"],
        instead=_NOT_HYBRID,
    ),
    PrivateApi(
        name="replica-groups-stage-3",
        case="hybrid_shard",
        names=(
            *of("deepspeed.utils.groups", "mpu"),
            *of(
                STAGE_3,
                "finalize_gradient_accumulation_boundary",
                "grad_partitions_flat_buffer",
                "offload_optimizer",
                "fp16_groups",
            ),
            *of(STAGE_3, "_offload_boundary_param_ids", "_get_param_partition_rank"),
            *of(INIT, "ds_id", "ds_numel", "partition_numel"),
        ),
        versions=RUN,
        link=SOURCE["stage-3"],
        instead=_NOT_HYBRID,
    ),
    PrivateApi(
        name="second-copies",
        case="A number in sharding.reshard_after_forward, or zero_hpz_partition_size,",
        names=(
            *of("deepspeed.utils.groups", "_ZERO_PARAM_INTRA_PARALLEL_GROUP"),
            *of(INIT, "zero_param_process_group", "ds_secondary_tensor"),
        ),
        versions=RUN,
        link=f"{TAG}/utils/groups.py",
        instead="set sharding.reshard_after_forward to true or false, or install a tested DeepSpeed",
    ),
    PrivateApi(
        name="conditional-modules-bf16-stage-1",
        case="sharding.conditional_modules with shard_optimizer in bf16",
        names=of(BF16, "get_grads_for_norm", "bf16_groups", "fp32_groups_has_gradients"),
        versions=RUN,
        link=SOURCE["bf16-stage-1"],
        instead=_NO_CONDITIONAL,
    ),
    PrivateApi(
        name="conditional-modules-stages-1-2",
        case="sharding.conditional_modules with shard_optimizer or shard_grad_op",
        names=(
            *of(STAGES_1_2, "create_gradient_handling_hooks", "_grad_acc_hooks", "bit16_groups", "partition_gradients"),
            *of(STAGES_1_2, "independent_gradient_partition_epilogue", "reduce_gradients"),
            *of(STAGES_1_2, "process_gradients", "get_gradient_for_reduction"),
        ),
        versions=RUN,
        link=SOURCE["stages-1-2"],
        instead=_NO_CONDITIONAL,
    ),
    PrivateApi(
        name="conditional-modules-stage-3",
        case="sharding.conditional_modules with full_shard",
        names=(
            *of(
                STAGE_3,
                "create_reduce_and_remove_grad_hooks",
                "_grad_acc_hooks",
                "independent_gradient_partition_epilogue",
            ),
            *of(STAGE_3, "reduce_ready_partitions_and_remove_grads", "parameter_offload"),
            *of(OFFLOAD, "forward_hooks", "backward_hooks"),
            *of(INIT, "ds_numel", "all_gather", "partition"),
        ),
        versions=RUN,
        link=SOURCE["stage-3"],
        instead=_NO_CONDITIONAL,
    ),
)
