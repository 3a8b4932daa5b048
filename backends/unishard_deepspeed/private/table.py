"""The cases of `PRIVATE_API`, only data; those that differ between DeepSpeed's optimizers are the `Cases` of each."""

from __future__ import annotations

from typing import NamedTuple

from unishard.contract.private_api import PrivateApi

_OWNERS = {
    "stages_1_2": "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.",
    "stage_3": "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.",
    "engine": "deepspeed.runtime.engine:DeepSpeedEngine.",
    "init": "deepspeed.runtime.zero.partition_parameters:Init.",
    "offload": "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload.",
    "coordinator": "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator.",
    "fragment": "deepspeed.utils.tensor_fragment:tensor_fragment.",
    "stages_1_2_file": "deepspeed.runtime.zero.stage_1_and_2:",
    "stage_3_file": "deepspeed.runtime.zero.stage3:",
    "groups": "deepspeed.utils.groups:",
}
"""Classes and modules that several cases need names of."""
_TAG = "https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed"
_ENGINE_FILE = f"{_TAG}/runtime/engine.py"
_COORDINATOR_FILE = f"{_TAG}/runtime/zero/partitioned_param_coordinator.py"
_STAGES_1_2_FILE = f"{_TAG}/runtime/zero/stage_1_and_2.py"
_STAGE_3_FILE = f"{_TAG}/runtime/zero/stage3.py"


def _of(**names: str) -> tuple[str, ...]:
    """Names, by their owner."""
    return tuple(f"{_OWNERS[owner]}{name}" for owner, listed in names.items() for name in listed.split())


def _row(name: str, case: str, names: tuple[str, ...], link: str, instead: str) -> PrivateApi:
    """A case that was run on DeepSpeed 0.19.8."""
    return PrivateApi(name, case, names, "0.19.8", link, instead)


_USE_ALL = "let every parameter be used in every micro-batch, or install a tested DeepSpeed"
_NOT_HYBRID = "choose full_shard or shard_grad_op, or install a tested DeepSpeed"
_NOT_STAGE_3 = "choose shard_grad_op, or install a tested DeepSpeed"
_DIRECTLY = "read and write them at the end of the run, or install a tested DeepSpeed"
_TO_THE_END = "end every accumulation window with engine.step, or install a tested DeepSpeed"

_NOTHING = _row("", "", (), "", "")
"""Where DeepSpeed's documented interface is enough."""


class Cases(NamedTuple):
    """What one of DeepSpeed's optimizers needs for each case that may need private names of it."""

    leaf_gradients: PrivateApi = _NOTHING
    replica_groups: PrivateApi = _NOTHING
    conditional_modules: PrivateApi = _NOTHING
    replicated: PrivateApi = _NOTHING
    unused: PrivateApi = _NOTHING
    kept_parameters: PrivateApi = _NOTHING
    stale_gradients: PrivateApi = _NOTHING
    stale_offloaded: PrivateApi = _NOTHING
    gathers: PrivateApi = _NOTHING
    weight_memory: PrivateApi = _NOTHING
    frees: PrivateApi = _NOTHING
    divisor: PrivateApi = _NOTHING
    fp16: PrivateApi = _NOTHING
    nonfinite: PrivateApi = _NOTHING
    gradients: PrivateApi = _NOTHING
    master_weights: PrivateApi = _NOTHING
    discard: PrivateApi = _NOTHING
    checkpoints: PrivateApi = _NOTHING
    unsharded: PrivateApi = _NOTHING
    slices: PrivateApi = _NOTHING


_GROUPS_OF_SLICES = _of(
    groups="_EXPERT_PARALLEL_GROUP _EXPERT_DATA_PARALLEL_GROUP _EXPERT_PARALLEL_GROUP_RANKS "
    "_EXPERT_DATA_PARALLEL_GROUP_RANKS"
)
_MOE = ("deepspeed.moe.experts:Experts.allreduce", "deepspeed.moe.layer:MoE")
_UNSLICED = "set parallel.expert and parallel.tensor to 1, choose backend: fsdp, or install a tested DeepSpeed"

_SHARED = {
    "conditional_modules": (
        "sharding.conditional_modules with {}",
        "leave sharding.conditional_modules empty, or install a tested DeepSpeed",
    ),
    "replicated": ("sharding.replicate with {}", "leave sharding.replicate empty, or install a tested DeepSpeed"),
    "unused": ("An update with an unused parameter, with {},", _USE_ALL),
    "stale_offloaded": (
        "An update with offload.optimizer that is skipped, or does not use a parameter, with {},",
        "set offload.optimizer to none, or install a tested DeepSpeed",
    ),
    "divisor": ("fp16, and backward with num_items, with {},", "set precision to bf16, and pass mean losses"),
    "nonfinite": ("training.nonfinite: ignore with {}", "set training.nonfinite to skip"),
    "gradients": ("engine.gradients.read, write and norms, with {},", _DIRECTLY),
    "master_weights": ("engine.weights.read, write, gathered and norms, with {},", _DIRECTLY),
    "discard": ("engine.discard, or a load, with {},", _TO_THE_END),
    "checkpoints": ("A checkpoint, with {},", "install a tested DeepSpeed"),
}
"""Cases of stages 1 to 3: what they are, with `{}` for the strategies, and what to do instead."""


def _shared(stage: str, strategies: str, link: str, **names: tuple[str, ...]) -> dict[str, PrivateApi]:
    return {
        case: _row(f"{case.replace('_', '-')}-{stage}", text.format(strategies), names[case], link, instead)
        for case, (text, instead) in _SHARED.items()
    }


_EARLY = _of(engine="_running_engine_step enable_backward_allreduce allreduce_gradients")
_PARTS = "ds_numel ds_zero_partition_rank ds_process_group ds_id"
_COUNT = "_unmanaged_backward_count"
_LAST_AT_STAGE_2 = _of(
    stages_1_2="create_gradient_handling_hooks _grad_acc_hooks bit16_groups partition_gradients "
    "independent_gradient_partition_epilogue reduce_gradients process_gradients "
    "get_gradient_for_reduction"
)
_LAST_AT_STAGE_3 = _of(
    stage_3="create_reduce_and_remove_grad_hooks _grad_acc_hooks independent_gradient_partition_epilogue "
    "reduce_ready_partitions_and_remove_grads parameter_offload",
    offload="forward_hooks backward_hooks",
    init="ds_numel all_gather partition",
)
"""To reduce some gradients at the end of backward, and to gather some parameters apart from the rest."""

_NOT_INVALID = _row(
    "nonfinite-stage-0",
    "fp16 with no_shard",
    ("deepspeed.runtime.fp16.unfused_optimizer:is_invalid_grad_norm",),
    f"{_TAG}/runtime/fp16/unfused_optimizer.py",
    "set precision to bf16",
)
OF_STAGE_0 = Cases(
    fp16=_NOT_INVALID,
    nonfinite=_NOT_INVALID,
    gradients=_row(
        "gradients-stage-0", "engine.gradients.read, write and norms, with no_shard,", _EARLY, _ENGINE_FILE, _DIRECTLY
    ),
    slices=_row(
        "slices-stage-0",
        "parallel.expert or parallel.tensor with no_shard",
        (
            *_GROUPS_OF_SLICES,
            *_of(engine="group_name"),
            *_MOE,
            "deepspeed.runtime.utils:CheckOverflow.has_moe_params",
            "deepspeed.runtime.utils:CheckOverflow.zero_reduce_scatter",
            "deepspeed.runtime.fp16.unfused_optimizer:FP16_UnfusedOptimizer.overflow_checker",
        ),
        _ENGINE_FILE,
        _UNSLICED,
    ),
    discard=_row("discard-stage-0", "engine.discard, or a load,", _of(engine=_COUNT), _ENGINE_FILE, _TO_THE_END),
)

OF_STAGES_1_2 = Cases(
    replica_groups=_row(
        "replica-groups-stages-1-2",
        "hybrid_shard_grad_op",
        _of(
            groups="mpu",
            stages_1_2="finalize_gradient_accumulation_boundary cpu_offload averaged_gradients "
            "single_partition_of_fp32_groups params_in_partition get_param_id grad_position norm_for_param_grads "
            "bit16_groups_flat",
            stages_1_2_file="GradPartitionBufferGroup.flat_partition",
        ),
        _STAGES_1_2_FILE,
        _NOT_HYBRID,
    ),
    kept_parameters=_row(
        "kept-parameters-stages-1-2",
        "precision.keep_fp32 with shard_optimizer or shard_grad_op",
        _of(stages_1_2="_gradient_reduction_buffer_dtype"),
        _STAGES_1_2_FILE,
        "set precision.keep_fp32 to [], or sharding.strategy to full_shard",
    ),
    slices=_row(
        "slices-stages-1-2",
        "parallel.expert or parallel.tensor with shard_optimizer or shard_grad_op",
        (*_GROUPS_OF_SLICES, *_of(stages_1_2="is_moe_group real_dp_process_group", engine="group_name"), *_MOE),
        _STAGES_1_2_FILE,
        _UNSLICED,
    ),
    **_shared(
        "stages-1-2",
        "shard_optimizer or shard_grad_op",
        _STAGES_1_2_FILE,
        conditional_modules=_LAST_AT_STAGE_2,
        replicated=_LAST_AT_STAGE_2,
        unused=_of(
            stages_1_2="_hp_mapping _hp_optimizer_states_linked", fragment="hp_fragment_address param_group_index"
        ),
        stale_offloaded=_of(stages_1_2="single_partition_of_fp32_groups averaged_gradients accumulated_grads_in_cpu"),
        divisor=_of(stages_1_2="loss_scale"),
        nonfinite=_of(stages_1_2_file="is_invalid_grad_norm", stages_1_2="check_overflow"),
        gradients=_EARLY
        + _of(
            stages_1_2="finalize_gradient_accumulation_boundary dp_process_group params_in_partition "
            "averaged_gradients _zero_padding grad_position get_param_id single_partition_of_fp32_groups _hp_mapping "
            "norm_for_param_grads local_overflow update_offload_overflow_tracker cpu_offload",
            fragment="lp_fragment_address",
        ),
        master_weights=_of(stages_1_2="_hp_mapping dp_process_group", fragment="lp_fragment_address hp_fragment"),
        discard=_of(
            engine=_COUNT,
            stages_1_2="micro_step_id _offload_accumulated_param_ids _epilogue_ran_this_backward averaged_gradients "
            "all_grad_tensors reset_cpu_buffers params_already_reduced ipg_buckets",
        ),
        checkpoints=_of(
            stages_1_2="_hp_mapping update_lp_params _hp_optimizer_states_linked _lazy_init_hp_params_optimizer_state",
            fragment="hp_fragment_address param_group_index optim_fragment",
        ),
    ),
)

OF_STAGE_3 = Cases(
    leaf_gradients=_row(
        "leaf-gradients",
        "full_shard with units",
        _of(
            stage_3="_grad_acc_hooks _leaf_module_hooks create_reduce_and_remove_grad_hooks",
            init="all_gather partition",
            offload="ds_z3_leaf_module",
        ),
        "https://github.com/deepspeedai/DeepSpeed/issues/5524",
        _NOT_STAGE_3,
    ),
    replica_groups=_row(
        "replica-groups-stage-3",
        "hybrid_shard",
        _of(
            groups="mpu",
            stage_3="finalize_gradient_accumulation_boundary grad_partitions_flat_buffer offload_optimizer "
            "fp16_groups _offload_boundary_param_ids _get_param_partition_rank",
            init="ds_id ds_numel partition_numel",
        ),
        _STAGE_3_FILE,
        _NOT_HYBRID,
    ),
    kept_parameters=_row(
        "kept-parameters-stage-3",
        "precision.keep_fp32 with full_shard",
        _of(stage_3_file="defragment", stage_3="_set_fp16_partitioned_groups_flat"),
        _STAGE_3_FILE,
        "set precision.keep_fp32 to [], or sharding.strategy to shard_grad_op",
    ),
    stale_gradients=_row(
        "stale-gradients",
        "A micro-batch that does not use a parameter, with full_shard,",
        _of(stage_3="grad_partitions_flat_buffer"),
        _STAGE_3_FILE,
        _USE_ALL,
    ),
    gathers=_row(
        "gathers-stage-3",
        "A gather behind an update without a wait of the host, with full_shard on CUDA,",
        _of(stage_3="parameter_offload", offload="_DeepSpeedZeRoOffload__allgather_stream"),
        f"{_COORDINATOR_FILE}#L606",
        "nothing: the host then waits for each update",
    ),
    frees=_row(
        "frees-stage-3",
        "A forward after another one without a backward, with full_shard on CUDA,",
        _of(
            offload="_DeepSpeedZeRoOffload__allgather_stream get_param_coordinator",
            coordinator="_clean_inflight_param_registry",
        ),
        f"{_COORDINATOR_FILE}#L189",
        "call torch.cuda.synchronize() before such a forward, or install a tested DeepSpeed",
    ),
    unsharded=_row(
        "unsharded-stage-3",
        "engine.weights.unsharded, with full_shard,",
        _of(init="is_external_param"),
        _COORDINATOR_FILE,
        _NOT_STAGE_3,
    ),
    weight_memory=_row(
        "weight-memory-stage-3",
        "offload.params: nvme with full_shard",
        _of(stage_3="param_groups_fp16_flat_cpu_memory fp16_partitioned_groups_flat fp32_partitioned_groups_flat"),
        _STAGE_3_FILE,
        "set offload.params to cpu",
    ),
    slices=_row(
        "slices-stage-3",
        "parallel.expert or parallel.tensor with full_shard",
        (
            *_GROUPS_OF_SLICES,
            *_of(
                stage_3="_autoep_expert_parallel_group _gradient_averaging_world_size",
                engine="ds_zero_placement_family ds_zero_partition_group_name",
            ),
        ),
        _STAGE_3_FILE,
        _UNSLICED,
    ),
    **_shared(
        "stage-3",
        "full_shard",
        _STAGE_3_FILE,
        conditional_modules=_LAST_AT_STAGE_3,
        replicated=_LAST_AT_STAGE_3 + _of(init="is_external_param"),
        unused=_of(stage_3="grad_position get_param_id fp32_partitioned_groups_flat"),
        stale_offloaded=_of(stage_3="fp32_partitioned_groups_flat"),
        divisor=_of(stage_3="loss_scale"),
        nonfinite=_of(stage_3_file="is_invalid_grad_norm"),
        gradients=_EARLY
        + _of(
            init=_PARTS,
            stage_3="finalize_gradient_accumulation_boundary _get_fp32_grad_state_partition norm_for_param_grads "
            "get_param_id _constant_buffered_norm2",
        ),
        master_weights=_of(init=_PARTS, stage_3="grad_position get_param_id _get_fp32_opt_state_partition"),
        discard=_of(
            engine=_COUNT,
            stage_3="_pre_step _partition_all_parameters grad_partitions_flat_buffer averaged_gradients "
            "reset_cpu_buffers",
        ),
        checkpoints=_of(
            stage_3="grad_position get_param_id fp32_partitioned_groups_flat sub_group_to_group_id "
            "_partition_all_parameters _reassign_or_swap_out_partitioned_parameters"
        ),
    ),
)

OTHERS = (
    _row(
        "fp16-on-cpu",
        "fp16 on a CPU",
        ("deepspeed.accelerator.cpu_accelerator:CPU_Accelerator.is_fp16_supported",),
        f"{_TAG}/../accelerator/cpu_accelerator.py",
        "set precision to bf16",
    ),
    _row(
        "empty-parameters",
        "full_shard of a model with parameters that have no elements",
        _of(init="ds_process_group partition_numel"),
        _COORDINATOR_FILE,
        "choose shard_grad_op, or remove these parameters",
    ),
    _row(
        "second-process-group",
        "A process group that was started again in the same process",
        (*_of(groups="_release_process_group_references"), "deepspeed.comm.comm:cdb"),
        f"{_TAG}/utils/groups.py",
        "start a new process for each run",
    ),
    _row(
        "no-compiler",
        "Starting on a CPU without compiling shm_comm",
        ("deepspeed.ops:_probe_compatible_ops",),  # the table itself would be filled by a look at it
        f"{_TAG}/comm/torch.py",
        "wait half a minute for the compiler in the first run",
    ),
    _row(
        "closed-engines",
        "A model that is used after its engine was closed",
        (
            *_of(engine="module_forward_pre_hook module_forward_post_hook"),
            "deepspeed.runtime.zero.parameter_offload:FWD_MODULE_STACK",
            *_of(stage_3="_z3_optimizer"),
        ),
        _ENGINE_FILE,
        "build the model anew",
    ),
    _row(
        "freed-models",
        "full_shard engines one after the other in a process, whose models are freed",
        _of(coordinator="_PartitionedParameterCoordinator__params_to_release"),
        _COORDINATOR_FILE,
        "start a new process for each engine",
    ),
    _row(
        "second-copies",
        "A number in sharding.reshard_after_forward, or zero_hpz_partition_size,",
        _of(groups="_ZERO_PARAM_INTRA_PARALLEL_GROUP", init="zero_param_process_group ds_secondary_tensor"),
        f"{_TAG}/utils/groups.py",
        "set sharding.reshard_after_forward to true or false, or install a tested DeepSpeed",
    ),
    _row(
        "clipping",
        "engine.step with another clip_grad_norm than training.gradient_clipping",
        _of(stages_1_2="clip_grad", stage_3="clip_grad"),
        f"{_TAG}/../docs/_pages/config-json.md",
        "set training.gradient_clipping for the whole run",
    ),
    _row(
        "partitioned-parameters",
        "Reading a weight outside the forward of its module, with full_shard,",
        (
            "deepspeed.runtime.zero.partition_parameters:free_param",
            *_of(init="ds_status ds_shape all_gather partition", offload="ds_inflight_param_registry"),
            "torch:_C.DisableTorchFunctionSubclass",
        ),
        f"{_TAG}/runtime/zero/partition_parameters.py",
        "read weights with engine.weights.read(name), and their norms with engine.weights.norms()",
    ),
)
