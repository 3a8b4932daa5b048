"""Words that people know from other tools and write into a config, and what to write instead."""

from __future__ import annotations

from collections.abc import Mapping


def _by_name(rows: Mapping[str, str]) -> dict[str, str]:
    """A hint for each name, from rows of names with blanks between them."""
    return {name: hint for names, hint in rows.items() for name in names.split()}


MOVED = _by_name(
    {
        "parameter": "write engine.weights.read(name)",
        "set_parameter": "write engine.weights.write(name, value)",
        "gathered unsharded set_trainable frozen placement": "it is one of engine.weights",
        "state_dict": "write engine.weights.state_dict()",
        "load_weights": "write engine.weights.load(source)",
        "parameter_norms": "write engine.weights.norms()",
        "ema": "write engine.weights.average(decay)",
        "grad": "write engine.gradients.read(name)",
        "set_grad": "write engine.gradients.write(name, value)",
        "grad_norms": "write engine.gradients.norms()",
        "grad_norm": "write engine.gradients.norm()",
        "loss_scale": "write engine.gradients.loss_scale",
        "set_boundary routed reached_by release leave on_save": "it is one of engine.framework",
    }
)
"""Methods and attributes that an engine once had, for one release."""

BY_HABIT = _by_name(
    {
        "zero_grad": "leave it out: engine.step() clears the gradients of each window",
        "parameters named_parameters": (
            "write model.parameters(), of which each rank may hold a shard; engine.weights.read(name) has a whole one"
        ),
        "clip_grad_norm_ clip_grad_norm clip_grad_value_ clip_gradients unscale_ unscale_gradients": (
            "write training.gradient_clipping in the config: engine.step() clips"
        ),
        "no_sync accumulate require_backward_grad_sync": (
            "leave it out: engine.step() after each micro-batch knows which is the last of a window"
        ),
        "load_state_dict": "write engine.weights.load(source), or engine.load(root) for a checkpoint",
        "save_checkpoint save_state": "write engine.save(root)",
        "load_checkpoint load_state": "write engine.load(root)",
        "save_pretrained save_16bit_model save_model": "write engine.export(folder)",
        "forward": "write engine(**batch)",
        "autocast": "leave it out: the engine computes in precision.compute of the config",
        "lr_scheduler scheduler get_lr get_last_lr": "write engine.lr; engine.step() moves the schedule",
        "sync_gradients is_gradient_accumulation_boundary": "write step = engine.step() and read step.updated",
        "gather reduce": "write engine.mean(value)",
        "unwrap_model named_modules modules children": "write engine.module, which is the model",
        "prepare": "write unishard.prepare(model, cfg), once for each model",
    }
)
"""What people type on an engine who come from DeepSpeed, Accelerate or DistributedDataParallel."""

BACKENDS = _by_name(
    {
        "ddp distributed_data_parallel": "write backend: fsdp and sharding: no_shard, which is DistributedDataParallel",
        "fsdp1 fsdp2 torch pytorch fully_shard": "write backend: fsdp, which is FSDP2 of torch",
        "zero": "write backend: deepspeed",
        "zero1": "write backend: deepspeed and sharding: shard_optimizer",
        "zero2": "write backend: deepspeed and sharding: shard_grad_op",
        "zero3": "write backend: deepspeed and sharding: full_shard",
        "accelerate trainer transformers lightning fabric": (
            "it drives an engine, FSDP or DeepSpeed: write backend: fsdp or deepspeed; `unishard translate` reads its "
            "config"
        ),
        "horovod": "write backend: fsdp and sharding: no_shard, which also averages gradients over ranks",
        "nccl gloo mpi": "it is how ranks communicate, which follows from the device: write backend: fsdp or deepspeed",
    }
)
"""Words that people write as `backend:`."""

IN_SCRIPT = _by_name(
    {
        "model model_name model_name_or_path pretrained_model_name_or_path": (
            "is not in the config: pass the model to unishard.prepare(model, cfg)"
        ),
        "tokenizer tokenizer_name": "is not in the config: load the tokenizer in your script",
        "data dataset datasets dataset_name train_dataset eval_dataset": (
            "is not in the config: pass the dataset to unishard.dataloader(dataset, cfg)"
        ),
        "epochs num_epochs num_train_epochs max_epochs": (
            "is not in the config: write it in the loop of your script; scheduler.total_steps is the length of the "
            "schedule in updates"
        ),
        "kubernetes": "is not in the config: write a manifest, such as examples/train_gpt.k8s.yaml",
        "num_workers dataloader_num_workers": "is not in the config: pass it to unishard.dataloader(dataset, cfg, "
        "num_workers=4)",
        "decay_ratio": "has no name here: write scheduler.decay_steps in updates, the ratio times total_steps",
        "warmup_ratio": "has no name here: write scheduler.warmup_steps in updates, the ratio times total_steps",
        "context cp context_parallel context_parallel_size cp_size sp_size ulysses ring ring_attention": (
            "has another name here: write parallel: {sequence: N}, in which N ranks share each sample"
        ),
        "load_in_4bit": "has another name here: write quantization: nf4, and load with unishard.from_pretrained",
        "load_in_8bit": "has another name here: write quantization: int8, and load with unishard.from_pretrained",
        "activation_offloading activation_cpu_offload": "has another name here: write offload: {activations: cpu}",
        "ignored_modules ignored_states ignored_params ignored_parameters": (
            "has another name here: write sharding: {replicate: [PATTERN]}, whose parameters every rank holds whole"
        ),
    }
)
"""Fields that people write into the config, whose place is the training script or a file of its own, or whose name is
another here.
"""

VALUES: Mapping[str, str] = {
    **dict.fromkeys(("int4", "4bit", "4-bit"), "nf4"),
    **dict.fromkeys(("8bit", "8-bit"), "int8"),
    **dict.fromkeys(("warmup_stable_decay", "warmup-stable-decay"), "wsd"),
    "1-sqrt": "sqrt",
    **dict.fromkeys(("ring", "zigzag", "zigzag-ring", "context"), "allgather"),
}
"""Words of other tools for a value, and the word here."""
