"""The keys of DeepSpeed 0.19.8 outside `zero_optimization`, one row each."""

from __future__ import annotations

from collections.abc import Mapping

from unishard_deepspeed.keys import values
from unishard_deepspeed.keys.row import Row, decided, log, refused, removed, same
from unishard_deepspeed.keys.values import CHECKPOINTS, FILES, OWN_CHECKPOINTS, SWAPS

_PARALLEL = "splits ranks in other ways than data parallelism; remove it"
_LOADER = "only affects the DataLoader that deepspeed.initialize makes; use unishard.dataloader"
_CPU_ADAM = "unishard steps the torch optimizer"
_SCALE = "sets DeepSpeed's loss scale, and unishard scales the loss itself; remove it"
_CAST = "casts operations, not parameters; set precision.compute to bf16 or fp16"
_WHICH_RANKS = "decides only which ranks have the experts together"
_ONCE = "the division happens in one place"

_LOOP: dict[str, Row] = {
    "train_batch_size": decided("training.micro_batch_size and training.gradient_accumulation_steps"),
    "train_micro_batch_size_per_gpu": decided("training.micro_batch_size"),
    "gradient_accumulation_steps": decided("training.gradient_accumulation_steps"),
    "gradient_clipping": decided("training.gradient_clipping"),
    "managed_gradient_accumulation": refused(
        "would move the end of an accumulation window; set training.gradient_accumulation_steps",
        constant=False,
        why="a call of step is the end of a window, as in torch",
        ignored="unishard's loop decides where an accumulation window ends",
    ),
    "dataloader_drop_last": refused(_LOADER, ignored="only affects a DataLoader that DeepSpeed makes"),
    "data_efficiency": refused(_LOADER, values.MAPPING),
    "optimizer": decided("optimizer"),
    "scheduler": decided("scheduler"),
    "zero_allow_untested_optimizer": refused(
        "unishard always passes the torch optimizer; remove it",
        constant=True,
        why="DeepSpeed refuses an optimizer that is not on its list",
        ignored="lets DeepSpeed take an optimizer that is not on its list",
    ),
    "zero_force_ds_cpu_optimizer": refused(
        f"needs DeepSpeedCPUAdam, and {_CPU_ADAM}; remove it",
        constant=False,
        why="an offloaded torch optimizer is not replaced by DeepSpeedCPUAdam",
        ignored="whether torch's optimizer may step on the host; same results to rounding",
    ),
}

_PRECISION: dict[str, Row] = {
    "communication_data_type": decided("precision.reduce"),
    "fp16.enabled": decided("precision.compute"),
    "fp16.loss_scale": decided(
        "precision.loss_scale",
        values.number_from(0),
        1.0,
        "unishard scales the loss; 0 would add DeepSpeed's own dynamic scale",
    ),
    "fp16.auto_cast": refused(
        "unishard casts floating inputs to precision.compute; remove it",
        values.SWITCH,
        False,
        "unishard casts inputs, at the units as well as at the root",
        "floating inputs are cast to precision.compute either way",
    ),
    "fp16.fp16_master_weights_and_grads": decided(
        "precision.master", values.SWITCH, False, f"needs DeepSpeedCPUAdam, and {_CPU_ADAM}"
    ),
    "fp16.initial_scale_power": decided("precision.initial_loss_scale", values.count()),
    "fp16.loss_scale_window": decided("precision.loss_scale_growth_interval", values.count()),
    "fp16.hysteresis": refused(_SCALE, values.count()),
    "fp16.consecutive_hysteresis": refused(_SCALE, values.SWITCH, ignored="when DeepSpeed forgives an overflow"),
    "fp16.min_loss_scale": refused(_SCALE, values.count()),
    "torch_autocast": refused(_CAST, constant={"enabled": False}, why="parameters are cast, not operations"),
    "torch_autocast.dtype": refused(_CAST, values.AUTOCAST, ignored="the dtype for torch_autocast.enabled"),
    "torch_autocast.lower_precision_safe_modules": refused(
        _CAST, values.MODULES, ignored="which modules reduce gradients in that dtype; here all do"
    ),
    "bfloat16": decided("precision.compute"),
    "bf16.enabled": decided("precision.compute"),
    "bf16.bf16_master_weights_and_grads": decided("precision.master", values.SWITCH),
    "bf16.bf16_optimizer_states": decided("precision.master", values.SWITCH),
    "bf16.check_grad_overflow": decided("training.nonfinite", values.SWITCH),
    "bf16.immediate_grad_update": same(values.SWITCH, ignored="when gradients are added up; same results"),
    "data_types.param_dtype": decided("precision.compute"),
    "data_types.grad_accum_dtype": decided("precision.accumulate"),
    "data_types.buffer_dtype": decided("precision.buffers", constant=None, why="unishard casts the buffers"),
    "data_types.keep_in_fp32_modules": decided(
        "precision.keep_fp32", values.FP32_BUFFERS, [], "unishard keeps parameters and buffers"
    ),
}

_REDUCTION: dict[str, Row] = {
    "gradient_allreduce_op": refused(
        "would sum gradients instead of averaging them; scale the loss instead",
        constant="mean",
        why="gradients are averaged over the ranks",
    ),
    "prescale_gradients": same(values.FLAG, False, _ONCE),
    "gradient_predivide_factor": same(values.FACTOR, 1.0, _ONCE),
    "disable_allgather": refused("is read by nothing; remove it", ignored="is read by nothing (DeepSpeed 0.19.8)"),
}

_LOGS: dict[str, Row] = {
    "steps_per_print": log(values.COUNT_OR_NULL, None, "unishard has its own progress bar"),
    "wall_clock_breakdown": log(values.FLAG, False, "would wait for the device in every micro-batch"),
    "memory_breakdown": log(values.FLAG, False, "would log in every micro-batch"),
    "dump_state": log(values.FLAG, False, "would log the whole engine"),
    "disable_python_gc": log(values.FLAG),
    "log_level": log(values.LEVEL),
    "vocabulary_size": log(values.COUNT),
    "comms_logger": log(values.COMMS),
    "flops_profiler": log(values.MAPPING),
    "timers": log(values.TIMERS),
    "timers.throughput.enabled": log(values.FLAG, False, "would wait for the device in every step"),
    "tensorboard": log(values.MONITOR),
    "csv_monitor": log(values.MONITOR),
    "wandb": log(values.WANDB),
    "comet": log(values.COMET),
}

_SECTIONS: dict[str, Row] = {
    "activation_checkpointing": same(
        values.MAPPING,
        ignored="recomputes nothing itself; set activation_checkpointing and offload.activations",
    ),
    "aio": refused(FILES, values.MAPPING, ignored=SWAPS),
    "seq_parallel_communication_data_type": refused(
        _PARALLEL, values.REDUCTION, ignored="only used with sequence parallelism"
    ),
    "sequence_parallel_size": refused("would split samples a second time; write parallel.sequence instead"),
    "data_parallel_size": refused(_PARALLEL, ignored="follows from the number of ranks"),
    "tensor_parallel": refused("would cut layers a second time; write parallel.tensor instead"),
    "expert_parallel": refused("would divide experts a second time; write parallel.expert instead"),
    "use_data_before_expert_parallelism": refused(_PARALLEL, ignored=_WHICH_RANKS),
    "pipeline": refused("needs a PipelineModule; remove it", values.MAPPING, ignored="only used for a PipelineModule"),
    "hybrid_engine": refused("replaces the engine by one for generation; remove it", values.HYBRID),
    # runtime/engine.py, _do_sanity_check asserts this on every device. DeepCompile itself needs CUDA (compile/util.py,
    # is_deepcompile_supported) and an op that a CUDA compiler builds (ops/op_builder/dc.py).
    "compile": refused(
        "configures DeepCompile, which DeepSpeed 0.19.8 refuses where the loop ends accumulation windows itself, as "
        "unishard's does "
        "(managed_gradient_accumulation: false); remove it, and set compile.mode to per_block for torch.compile",
        values.COMPILED,
    ),
    "autotuning": refused(
        "belongs to the deepspeed launcher; remove it", values.MAPPING, ignored="only used by deepspeed --autotuning"
    ),
    "weight_quantization": refused("belongs to inference; remove it", ignored="only used for inference"),
    "checkpoint": refused(OWN_CHECKPOINTS, values.TAG, ignored=CHECKPOINTS),
    "datastates_ckpt": refused(OWN_CHECKPOINTS, ignored=CHECKPOINTS),
    "amp": removed("set precision.compute to fp16"),
    "elasticity": removed("set training.micro_batch_size and training.gradient_accumulation_steps"),
    "nebula": removed(),
    "compression_training": removed(),
    "quantize_training": removed(),
    "sparse_gradients": removed(),
    "eigenvalue": removed(),
    "sparse_attention": removed(),
    "graph_harvesting": removed(),
    "curriculum_learning": removed(),
    "progressive_layer_drop": removed(),
}

TOP: Mapping[str, Row] = {**_LOOP, **_PRECISION, **_REDUCTION, **_LOGS, **_SECTIONS}
"""By dotted key."""
