"""Rows of the fields that unishard's own loop honors, the same way around every engine."""

from __future__ import annotations

from collections.abc import Mapping

from unishard.config import Config, leaves
from unishard.contract.field_rows import row
from unishard.contract.rules import Fit, Rule, done_by_unishard, is_, unless

_ARGUMENT = done_by_unishard("argument of the optimizer")
_GROUPS = done_by_unishard("parameter groups, by the names that parameters have before sharding")
_WRITER = done_by_unishard("argument of the library that writes")
_FORMULA = done_by_unishard("part of the same formula")

_LAUNCH = {
    "launch.nodes": "`--nnodes` of torchrun, `--nodes` of sbatch",
    "launch.processes_per_node": "`--nproc-per-node` of torchrun",
    "launch.endpoint": "`--rdzv-endpoint` of torchrun",
    "launch.rendezvous": "`--rdzv-backend` of torchrun",
    "launch.rendezvous_id": "`--rdzv-id` of torchrun",
    "launch.rendezvous_options": "`--rdzv-conf` of torchrun",
    "launch.max_restarts": "`--max-restarts` of torchrun",
    "launch.environment": "of the ranks",
    "launch.slurm": "options of sbatch",
}

LOOP: Mapping[str, Rule] = {
    "backend": done_by_unishard("chooses this table"),
    "precision.matmul": row(
        Fit.EXACT,
        "torch.set_float32_matmul_precision",
        "highest or high, for the whole process",
        unless(*is_("precision.matmul", "keep")),
    ),
    "precision.initial_loss_scale": done_by_unishard("where the dynamic scale begins"),
    "precision.loss_scale_growth_interval": done_by_unishard("counts updates"),
    "activation_checkpointing": Rule(
        Fit.EXACT,
        "torch.utils.checkpoint.checkpoint",
        "around `forward`, inside the engine's hooks; not reentrant, keeps random state",
    ),
    "quantization.type": done_by_unishard(
        "bitsandbytes; the bytes are frozen parameters of dtype uint8, sharded by the engine like any other"
    ),
    "quantization.double_quantization": done_by_unishard("the scales of the blocks are a parameter of bytes, too"),
    "quantization.skip_modules": done_by_unishard("by the names of layers in `unishard.from_pretrained`"),
    "offload.nvme_path": done_by_unishard("one file of each rank, without a name"),
    "offload.activations": Rule(
        Fit.EXACT,
        "torch.autograd.graph.saved_tensors_hooks",
        "around `forward` of each block, inside the engine's hooks; copies on a stream of their own",
    ),
    "parallel.sequence.size": done_by_unishard(
        "groups of neighboring ranks share samples; the engine shards over all ranks, as without it"
    ),
    "parallel.sequence.method": done_by_unishard("attention by all-to-all of heads, or all-gather of keys and values"),
    "parallel.sequence.recurrences": done_by_unishard(
        "recurrences and state spaces by all-to-all of heads, or all-gather of states"
    ),
    "parallel.sequence.keys": done_by_unishard("which tensors `engine.batches` splits"),
    "parallel.sequence.pad_to": done_by_unishard("`engine.batches` pads"),
    "parallel.expert.size": done_by_unishard(
        "groups of neighboring ranks have the experts together; the engine shards those of a rank over the ranks with "
        "the same"
    ),
    "parallel.tensor.size": done_by_unishard(
        "groups of neighboring ranks have layers together; the engine shards the part of a rank over the ranks with "
        "the same"
    ),
    "parallel.tensor.plan": done_by_unishard("which modules are cut, and how"),
    "training.micro_batch_size": done_by_unishard("batch size of `unishard.dataloader`"),
    "training.gradient_accumulation_steps": done_by_unishard(
        "`backward` divides the loss by it, `step` updates at the end of a window"
    ),
    "training.batch_ramp": done_by_unishard("the length of a window depends on the updates before it"),
    "training.global_batch_size": done_by_unishard("compared with micro-batch x accumulation x ranks"),
    "training.gradient_clipping": done_by_unishard(
        "fp32 L2 norm over all ranks, formula of `torch.nn.utils.clip_grad_norm_`"
    ),
    "training.backward_calls": done_by_unishard(
        "gradients add up, as over micro-batches, without a division; those of a window end with its last call"
    ),
    "training.loss_chunk_tokens": done_by_unishard(
        "the model's head runs once over chunks, recomputed by `torch.utils.checkpoint`; its weights are gathered once"
    ),
    "training.nonfinite": done_by_unishard("checks the global norm before the update, the same on every rank"),
    "training.last_window": done_by_unishard("`step` divides by the true length of the last window, or leaves it out"),
    "training.buffers": done_by_unishard(
        "hashes are compared at evaluation and at a save, and persistent buffers that differ merged"
    ),
    "training.seed": done_by_unishard("seeds the data order, and each rank's generators after `prepare`"),
    "optimizer.name": done_by_unishard(
        "built by unishard: torch's own, Lion of lion-pytorch, or Muon or AdamW of 8 bits on shards"
    ),
    "optimizer.lr": _ARGUMENT,
    "optimizer.betas": _ARGUMENT,
    "optimizer.eps": _ARGUMENT,
    "optimizer.amsgrad": _ARGUMENT,
    "optimizer.momentum": _ARGUMENT,
    "optimizer.nesterov": _ARGUMENT,
    "optimizer.matrices": done_by_unishard("each is sent to one rank by all-to-all, which updates it"),
    "optimizer.adamw_lr": _GROUPS,
    "optimizer.adjust_lr": _ARGUMENT,
    "optimizer.ns_steps": _ARGUMENT,
    "optimizer.ns_dtype": done_by_unishard("of the iterations and of that all-to-all"),
    "optimizer.weight_decay": _ARGUMENT,
    "optimizer.no_decay": _GROUPS,
    "optimizer.groups": _GROUPS,
    "scheduler.name": done_by_unishard("closed form, written into the parameter groups after each update"),
    "scheduler.warmup_steps": done_by_unishard("counts updates"),
    "scheduler.warmup_type": _FORMULA,
    "scheduler.warmup_start_ratio": _FORMULA,
    "scheduler.delay_steps": done_by_unishard("counts updates"),
    "scheduler.total_steps": done_by_unishard("counts updates"),
    "scheduler.decay_steps": done_by_unishard("counts updates"),
    "scheduler.decay_type": _FORMULA,
    "scheduler.min_lr_ratio": done_by_unishard("factor of `optimizer.lr`"),
    "communication.timeout": done_by_unishard("timeout of every process group, and of the desync check"),
    "communication.desync_check": done_by_unishard(
        "a few bytes over gloo before each collective call; none with one rank"
    ),
    "communication.desync_timeout": done_by_unishard("how long that check waits, in seconds"),
    "compile.backend": Rule(Fit.EXACT, "torch.compile(backend=...)"),
    "checkpoint.dir": done_by_unishard(
        "each rank writes the parts that it holds, under the names that parameters have in the model"
    ),
    "checkpoint.copy_to": done_by_unishard("a thread of each node copies, by fsspec"),
    "checkpoint.on_existing": done_by_unishard("`resume` in `prepare`, the check before the first update"),
    "checkpoint.every_steps": done_by_unishard("counts updates, at the end of a window"),
    "checkpoint.every_minutes": done_by_unishard("by the clock of rank 0, at the end of a window"),
    "checkpoint.keep_last": done_by_unishard("deletes after a newer checkpoint is complete"),
    "checkpoint.keep_every": done_by_unishard("part of the same"),
    "checkpoint.keep_best": done_by_unishard("by the metric that `engine.save` is passed"),
    "checkpoint.best": done_by_unishard("part of the same"),
    "checkpoint.async_save": done_by_unishard("copies to host memory, and a thread writes"),
    "checkpoint.on_signal": done_by_unishard("the ranks agree at the end of a window; exit code 85"),
    "logging.to": done_by_unishard("rank 0 writes"),
    "logging.every_steps": done_by_unishard("counts updates, at the end of a window"),
    "logging.dir": done_by_unishard("files of rank 0"),
    "logging.module_steps": done_by_unishard("hooks on the modules in these steps; summed over the ranks"),
    "logging.project": _WRITER,
    "logging.run_name": _WRITER,
    "logging.wandb_entity": _WRITER,
    "logging.wandb_group": _WRITER,
    "logging.wandb_mode": _WRITER,
    "logging.mlflow_uri": _WRITER,
    "profile.steps": done_by_unishard("`torch.profiler` from the forward to the update of each"),
    "profile.dir": done_by_unishard("a file for each run of steps and rank"),
    "profile.ranks": done_by_unishard("part of the same"),
    "profile.memory": done_by_unishard("a snapshot of the CUDA allocator, or the profiler's memory events"),
    "profile.shapes": done_by_unishard("argument of the profiler"),
    **{path: Rule(Fit.EXACT, "unishard launch", note) for path, note in _LAUNCH.items()},
    "strict": done_by_unishard("refuses what is approximate in this table"),
}
"""By field; a backend lists only where it differs."""


def complete(own: Mapping[str, Rule]) -> dict[str, Rule]:
    """A backend's rows and the shared rows of the other fields, in the order of the schema."""
    rows = {**LOOP, **own}
    return {path: rows[path] for path, _ in leaves(Config) if path in rows}
