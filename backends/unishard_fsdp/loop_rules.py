"""Rows of the table that unishard's loop and the torch optimizer honour, around PyTorch's engines."""

from __future__ import annotations

from collections.abc import Mapping

from unishard.mapping.rules import Rule, loop

__all__ = ["LOOP"]

LOOP: Mapping[str, Rule] = {
    "training.micro_batch_size": loop("batch size of `unishard.dataloader`"),
    "training.gradient_accumulation_steps": loop("`backward` divides the loss by it, `step` updates at the end of a window"),
    "training.global_batch_size": loop("compared with micro-batch x accumulation x ranks"),
    "training.gradient_clipping": loop("fp32 L2 norm over all ranks, formula of `torch.nn.utils.clip_grad_norm_`"),
    "training.nonfinite": loop("looks at the global norm before the update, which is the same on every rank"),
    "training.last_window": loop("`batches` looks one window ahead; `step` divides by the window's true length"),
    "training.seed": loop("seeds the data order, and each rank's generators after `prepare`"),
    "optimizer.name": loop(
        "torch's own, or Lion of lion-pytorch, built after sharding; a shard is updated as the whole would be. AdamW and Adam are fused, "
        "SGD where parameters are whole"
    ),
    "optimizer.lr": loop("argument of the optimizer"),
    "optimizer.betas": loop("argument of the optimizer"),
    "optimizer.eps": loop("argument of the optimizer"),
    "optimizer.amsgrad": loop("argument of the optimizer"),
    "optimizer.momentum": loop("argument of the optimizer"),
    "optimizer.nesterov": loop("argument of the optimizer"),
    "optimizer.weight_decay": loop("argument of the optimizer"),
    "optimizer.no_decay": loop("parameter groups, by the names that parameters have before sharding"),
    "optimizer.groups": loop("parameter groups, by the names that parameters have before sharding"),
    "scheduler.name": loop("closed form, written into the parameter groups after each update"),
    "scheduler.warmup_steps": loop("counts updates"),
    "scheduler.warmup_type": loop("part of the same formula"),
    "scheduler.warmup_start_ratio": loop("part of the same formula"),
    "scheduler.delay_steps": loop("counts updates"),
    "scheduler.total_steps": loop("counts updates"),
    "scheduler.min_lr_ratio": loop("factor of `optimizer.lr`"),
}
