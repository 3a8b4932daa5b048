"""What TrainingArguments say about the loop: batches, formats, memory, compilation, seeds (transformers 5.23,
training_args.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.config import Config
from unishard.config.describe import shown
from unishard.config.nested import Native
from unishard.contract.entries import DocumentValues, Key, KeyEffect, Unreadable, left_out
from unishard.contract.key_rows import boolean, broadcast_buffers, integer, number, sets, text
from unishard.contract.rules import Fit
from unishard.formats.hf.json_argument import mapping_in

FSDP = "fsdp"
"""The argument for FSDP."""
DEEPSPEED = "deepspeed"
"""The argument for DeepSpeed, which holds its config."""

FSDP_ON: Native = {FSDP: True, "fsdp_config": {"version": 2}}
"""What switches FSDP on. DeepSpeed is on where its config is there, and keeps fp32 master weights."""


def switched_on(cfg: Config) -> bool:
    """Whether a config needs FSDP."""
    return cfg.backend == "fsdp" and cfg.sharding.strategy != "no_shard"


def without(cfg: Config) -> bool:
    """Whether a config is run by neither engine, but by DistributedDataParallel."""
    return cfg.backend == "fsdp" and cfg.sharding.strategy == "no_shard"


_AUTOCAST = "Trainer also runs FSDP1 in torch.autocast: some operations stay in fp32; without it all run in this dtype"
_KWARGS = "affects only memory and time: losses are the same"


def off(value: Any) -> bool:
    """Whether a value says no."""
    return value in (None, False, "", 0, [], {}) or str(value).lower() in ("false", "no", "none")


def _clipping(value: Any, document: DocumentValues) -> KeyEffect:
    """The largest norm; 0 for none."""
    norm = number(0)(0 if value is None else value)
    return KeyEffect(fields={"training.gradient_clipping": norm or None})


def compute(dtype: str) -> Key:
    """The argument that switches mixed precision on."""

    def read(value: Any, document: DocumentValues) -> KeyEffect:
        if not boolean(value if value is not None else False):
            return left_out("is off")
        fields: dict[str, Any] = {"precision.compute": dtype}
        if document.get("deepspeed"):
            return KeyEffect(fields=fields)
        if document.get("fsdp"):
            # FullyShardedDataParallelPlugin.set_mixed_precision, accelerate 1.15.0
            config = document.get("fsdp_config")
            first = isinstance(config, Mapping) and str(config.get("version", config.get("fsdp_version"))) == "1"
            fit, note = (Fit.APPROXIMATE, _AUTOCAST) if first else (Fit.EXACT, "")
            return KeyEffect(fit, note, {**fields, "precision.reduce": dtype})
        note = f"torch.autocast keeps some operations in fp32; without it all run in {dtype}"
        return KeyEffect(Fit.EQUIVALENT, note, fields, beyond_fields=True)

    return Key(read, ("precision.compute", "precision.reduce"))


def _checkpointing(value: Any, document: DocumentValues) -> KeyEffect:
    """Whether the model's blocks run again in backward."""
    if not boolean(value if value is not None else False):
        return left_out("is off")
    return KeyEffect(fields={"activation_checkpointing": "full"})


def _checkpointing_arguments(value: Any, document: DocumentValues) -> KeyEffect:
    value = mapping_in(value)
    if off(value):
        return left_out("is empty")
    if not isinstance(value, Mapping):
        raise Unreadable(f"must be a mapping, got {shown(value)}; write {{use_reentrant: false}}", value)
    every = integer(1)(value.get("every_n_layers", 1))
    recomputed = any(not off(document.get(name)) for name in ("activation_checkpointing", "gradient_checkpointing"))
    fields = {"offload.activations": "cpu"} if recomputed and boolean(value.get("offload", False)) else {}
    if every > 1:
        note = f"recomputes every block, not every {every}th: the same losses, less memory, more time"
        return KeyEffect(Fit.EQUIVALENT, note, fields, copy_verbatim=True)
    return KeyEffect(fields=fields) if fields else left_out(_KWARGS)


def _compiled(value: Any, document: DocumentValues) -> KeyEffect:
    if off(value):
        return left_out("is off")
    boolean(value)
    return KeyEffect(fields={"compile.mode": "full"})


def _compiler(value: Any, document: DocumentValues) -> KeyEffect:
    if value is None:
        return left_out("is off")
    return KeyEffect(fields={"compile.mode": "full", "compile.backend": text(value)})


_CONVOLUTIONS = "Trainer also keeps convolutions in fp32; torch.backends.cudnn.conv.fp32_precision = 'ieee' does that"


def _matmul(value: Any) -> KeyEffect:
    """Whether products of fp32 tensors may be computed in TF32."""
    if boolean(value):
        return KeyEffect(fields={"precision.matmul": "tf32"})
    return KeyEffect(Fit.EQUIVALENT, _CONVOLUTIONS, {"precision.matmul": "fp32"})


def _tf32(value: Any, document: DocumentValues) -> KeyEffect:
    """`tf32`; without it, Trainer switches TF32 on where it compiles, unless in fp16 (training_args.py, 9. TF32)."""
    if value is not None:
        return _matmul(value)
    compiles = any(not off(document.get(f"torch_compile{argument}")) for argument in ("", "_backend", "_mode"))
    if compiles and (off(document.get("fp16")) or not off(document.get("bf16"))):
        return KeyEffect(Fit.EXACT, "Trainer switches TF32 on where it compiles", {"precision.matmul": "tf32"})
    return left_out("is not set")


def _compile_mode(value: Any, document: DocumentValues) -> KeyEffect:
    if value is None:
        return left_out("is off")
    note = f"mode {text(value)} affects only time and memory; compiled in the default mode"
    return KeyEffect(Fit.EQUIVALENT, note, {"compile.mode": "full"})


SPLIT = "split_batches counts all ranks' samples; divide per_device_train_batch_size, remove it"
_IN_A_FILE = "is in a file, which is not read; write its split_batches and gradient_accumulation_kwargs here, if any"
_TWICE = "transformers 5.23 refuses num_steps in it beside gradient_accumulation_steps; remove one of them"
_ACCUMULATED = "gradient_accumulation_steps"


def _accelerator(value: Any, document: DocumentValues) -> KeyEffect:
    value = mapping_in(value)
    if off(value):
        return left_out("is empty")
    if isinstance(value, str):
        return KeyEffect(Fit.NEEDS_INPUT, _IN_A_FILE, copy_verbatim=True)
    if isinstance(value, Mapping) and not off(value.get("split_batches")):
        return KeyEffect(Fit.UNSUPPORTED, SPLIT)
    steps = _num_steps(value)
    if steps is None:
        return left_out("affects only how Accelerate loads data")
    if document.get(_ACCUMULATED) not in (None, 1):
        return KeyEffect(Fit.UNSUPPORTED, _TWICE)
    # Written again beside gradient_accumulation_steps, transformers would refuse it.
    return KeyEffect(fields={f"training.{_ACCUMULATED}": integer(1)(steps)}, rejected_upstream=True)


def _num_steps(accelerator: Any) -> Any:
    """How many micro-batches `accelerator_config` accumulates; None where it does not say it."""
    arguments = accelerator.get("gradient_accumulation_kwargs") if isinstance(accelerator, Mapping) else None
    return arguments.get("num_steps") if isinstance(arguments, Mapping) else None


def _accumulated(value: Any, document: DocumentValues) -> KeyEffect:
    steps = integer(1)(value)
    if steps == 1 and _num_steps(mapping_in(document.get("accelerator_config"))) is not None:
        return left_out("num_steps in accelerator_config counts instead")
    return KeyEffect(fields={f"training.{_ACCUMULATED}": steps})


def _tokens(value: Any, document: DocumentValues) -> KeyEffect:
    if not boolean(value):
        return left_out("is off: each rank averages over its own tokens")
    note = "Trainer averages over all ranks' tokens; call engine.backward(loss_sum, num_items=tokens)"
    return KeyEffect(Fit.NEEDS_INPUT, note, copy_verbatim=True)


def _buffers(value: Any, document: DocumentValues) -> KeyEffect:
    if value is None:
        return left_out("is not set")
    if any(not off(document.get(engine)) for engine in ("fsdp", "fsdp_config", "deepspeed")):
        return left_out("only used with DistributedDataParallel")
    return broadcast_buffers(value, document)


LOOP: Mapping[str, Key] = {
    "per_device_train_batch_size": sets("training.micro_batch_size", integer(1), tool_default=8),
    "per_gpu_train_batch_size": sets(
        "training.micro_batch_size", integer(1), Fit.EXACT, "transformers 5 calls it per_device_train_batch_size"
    ),
    _ACCUMULATED: Key(_accumulated, (f"training.{_ACCUMULATED}",), tool_default=1),
    "max_grad_norm": Key(_clipping, ("training.gradient_clipping",), tool_default=1.0),
    "ddp_timeout": sets("communication.timeout", number(1)),
    "average_tokens_across_devices": Key(
        _tokens, (), Fit.NEEDS_INPUT, "how the loss is averaged is the training script's to say"
    ),
    "ddp_broadcast_buffers": Key(_buffers, ("training.buffers",), Fit.EQUIVALENT),
    "bf16": compute("bf16"),
    "fp16": compute("fp16"),
    "tf32": Key(_tf32, ("precision.matmul",), tool_default=None),
    "activation_checkpointing": Key(_checkpointing, ("activation_checkpointing",)),
    "activation_checkpointing_kwargs": Key(_checkpointing_arguments, ("offload.activations",), Fit.EXACT, _KWARGS),
    "gradient_checkpointing": Key(_checkpointing, ("activation_checkpointing",)),
    "gradient_checkpointing_kwargs": Key(_checkpointing_arguments, ("offload.activations",), Fit.EXACT, _KWARGS),
    "torch_compile": Key(_compiled, ("compile.mode",)),
    "torch_compile_backend": Key(_compiler, ("compile.mode", "compile.backend")),
    "torch_compile_mode": Key(_compile_mode, ("compile.mode",), Fit.EQUIVALENT),
    "seed": sets(
        "training.seed",
        integer(0),
        Fit.EQUIVALENT,
        "the same number; Trainer's sampler draws an order of its own from it",
        tool_default=42,
    ),
    "accelerator_config": Key(_accelerator, (f"training.{_ACCUMULATED}",)),
}
