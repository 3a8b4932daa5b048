"""Names and arguments that people know from plain torch, Accelerate, Fabric, DeepSpeed and the Trainer, or pass by
habit or in the wrong order, and what to write instead.
"""

from __future__ import annotations

from collections.abc import Mapping


def _by_name(rows: Mapping[str, str]) -> dict[str, str]:
    """A hint for each name, from rows of names with blanks between them."""
    return {name: hint for names, hint in rows.items() for name in names.split()}


_PARAMETERS = (
    "engine.module.parameters() and named_parameters() list them, and engine.weights.read(name) reads one; an "
    "optimizer is made from model.parameters() before unishard.prepare(model, cfg, optimizer)"
)
_WHOLE_RUN = (
    "write the loop: for batch in engine.batches(loader): loss = engine(...); engine.backward(loss); engine.step(); "
    "for evaluation call engine.eval() before it"
)

METHODS = _by_name(
    {
        "zero_grad": "remove the call: engine.step() zeroes gradients after each update, and engine.discard() drops a "
        "window",
        "clip_grad_norm_ clip_grad_norm clip_grad_value_ clip_gradients gradient_clipping get_global_grad_norm": (
            "set training.gradient_clipping in the config, or call engine.step(clip_grad_norm=1.0); the norm is "
            "engine.step().grad_norm"
        ),
        "parameters named_parameters get_parameter": _PARAMETERS,
        "get_state_dict": "engine.weights.state_dict() returns all weights, and engine.save() writes a checkpoint",
        "load_state_dict": "engine.weights.load(weights) replaces the weights, and engine.load() resumes a run",
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
        "set_gradient_accumulation_boundary": "call engine.framework.set_boundary(last) before the forward",
        "to cuda cpu xpu to_empty to_device": "remove the call: unishard.prepare puts the model on engine.device, "
        "engine.batches the data",
        "half bfloat16 float double type autocast": "remove the call: dtypes are those of `precision` in the config",
        "get_grad_scaler scaler cur_scale": "remove it: with precision: fp16 the engine scales the loss; the factor is "
        "engine.gradients.loss_scale",
        "config": "engine.module.config is that of the model; what the engine runs is the config that you passed to "
        "unishard.prepare",
        "lr_scheduler lr_schedulers scheduler get_lr get_last_lr learning_rate": (
            "engine.lr is the rate of the next update; engine.step() steps the schedule of the config, or what "
            "unishard.prepare got"
        ),
        "optimizer_step": "call engine.step()",
        "save_checkpoint save_state": "call engine.save()",
        "load_checkpoint load_state resume_from_checkpoint": 'call engine.load("latest"), or set '
        "checkpoint.on_existing: resume",
        "save_pretrained save_model save_16bit_model push_to_hub": "call engine.export(folder)",
        "train_batch eval_batch fit evaluate validate predict test": _WHOLE_RUN,
        "accumulate no_sync no_backward_sync sync_gradients is_gradient_accumulation_boundary "
        "set_gradient_accumulation_boundary": (
            "set training.gradient_accumulation_steps in the config, and call engine.backward and engine.step for "
            "every micro-batch; engine.step().updated says whether a window has ended"
        ),
        "gather gather_object all_gather pad_across_processes": "call engine.gather_for_metrics(data) in evaluation "
        "mode",
        "reduce all_reduce": "call engine.mean(value)",
        "unwrap_model model": "engine.module is the model; engine.export(folder) writes its weights",
        "is_main_process is_local_main_process is_global_zero is_world_process_zero": "write engine.is_main",
        "process_index global_rank": "write engine.rank",
        "num_processes": "write engine.world_size",
        "local_rank local_process_index": "engine.device is the device of this rank",
        "wait_for_everyone barrier": "remove the call: the engine's calls wait for all ranks; else use "
        "torch.distributed.barrier()",
        "prepare setup setup_module setup_optimizers prepare_model prepare_optimizer": "call unishard.prepare(model, "
        "cfg) once",
        "setup_dataloaders prepare_data_loader deepspeed_io": "call unishard.dataloader(dataset, cfg), or pass yours "
        "to engine.batches",
        "skip_first_batches": "remove the call: a checkpoint holds the position in the data, and engine.load() "
        "restores it",
        "forward": "call the engine: engine(...)",
        "log_dict log_metrics": "call engine.log(name=value)",
        "global_step global_steps": "count the steps whose `updated` is true, from engine.resumed.step on in a run "
        "that was resumed",
        "requires_grad_ freeze unfreeze": "call engine.weights.set_trainable(names, False) to freeze, and without "
        "False to train",
        "compile": "set `compile` in the config",
        "gradient_checkpointing_enable": "set `activation_checkpointing` in the config",
        "join": "use `with engine.lockstep():` in evaluation mode; in training, ranks need the same number of batches",
        "destroy end_training": "call engine.close(), or use `with unishard.prepare(model, cfg) as engine:`",
        "set_seed seed_everything": "set training.seed in the config",
        "launch": "start the script with `unishard launch`",
    }
)
"""Methods and attributes of engines, accelerators and modules of others; none of them is one of `Engine`."""

PACKAGE = _by_name(
    {
        "initialize Accelerator Fabric Trainer fully_shard DistributedDataParallel FullyShardedDataParallel": (
            "call unishard.prepare(model, cfg), which returns the engine"
        ),
        "TrainingArguments DeepSpeedConfig": "write a config, see unishard.Config; `unishard translate` makes one from "
        "another tool's file",
        "init_distributed init_process_group": "remove the call: unishard.prepare starts the process group",
        "destroy_process_group": "call unishard.shutdown()",
        "DataLoader": "call unishard.dataloader(dataset, cfg)",
        "save load_checkpoint": "call engine.save() and engine.load()",
    }
)
"""What people look for in the package."""

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
    }
)
"""Fields that people write into the config, whose place is the training script or a file of its own."""


_WRAPPED = "pass the model that it wraps, without the wrapper: its `module`"
_SAMPLES = (
    "its keys are no samples: pass torch.utils.data.TensorDataset(*tensors), datasets.Dataset.from_dict(data), "
    "or a list of samples"
)

_VALUES: Mapping[str, Mapping[str, str]] = {
    "model": {
        "Engine": "it is a prepared model: train with it, or build a new model to prepare",
        "Config": "pass the model before the config: unishard.prepare(model, cfg)",
        "type": "it is a class: pass a model, as the class makes it when it is called",
        "list": "call prepare for each model, or pass one module that holds them all and whose forward uses them",
        "tuple": "call prepare for each model, or pass one module that holds them all and whose forward uses them",
        "dict": "pass a module; the weights of a state dict are loaded before, with model.load_state_dict(...)",
        "str": "load the model first, for example with unishard.from_pretrained(cls, path, cfg)",
        "generator": "pass the model itself, not its parameters",
        "function": "call the function, and pass the model that it returns",
        "DataParallel": _WRAPPED,
        "FullyShardedDataParallel": _WRAPPED,
        "DeepSpeedEngine": _WRAPPED,
        "_FabricModule": _WRAPPED,
        "object": "pass the model",
    },
    "cfg": {
        "Module": "pass the model before the config: unishard.prepare(model, cfg)",
        "Optimizer": "pass the optimizer after the config: unishard.prepare(model, cfg, optimizer)",
        "dict": "load it: unishard.load({...})",
        "TrainingArguments": "translate their file: unishard translate arguments.yaml --to unishard -o train.yaml",
        "DictConfig": "load it: unishard.load(OmegaConf.to_container(cfg, resolve=True))",
        "object": "load one with unishard.load(path)",
    },
    "dataset": {
        "Config": "pass the dataset before the config: unishard.dataloader(dataset, cfg)",
        "DataLoader": "pass the dataset, unishard.dataloader(loader.dataset, cfg), or the loader to "
        "engine.batches(loader)",
        "DatasetDict": "pass one of its splits, such as data['train']",
        "Mapping": _SAMPLES,
        "dict": _SAMPLES,
        "DataFrame": "pass a dataset of its rows: datasets.Dataset.from_pandas(frame)",
        "str": "load the data first",
    },
    "loader": {
        "Mapping": "whose keys would be the batches; pass a loader: unishard.dataloader(dataset, cfg)",
        "dict": "whose keys would be the batches; pass a loader: unishard.dataloader(dataset, cfg)",
        "str": "whose letters would be the batches; pass a loader: unishard.dataloader(dataset, cfg)",
    },
    "clip_grad_norm": {
        "Tensor": "engine.step takes no loss: call engine.backward(loss), then engine.step()",
        "function": "engine.step takes no closure: call engine.backward(loss), then engine.step()",
        "object": "pass None for no clipping",
    },
    "source": {
        "dict": "load the weights of a state dict before unishard.prepare, with model.load_state_dict(...)",
        "object": 'pass its path, or "latest"',
    },
}
"""By argument and class of the value, or of a class that it inherits from; `object` for all others."""


def instead(argument: str, value: object) -> str:
    """What to write in place of a value; empty where nothing is known.

    Args:
        argument: Name of the argument.
        value: What was passed. Classes are compared by name, so that nothing is imported for it.
    """
    hints = _VALUES[argument]
    return next((hints[kind.__name__] for kind in type(value).__mro__ if kind.__name__ in hints), "")
