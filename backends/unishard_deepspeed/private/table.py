"""The rows of `PRIVATE_API`: only data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from unishard.contract.private_api import PrivateApi

_STAGE_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
_STAGES_1_2 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_INIT = "deepspeed.runtime.zero.partition_parameters:Init"
_OFFLOAD = "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload"
_FRAGMENT = "deepspeed.utils.tensor_fragment:tensor_fragment"
_GROUPS = "deepspeed.utils.groups"

_GITHUB = "https://github.com/deepspeedai/DeepSpeed"
_TAG = f"{_GITHUB}/blob/v0.19.8/deepspeed"
_ENGINE_FILE = f"{_TAG}/runtime/engine.py"
_COORDINATOR_FILE = f"{_TAG}/runtime/zero/partitioned_param_coordinator.py"
_SOURCE = {
    "stage-0": f"{_TAG}/runtime/fp16/unfused_optimizer.py",
    "stages-1-2": f"{_TAG}/runtime/zero/stage_1_and_2.py",
    "stage-3": f"{_TAG}/runtime/zero/stage3.py",
}
"""Of each kind of optimizer."""
_RUNS = {
    "stage-0": "no_shard",
    "stages-1-2": "shard_optimizer or shard_grad_op",
    "stage-3": "full_shard",
}
"""Which strategies run it."""


def _of(owner: str, names: str) -> tuple[str, ...]:
    """Attributes of one class, or names of one module."""
    return tuple(f"{owner}{'.' if ':' in owner else ':'}{name}" for name in names.split())


def _row(name: str, case: str, names: tuple[str, ...], link: str, instead: str) -> PrivateApi:
    """A case that was run on DeepSpeed 0.19.8."""
    return PrivateApi(name, case, names, "0.19.8", link, instead)


def _by_kind(name: str, case: str, instead: str, names: Mapping[str, tuple[str, ...]]) -> Iterator[PrivateApi]:
    """A case with other names for each kind of optimizer; `{}` in its words stands for the strategies."""
    for kind, needed in names.items():
        yield _row(f"{name}-{kind}", case.format(_RUNS[kind]), needed, _SOURCE[kind], instead)


_USE_ALL = "let every parameter be used in every micro-batch, or install a tested DeepSpeed"
_NOT_HYBRID = "choose full_shard or shard_grad_op, or install a tested DeepSpeed"
_NOT_STAGE_3 = "choose shard_grad_op, or install a tested DeepSpeed"
_DIRECTLY = "read and write them at the end of the run, or install a tested DeepSpeed"
_TO_THE_END = "end every accumulation window with engine.step, or install a tested DeepSpeed"

_EARLY = _of(_ENGINE, "_running_engine_step enable_backward_allreduce allreduce_gradients")
_PARTS = _of(_INIT, "ds_numel ds_zero_partition_rank ds_process_group ds_id")
_COUNT = _of(_ENGINE, "_unmanaged_backward_count")

_REDUCED_LAST: Mapping[str, tuple[str, ...]] = {
    "stages-1-2": (
        *_of(_STAGES_1_2, "create_gradient_handling_hooks _grad_acc_hooks bit16_groups partition_gradients"),
        *_of(_STAGES_1_2, "independent_gradient_partition_epilogue reduce_gradients"),
        *_of(_STAGES_1_2, "process_gradients get_gradient_for_reduction"),
    ),
    "stage-3": (
        *_of(_STAGE_3, "create_reduce_and_remove_grad_hooks _grad_acc_hooks"),
        *_of(_STAGE_3, "independent_gradient_partition_epilogue"),
        *_of(_STAGE_3, "reduce_ready_partitions_and_remove_grads parameter_offload"),
        *_of(_OFFLOAD, "forward_hooks backward_hooks"),
        *_of(_INIT, "ds_numel all_gather partition"),
    ),
}
"""To reduce some gradients at the end of backward, and to gather some parameters apart from the rest."""

BUILDING = (
    _row(
        "leaf-gradients",
        "full_shard with units",
        (
            *_of(_STAGE_3, "_grad_acc_hooks _leaf_module_hooks create_reduce_and_remove_grad_hooks"),
            *_of(_OFFLOAD, "ds_z3_leaf_module"),
        ),
        f"{_GITHUB}/issues/5524",
        _NOT_STAGE_3,
    ),
    _row(
        "fp16-on-cpu",
        "fp16 on a CPU",
        _of("deepspeed.accelerator.cpu_accelerator:CPU_Accelerator", "is_fp16_supported"),
        f"{_TAG}/../accelerator/cpu_accelerator.py",
        "set precision to bf16",
    ),
    _row(
        "nvme-parameters",
        "offload.params: nvme",
        _of(_INIT, "param_swapper"),
        f"{_TAG}/runtime/zero/partition_parameters.py",
        "set offload.params to cpu",
    ),
    _row(
        "empty-parameters",
        "full_shard of a model with parameters that have no elements",
        _of(_INIT, "ds_process_group partition_numel"),
        _COORDINATOR_FILE,
        "choose shard_grad_op, or remove these parameters",
    ),
    _row(
        "second-process-group",
        "A process group that was started again in the same process",
        (*_of(_GROUPS, "_release_process_group_references"), *_of("deepspeed.comm.comm", "cdb")),
        f"{_TAG}/utils/groups.py",
        "start a new process for each run",
    ),
    _row(
        "no-compiler",
        "Starting on a CPU without compiling shm_comm",
        _of("deepspeed.ops", "_probe_compatible_ops"),  # the table itself would be filled by a look at it
        f"{_TAG}/comm/torch.py",
        "wait half a minute for the compiler in the first run",
    ),
    _row(
        "closed-engines",
        "A model that is used after its engine was closed",
        (
            *_of(_ENGINE, "module_forward_pre_hook module_forward_post_hook"),
            *_of("deepspeed.runtime.zero.parameter_offload", "FWD_MODULE_STACK"),
            *_of(_STAGE_3, "_z3_optimizer"),
        ),
        _ENGINE_FILE,
        "build the model anew",
    ),
    _row(
        "freed-models",
        "full_shard engines one after the other in a process, whose models are freed",
        _of(
            "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator",
            "_PartitionedParameterCoordinator__params_to_release",
        ),
        _COORDINATOR_FILE,
        "start a new process for each engine",
    ),
    _row(
        "replica-groups-stages-1-2",
        "hybrid_shard_grad_op",
        (
            *_of(_GROUPS, "mpu"),
            *_of(_STAGES_1_2, "finalize_gradient_accumulation_boundary cpu_offload averaged_gradients"),
            *_of("deepspeed.runtime.zero.stage_1_and_2:GradPartitionBufferGroup", "flat_partition"),
            *_of(_STAGES_1_2, "single_partition_of_fp32_groups params_in_partition get_param_id grad_position"),
            *_of(_STAGES_1_2, "norm_for_param_grads bit16_groups_flat"),
        ),
        _SOURCE["stages-1-2"],
        _NOT_HYBRID,
    ),
    _row(
        "replica-groups-stage-3",
        "hybrid_shard",
        (
            *_of(_GROUPS, "mpu"),
            *_of(_STAGE_3, "finalize_gradient_accumulation_boundary grad_partitions_flat_buffer offload_optimizer"),
            *_of(_STAGE_3, "fp16_groups _offload_boundary_param_ids _get_param_partition_rank"),
            *_of(_INIT, "ds_id ds_numel partition_numel"),
        ),
        _SOURCE["stage-3"],
        _NOT_HYBRID,
    ),
    _row(
        "second-copies",
        "A number in sharding.reshard_after_forward, or zero_hpz_partition_size,",
        (
            *_of(_GROUPS, "_ZERO_PARAM_INTRA_PARALLEL_GROUP"),
            *_of(_INIT, "zero_param_process_group ds_secondary_tensor"),
        ),
        f"{_TAG}/utils/groups.py",
        "set sharding.reshard_after_forward to true or false, or install a tested DeepSpeed",
    ),
    *_by_kind(
        "conditional-modules",
        "sharding.conditional_modules with {}",
        "leave sharding.conditional_modules empty, or install a tested DeepSpeed",
        _REDUCED_LAST,
    ),
    *_by_kind(
        "replicated",
        "sharding.replicate with {}",
        "leave sharding.replicate empty, or install a tested DeepSpeed",
        {**_REDUCED_LAST, "stage-3": (*_REDUCED_LAST["stage-3"], *_of(_INIT, "is_external_param"))},
    ),
)
"""Needed to create or close an engine."""

UPDATING = (
    *_by_kind(
        "unused",
        "An update with an unused parameter, with {},",
        _USE_ALL,
        {
            "stages-1-2": (
                *_of(_STAGES_1_2, "_hp_mapping _hp_optimizer_states_linked"),
                *_of(_FRAGMENT, "hp_fragment_address param_group_index"),
            ),
            "stage-3": _of(_STAGE_3, "grad_position get_param_id fp32_partitioned_groups_flat"),
        },
    ),
    _row(
        "kept-parameters-stages-1-2",
        "precision.keep_fp32 with shard_optimizer or shard_grad_op",
        _of(_STAGES_1_2, "_gradient_reduction_buffer_dtype"),
        _SOURCE["stages-1-2"],
        "set precision.keep_fp32 to [], or sharding.strategy to full_shard",
    ),
    _row(
        "kept-parameters-stage-3",
        "precision.keep_fp32 with full_shard",
        (*_of("deepspeed.runtime.zero.stage3", "defragment"), *_of(_STAGE_3, "_set_fp16_partitioned_groups_flat")),
        _SOURCE["stage-3"],
        "set precision.keep_fp32 to [], or sharding.strategy to shard_grad_op",
    ),
    _row(
        "stale-gradients",
        "A micro-batch that does not use a parameter, with full_shard,",
        _of(_STAGE_3, "grad_partitions_flat_buffer"),
        _SOURCE["stage-3"],
        _USE_ALL,
    ),
    _row(
        "gathers-stage-3",
        "A gather behind an update without a wait of the host, with full_shard on CUDA,",
        (*_of(_STAGE_3, "parameter_offload"), *_of(_OFFLOAD, "_DeepSpeedZeRoOffload__allgather_stream")),
        f"{_COORDINATOR_FILE}#L606",
        "nothing: the host then waits for each update",
    ),
    *_by_kind(
        "stale-offloaded",
        "An update with offload.optimizer that is skipped, or does not use a parameter, with {},",
        "set offload.optimizer to none, or install a tested DeepSpeed",
        {
            "stages-1-2": _of(
                _STAGES_1_2, "single_partition_of_fp32_groups averaged_gradients accumulated_grads_in_cpu"
            ),
            "stage-3": _of(_STAGE_3, "fp32_partitioned_groups_flat"),
        },
    ),
    *_by_kind(
        "divisor",
        "fp16, and backward with num_items, with {},",
        "set precision to bf16, and pass mean losses",
        {"stages-1-2": _of(_STAGES_1_2, "loss_scale"), "stage-3": _of(_STAGE_3, "loss_scale")},
    ),
    _row(
        "clipping",
        "engine.step with another clip_grad_norm than training.gradient_clipping",
        (*_of(_STAGES_1_2, "clip_grad"), *_of(_STAGE_3, "clip_grad")),
        f"{_GITHUB}/blob/v0.19.8/docs/_pages/config-json.md",
        "set training.gradient_clipping for the whole run",
    ),
    *_by_kind(
        "nonfinite",
        "fp16 with {}",
        "set precision to bf16",
        {"stage-0": _of("deepspeed.runtime.fp16.unfused_optimizer", "is_invalid_grad_norm")},
    ),
    *_by_kind(
        "nonfinite",
        "training.nonfinite: ignore with {}",
        "set training.nonfinite to skip",
        {
            "stages-1-2": (
                *_of("deepspeed.runtime.zero.stage_1_and_2", "is_invalid_grad_norm"),
                *_of(_STAGES_1_2, "check_overflow"),
            ),
            "stage-3": _of("deepspeed.runtime.zero.stage3", "is_invalid_grad_norm"),
        },
    ),
)
"""Needed by unusual updates."""

REACHING = (
    _row(
        "gradients-stage-0", "engine.gradients.read, write and norms, with no_shard,", _EARLY, _ENGINE_FILE, _DIRECTLY
    ),
    *_by_kind(
        "gradients",
        "engine.gradients.read, write and norms, with {},",
        _DIRECTLY,
        {
            "stages-1-2": (
                *_EARLY,
                *_of(_STAGES_1_2, "finalize_gradient_accumulation_boundary dp_process_group params_in_partition"),
                *_of(_STAGES_1_2, "averaged_gradients _zero_padding grad_position get_param_id"),
                *_of(_STAGES_1_2, "single_partition_of_fp32_groups _hp_mapping norm_for_param_grads local_overflow"),
                *_of(_STAGES_1_2, "update_offload_overflow_tracker cpu_offload"),
                *_of(_FRAGMENT, "lp_fragment_address"),
            ),
            "stage-3": (
                *_EARLY,
                *_PARTS,
                *_of(_STAGE_3, "finalize_gradient_accumulation_boundary _get_fp32_grad_state_partition"),
                *_of(_STAGE_3, "norm_for_param_grads get_param_id _constant_buffered_norm2"),
            ),
        },
    ),
    *_by_kind(
        "master-weights",
        "engine.weights.read, write, gathered and norms, with {},",
        _DIRECTLY,
        {
            "stages-1-2": (
                *_of(_STAGES_1_2, "_hp_mapping dp_process_group"),
                *_of(_FRAGMENT, "lp_fragment_address hp_fragment"),
            ),
            "stage-3": (*_PARTS, *_of(_STAGE_3, "grad_position get_param_id _get_fp32_opt_state_partition")),
        },
    ),
    _row("discard-stage-0", "engine.discard, or a load,", _COUNT, _ENGINE_FILE, _TO_THE_END),
    *_by_kind(
        "discard",
        "engine.discard, or a load, with {},",
        _TO_THE_END,
        {
            "stages-1-2": (
                *_COUNT,
                *_of(_STAGES_1_2, "micro_step_id _offload_accumulated_param_ids _epilogue_ran_this_backward"),
                *_of(_STAGES_1_2, "averaged_gradients all_grad_tensors reset_cpu_buffers"),
                *_of(_STAGES_1_2, "params_already_reduced ipg_buckets"),
            ),
            "stage-3": (
                *_COUNT,
                *_of(_STAGE_3, "_pre_step _partition_all_parameters grad_partitions_flat_buffer averaged_gradients"),
                *_of(_STAGE_3, "reset_cpu_buffers"),
            ),
        },
    ),
    *_by_kind(
        "checkpoints",
        "A checkpoint, with {},",
        "install a tested DeepSpeed",
        {
            "stages-1-2": (
                *_of(_STAGES_1_2, "_hp_mapping update_lp_params"),
                *_of(_STAGES_1_2, "_hp_optimizer_states_linked _lazy_init_hp_params_optimizer_state"),
                *_of(_FRAGMENT, "hp_fragment_address param_group_index optim_fragment"),
            ),
            "stage-3": (
                *_of(_STAGE_3, "grad_position get_param_id fp32_partitioned_groups_flat sub_group_to_group_id"),
                *_of(_STAGE_3, "_partition_all_parameters _reassign_or_swap_out_partitioned_parameters"),
            ),
        },
    ),
    _row(
        "partitioned-parameters",
        "Reading a weight outside the forward of its module, with full_shard,",
        (
            *_of("deepspeed.runtime.zero.partition_parameters", "free_param"),
            *_of(_INIT, "ds_status ds_shape all_gather partition"),
            *_of(_OFFLOAD, "ds_inflight_param_registry"),
            "torch:_C.DisableTorchFunctionSubclass",
        ),
        f"{_TAG}/runtime/zero/partition_parameters.py",
        "read weights with engine.weights.read(name), and their norms with engine.weights.norms()",
    ),
    _row(
        "unsharded-stage-3",
        "engine.weights.unsharded, with full_shard,",
        _of(_INIT, "is_external_param"),
        _COORDINATOR_FILE,
        _NOT_STAGE_3,
    ),
)
"""Needed to read or change a run: gradients, master weights, discarded windows, checkpoints."""
