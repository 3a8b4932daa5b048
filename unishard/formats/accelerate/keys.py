"""The keys of Accelerate's file that are not an engine's arguments, and what each says in the config's words.

Sources, all of accelerate 1.15.0: commands/config/config_args.py (which keys there are), commands/launch.py (defaults
where the file is silent), utils/launch.py (what reaches the training processes) and utils/dataclasses.py (what they
make of it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from unishard.config.describe import shown
from unishard.config.launch import PORT
from unishard.contract.entries import DocumentValues, Key, KeyEffect, Unreadable, left_out
from unishard.contract.key_rows import boolean, drops, integer, one_of, refuses, rejected, text
from unishard.contract.rules import Fit
from unishard.contract.templates import is_placeholder
from unishard.formats.accelerate import sequence
from unishard.formats.accelerate.entries import KINDS, TOOL, kind_named, precision_word
from unishard.formats.names import names

_LAUNCHER = "launcher setting; start the ranks with torchrun or srun"
_LOST = "Accelerate 1.15.0 reads {} instead; only used with fp8, which becomes bf16"
_INTEL = f"Intel's extension of PyTorch; {TOOL} refuses this key, so remove it"
_GONE: Mapping[str, str] = {
    "env": f"{TOOL} refuses a file with this key; export the variables before the launch instead",
    "ipex_config": _INTEL,
    "xpu_config": _INTEL,
    "tpu_cluster": f"only used on TPUs; {TOOL} refuses this key, so remove it",
}
"""Keys with which Accelerate refuses a file, though nothing is lost without them."""
_SAGEMAKER = names(
    "ec2_instance_type iam_role_name image_uri profile region base_job_name pytorch_version transformers_version "
    "py_version sagemaker_inputs_file sagemaker_metrics_file additional_args"
)
"""Of Accelerate's SageMakerConfig."""
_RANKS = "num_processes divided by num_machines"
_ONE_HOST = "only used with several hosts; one host takes a free port"
_BACKENDS = ("static", "c10d", "etcd-v2", "etcd")


def _environment(value: Any, document: DocumentValues) -> KeyEffect:
    if value == "LOCAL_MACHINE":
        return left_out(_LAUNCHER)
    if value == "AMAZON_SAGEMAKER":
        return KeyEffect(Fit.UNSUPPORTED, "SageMaker jobs are not translated; write LOCAL_MACHINE and use torchrun")
    raise Unreadable(f"must be LOCAL_MACHINE, got {shown(value)}; write that, and use the cluster's launcher", value)


def _distributed_type(value: Any, document: DocumentValues) -> KeyEffect:
    kind = kind_named(value)
    return KeyEffect(kind.fit, kind.note, dict(kind.fields))


def _count(value: Any, document: DocumentValues) -> KeyEffect:
    if value is None or value == -1:
        return left_out("is not said, so Accelerate wants it on its command line")
    count = integer(1)(value)
    machines = 1 if document.get("num_machines") is None else integer(1)(document.get("num_machines"))
    if count % machines:
        raise Unreadable(f"must be a multiple of num_machines ({machines}), got {count}; write the total")
    # Another number of ranks is asked for: that one is written, not this.
    kept = document.topology is None or document.topology.world_size == count
    per_node = document.topology.local_world_size if document.topology else count // machines
    return KeyEffect(fields={"launch.processes_per_node": per_node}, note=_RANKS, copy_verbatim=kept)


def _machines(value: Any, document: DocumentValues) -> KeyEffect:
    if value is None:
        return left_out("is not said, so Accelerate takes 1")
    count = integer(1)(value)
    here = document.topology is None or document.topology.world_size == count * document.topology.local_world_size
    nodes = document.topology.world_size // document.topology.local_world_size if document.topology else count
    return KeyEffect(fields={"launch.nodes": nodes}, copy_verbatim=here)


def _use_cpu(value: Any, document: DocumentValues) -> KeyEffect:
    if not boolean(value):
        return left_out("computes on the accelerator where there is one")
    note = "the CPU computes only without a visible GPU; set CUDA_VISIBLE_DEVICES="
    if document.get("distributed_type") == "FSDP":
        note += "; Accelerate 1.15.0 does not shard on the CPU"
    return KeyEffect(Fit.APPROXIMATE, note, copy_verbatim=True)


def _gpus(value: Any, document: DocumentValues) -> KeyEffect:
    if value is not None and not isinstance(value, str):
        raise Unreadable(f"must be all or comma-separated indices, got {shown(value)}; write them in quotes", value)
    several = str(document.get("distributed_type")).startswith("MULTI_") and document.get("num_machines") in (None, 1)
    if several and value not in (None, "all") and "," not in value:
        raise Unreadable(
            f"must name two GPUs for {document.get('distributed_type')}, got {shown(value)}; write all", value
        )
    if value in (None, "all"):
        return left_out("every rank sees all GPUs of its host")
    return KeyEffect(fields={"launch.environment": {"CUDA_VISIBLE_DEVICES": value}}, copy_verbatim=True)


def _several(document: DocumentValues) -> bool:
    return document.get("main_process_ip") is not None and document.get("num_machines") not in (None, 1)


def _endpoint(document: DocumentValues) -> KeyEffect:
    """Where several hosts meet."""
    host, port = document.get("main_process_ip"), document.get("main_process_port")
    if not _several(document):
        return left_out(_ONE_HOST)
    return KeyEffect(fields={"launch.endpoint": f"{text(host)}:{port or PORT}"}, copy_verbatim=True)


def _rendezvous(value: Any, document: DocumentValues) -> KeyEffect:
    """Accelerate hands it to torchrun, which takes these words."""
    if value is None or document.get("num_machines") in (None, 1):
        return left_out(_ONE_HOST)
    return KeyEffect(
        fields={"launch.rendezvous": one_of(dict(zip(_BACKENDS, _BACKENDS, strict=True)))(value)}, copy_verbatim=True
    )


def _port(value: Any, document: DocumentValues) -> KeyEffect:
    if value is not None and (_several(document) or not is_placeholder(value)):
        integer(0, 65535)(value)
    return _endpoint(document)


def _fp16(value: Any, document: DocumentValues) -> KeyEffect:
    # Its meaning, where it has one, is that of mixed_precision, which the reader adds.
    if "mixed_precision" in document:
        return KeyEffect(Fit.IGNORED, "mixed_precision counts instead")
    return KeyEffect(note="the old name of mixed_precision: fp16" if value else "is off")


def _compiles(document: DocumentValues) -> bool:
    return bool(document.get("distributed_type") != "DEEPSPEED")


def _compile_backend(value: Any, document: DocumentValues) -> KeyEffect:
    if not _compiles(document):
        return left_out("Accelerate 1.15.0 does not pass this on to DeepSpeed: nothing is compiled")
    name = text(value).lower() if value is not False else "no"
    if name not in _DYNAMO:
        raise Unreadable(
            f"must be one of {', '.join(word.upper() for word in _DYNAMO)}, got {shown(value)}; write one of them",
            value,
        )
    if name == "no":
        return KeyEffect(fields={"compile.mode": "none"})
    note = _tf32(document)
    return KeyEffect(
        Fit.EQUIVALENT if note else Fit.EXACT, note, {"compile.mode": _mode(document), "compile.backend": name}
    )


def _tf32(document: DocumentValues) -> str:
    """Accelerate allows TF32 where it compiles and computes in fp32 (state.py, AcceleratorState)."""
    computes = str(document.get("mixed_precision") or "no").lower() == "no" and not document.get("fp16")
    return "Accelerate allows TF32 then; set precision.matmul: tf32 for the same" if computes else ""


def _mode(document: DocumentValues) -> str:
    regional = document.get("dynamo_config.dynamo_use_regional_compilation")
    return "per_block" if regional is not None and boolean(regional) else "full"


def _compile_regional(value: Any, document: DocumentValues) -> KeyEffect:
    wanted = boolean(value)
    backend = document.get("dynamo_config.dynamo_backend")
    if not _compiles(document) or backend is None or str(backend).lower() in ("no", "false"):
        return left_out("nothing is compiled")
    return KeyEffect(fields={"compile.mode": "per_block" if wanted else "full"})


def _dropped(why: str, convert: Callable[[Any], Any]) -> Key:
    """A key that is left out, if its value can be read at all."""

    def read(value: Any, document: DocumentValues) -> KeyEffect:
        convert(value)
        return left_out(why)

    return Key(read, (), Fit.IGNORED, why)


_DYNAMO = names(
    "no eager aot_eager inductor aot_ts_nvfuser nvprims_nvfuser cudagraphs ofi fx2trt onnxrt tensorrt "
    "aot_torchxla_trace_once torchxla_trace_once ipex tvm hpu_backend"
)
_TIME = "affects only how code is compiled"

_DYNAMO_KEYS: Mapping[str, Key] = {
    "dynamo_backend": Key(_compile_backend, ("compile.mode", "compile.backend")),
    "dynamo_config": drops("nothing is compiled"),
    "dynamo_config.dynamo_backend": Key(_compile_backend, ("compile.mode", "compile.backend")),
    "dynamo_config.dynamo_use_regional_compilation": Key(_compile_regional, ("compile.mode",)),
    "dynamo_config.dynamo_mode": _dropped(
        f"{_TIME}; torch's default mode is used",
        one_of(dict.fromkeys(("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"))),
    ),
    "dynamo_config.dynamo_use_fullgraph": _dropped(
        "only makes a break in the graph an error; the engines break it at each unit", boolean
    ),
    "dynamo_config.dynamo_use_dynamic": _dropped(f"{_TIME}; torch finds out by itself which shapes change", boolean),
}

_FP8_KEYS: Mapping[str, Key] = {
    f"fp8_config.{name}": drops("only used with fp8, which becomes bf16")
    for name in names(
        "backend use_autocast_during_eval margin interval fp8_format format amax_history_len amax_compute_algo "
        "override_linear_precision opt_level enable_fsdp_float8_all_gather pad_inner_dim"
    )
} | {
    f"fp8_config.{wizard}": drops(_LOST.format(name))
    for wizard, name in {
        "amax_history_length": "amax_history_len",
        "amax_compute_algorithm": "amax_compute_algo",
        "optimization_level": "opt_level",
    }.items()
}

KEYS: Mapping[str, Key] = {
    "compute_environment": Key(_environment, (), Fit.IGNORED, _LAUNCHER),
    "distributed_type": Key(
        _distributed_type,
        ("backend", "sharding.strategy"),
        note=", ".join(f"{name}: {kind.effect}" for name, kind in KINDS.items()),
    ),
    "mixed_precision": Key(lambda value, document: _checked_precision(value), ("precision.compute",)),
    "fp16": Key(_fp16, ("precision",)),
    "num_processes": Key(_count, ("launch.processes_per_node",), note=_RANKS),
    "num_machines": Key(_machines, ("launch.nodes",)),
    "use_cpu": Key(_use_cpu, (), Fit.IGNORED, "computes on the accelerator where there is one"),
    **{name: drops(_LAUNCHER) for name in names("same_network enable_cpu_affinity mpirun_config")},
    "machine_rank": drops(
        "differs by host: pass --node-rank to the launcher, where launch.rendezvous is static; c10d numbers the "
        "hosts as they meet"
    ),
    "rdzv_backend": Key(_rendezvous, ("launch.rendezvous",), note="with several machines"),
    "gpu_ids": Key(_gpus, ("launch.environment",), note="CUDA_VISIBLE_DEVICES"),
    "main_process_ip": Key(
        lambda value, document: _endpoint(document), ("launch.endpoint",), note="with several machines"
    ),
    "main_process_port": Key(_port, ("launch.endpoint",), note="with several machines"),
    "debug": drops("Accelerate's own check of its collectives; see communication.desync_check"),
    **{
        name: drops("only used on TPUs")
        for name in names(
            "main_training_function downcast_bf16 tpu_name tpu_zone tpu_vm tpu_env tpu_use_cluster tpu_use_sudo "
            "command_file commands"
        )
    },
    **{name: rejected("only used by SageMaker jobs") for name in _SAGEMAKER},
    **_DYNAMO_KEYS,
    sequence.BLOCK: drops("is empty"),
    **sequence.KEYS,
    "fp8_config": drops("is empty"),
    **_FP8_KEYS,
    "megatron_lm_config": drops("belongs to distributed_type: MEGATRON_LM"),
    **{name: rejected(why) for name, why in _GONE.items()},
    "tp_config": rejected("is empty"),
    "tp_config.tp_size": sequence.TENSOR,
    "kt_config": refuses(f"{TOOL} refuses a file with this key of the fork accelerate-kt; remove it"),
}
"""By dotted key. Those below `fsdp_config` and `deepspeed_config` stand in `engines.py`, since the engines say what
they mean."""


def _checked_precision(value: Any) -> KeyEffect:
    precision_word(value)
    return KeyEffect()
