"""What TrainingArguments say about the loop: batches, formats, memory, compilation, seeds (transformers 5.23,
training_args.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.config.describe import shown
from unishard.contract.entries import Given, Key, Meaning, Unreadable
from unishard.contract.key_rows import boolean, broadcast_buffers, drops, integer, number, refuses, sets, text
from unishard.contract.rules import Fit

__all__ = ["LOOP", "checkpointing", "clipping", "compute", "matmul", "off"]

_AUTOCAST = "Trainer also runs FSDP1 in torch.autocast: some operations stay in fp32; without it all run in this dtype"
_KWARGS = "affects only memory and time: losses are the same"


def off(value: Any) -> bool:
    """Whether a value says no."""
    return value in (None, False, "", 0, [], {}) or str(value).lower() in ("false", "no", "none")


def clipping(value: Any, given: Given) -> Meaning:
    """The largest norm; 0 for none."""
    norm = number(0)(0 if value is None else value)
    return Meaning(fields={"training.gradient_clipping": norm or None})


def compute(dtype: str) -> Key:
    """The argument that switches mixed precision on."""

    def read(value: Any, given: Given) -> Meaning:
        if not boolean(value if value is not None else False):
            return Meaning(Fit.IGNORED, "is off", kept=True)
        fields: dict[str, Any] = {"precision.compute": dtype}
        if given.get("deepspeed"):
            return Meaning(fields=fields)
        if given.get("fsdp"):
            # FullyShardedDataParallelPlugin.set_mixed_precision, accelerate 1.15.0
            config = given.get("fsdp_config")
            first = isinstance(config, Mapping) and str(config.get("version", config.get("fsdp_version"))) == "1"
            fit, note = (Fit.APPROXIMATE, _AUTOCAST) if first else (Fit.EXACT, "")
            return Meaning(fit, note, {**fields, "precision.reduce": dtype})
        note = f"torch.autocast keeps some operations in fp32; without it all run in {dtype}"
        return Meaning(Fit.EQUIVALENT, note, fields)

    return Key(read, "precision.compute, precision.reduce")


def checkpointing(value: Any, given: Given) -> Meaning:
    """Whether the model's blocks run again in backward."""
    if not boolean(value if value is not None else False):
        return Meaning(Fit.IGNORED, "is off", kept=True)
    return Meaning(fields={"activation_checkpointing": "full"})


def _checkpointing_arguments(value: Any, given: Given) -> Meaning:
    if off(value):
        return Meaning(Fit.IGNORED, "is empty", kept=True)
    if not isinstance(value, Mapping):
        raise Unreadable(f"must be a mapping, got {shown(value)}; write {{use_reentrant: false}}")
    every = integer(1)(value.get("every_n_layers", 1))
    if every > 1:
        note = f"recomputes every block, not every {every}th: the same losses, less memory, more time"
        return Meaning(Fit.EQUIVALENT, note, kept=True)
    if value.get("offload"):
        return Meaning(Fit.IGNORED, "saved activations stay in device memory: losses are the same", kept=True)
    return Meaning(Fit.IGNORED, _KWARGS, kept=True)


def _compiled(value: Any, given: Given) -> Meaning:
    if off(value):
        return Meaning(Fit.IGNORED, "is off", kept=True)
    boolean(value)
    return Meaning(fields={"compile.mode": "full"})


def _compiler(value: Any, given: Given) -> Meaning:
    if value is None:
        return Meaning(Fit.IGNORED, "is off", kept=True)
    return Meaning(fields={"compile.mode": "full", "compile.backend": text(value)})


_CONVOLUTIONS = "Trainer also keeps convolutions in fp32; torch.backends.cudnn.conv.fp32_precision = 'ieee' does that"


def matmul(value: Any) -> Meaning:
    """Whether products of fp32 tensors may be computed in TF32."""
    if boolean(value):
        return Meaning(fields={"precision.matmul": "tf32"})
    return Meaning(Fit.EQUIVALENT, _CONVOLUTIONS, {"precision.matmul": "fp32"})


def _tf32(value: Any, given: Given) -> Meaning:
    """`tf32`; without it, Trainer switches TF32 on where it compiles, unless in fp16 (training_args.py, 9. TF32)."""
    if value is not None:
        return matmul(value)
    compiles = any(not off(given.get(f"torch_compile{argument}")) for argument in ("", "_backend", "_mode"))
    if compiles and (off(given.get("fp16")) or not off(given.get("bf16"))):
        return Meaning(Fit.EXACT, "Trainer switches TF32 on where it compiles", {"precision.matmul": "tf32"})
    return Meaning(Fit.IGNORED, "is not set", kept=True)


def _compile_mode(value: Any, given: Given) -> Meaning:
    if value is None:
        return Meaning(Fit.IGNORED, "is off", kept=True)
    note = f"mode {text(value)} affects only time and memory; compiled in the default mode"
    return Meaning(Fit.EQUIVALENT, note, {"compile.mode": "full"})


def _accelerator(value: Any, given: Given) -> Meaning:
    if off(value):
        return Meaning(Fit.IGNORED, "is empty", kept=True)
    if isinstance(value, Mapping) and not off(value.get("split_batches")):
        why = "split_batches counts all ranks' samples; divide per_device_train_batch_size, remove it"
        return Meaning(Fit.UNSUPPORTED, why)
    return Meaning(Fit.IGNORED, "affects only how Accelerate loads data", kept=True)


def _tokens(value: Any, given: Given) -> Meaning:
    if not boolean(value):
        return Meaning(Fit.IGNORED, "is off: each rank averages over its own tokens", kept=True)
    note = "Trainer averages over all ranks' tokens; call engine.backward(loss_sum, num_items=tokens)"
    return Meaning(Fit.NEEDS_INPUT, note, kept=True)


_OBJECT = "is a ParallelismConfig object; write sharding.strategy and sharding.group_size"


def _parallel(value: Any, given: Given) -> Meaning:
    if off(value):
        return Meaning(Fit.IGNORED, "is off", kept=True)
    return Meaning(Fit.UNSUPPORTED, _OBJECT)


def _buffers(value: Any, given: Given) -> Meaning:
    if value is None:
        return Meaning(Fit.IGNORED, "is not set", kept=True)
    if any(not off(given.get(engine)) for engine in ("fsdp", "fsdp_config", "fsdp_version", "deepspeed")):
        return Meaning(Fit.IGNORED, "only used with DistributedDataParallel", kept=True)
    return broadcast_buffers(value, given)


LOOP: Mapping[str, Key] = {
    "per_device_train_batch_size": sets("training.micro_batch_size", integer(1), silent=8),
    "per_gpu_train_batch_size": sets(
        "training.micro_batch_size", integer(1), Fit.EXACT, "transformers 5 calls it per_device_train_batch_size"
    ),
    "gradient_accumulation_steps": sets("training.gradient_accumulation_steps", integer(1), silent=1),
    "max_grad_norm": Key(clipping, "training.gradient_clipping", silent=1.0),
    "auto_find_batch_size": refuses("Trainer finds the batch size by trial; write per_device_train_batch_size", off),
    "average_tokens_across_devices": Key(
        _tokens, "", Fit.NEEDS_INPUT, "how the loss is averaged is the training script's to say"
    ),
    "ddp_broadcast_buffers": Key(_buffers, "training.buffers", Fit.EQUIVALENT),
    "bf16": compute("bf16"),
    "fp16": compute("fp16"),
    "tf32": Key(_tf32, "precision.matmul", silent=None),
    "activation_checkpointing": Key(checkpointing, "activation_checkpointing"),
    "activation_checkpointing_kwargs": Key(_checkpointing_arguments, "", Fit.IGNORED, _KWARGS),
    "gradient_checkpointing": Key(checkpointing, "activation_checkpointing"),
    "gradient_checkpointing_kwargs": Key(_checkpointing_arguments, "", Fit.IGNORED, _KWARGS),
    "torch_compile": Key(_compiled, "compile.mode"),
    "torch_compile_backend": Key(_compiler, "compile.mode, compile.backend"),
    "torch_compile_mode": Key(_compile_mode, "compile.mode", Fit.EQUIVALENT),
    "seed": sets(
        "training.seed",
        integer(0),
        Fit.EQUIVALENT,
        "the same number; Trainer's sampler draws an order of its own from it",
        silent=42,
    ),
    "data_seed": drops("seeds only the data order, which training.seed does here"),
    "full_determinism": drops("is a switch of torch (torch.use_deterministic_algorithms) for your training script"),
    "accelerator_config": Key(_accelerator, "", Fit.IGNORED, "affects only how Accelerate loads data"),
    "parallelism_config": Key(_parallel, "", Fit.UNSUPPORTED, _OBJECT),
    "distributed_config": Key(_parallel, "", Fit.UNSUPPORTED, _OBJECT),
}
