"""What `fsdp_config` says (composer.utils.FSDPConfig and FSDP2Config of Composer 0.32).

Most of its keys are FSDP's own arguments, which the engine's table reads; here are the others, and those that Composer
takes otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from unishard.config.describe import shown
from unishard.config.topology import Topology
from unishard.contract.entries import DocumentValues, Entry, Key, KeyEffect, Path, Undecided, Unreadable
from unishard.contract.key_rows import integer, one_of, refuses
from unishard.contract.rules import Fit
from unishard.formats.engine_block import EngineBlock, Spot, combined
from unishard.formats.names import names

ARGUMENTS: Mapping[str, str] = {
    name: name
    for name in names(
        "sharding_strategy reshard_after_forward cpu_offload activation_checkpointing "
        "activation_checkpointing_reentrant activation_cpu_offload backward_prefetch forward_prefetch "
        "limit_all_gathers use_orig_params sync_module_states ignored_modules load_monolith_rank0_only "
        "load_fsdp_monolith_rank0_only state_dict_type"
    )
} | {
    "activation_cpu_offload": "activation_checkpointing_offload",
    "load_fsdp_monolith_rank0_only": "load_monolith_rank0_only",
}
"""Keys that the engine reads, and its name of each."""

_PRECISIONS = {"fp32": "fp32", "amp_bf16": "bf16", "amp_fp16": "fp16", "amp": "fp16", "bf16": "bf16", "fp16": "fp16"}
_DTYPES = {
    **_PRECISIONS,
    "bfloat16": "bf16",
    "bfloat": "bf16",
    "torch.bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "torch.float16": "fp16",
    "float32": "fp32",
    "torch.float32": "fp32",
}
_AUTOCAST = "autocast keeps norms, softmax and losses in fp32; without it all runs in this dtype"


def _compute_of(value: Any) -> str:
    """Format that `precision` asks for.

    Raises:
        Unreadable: unishard has no such format.
    """
    word = str(value).strip().lower()
    if word not in _PRECISIONS:
        raise Unreadable(f"must be fp32, amp_bf16 or amp_fp16 (no fp8), got {shown(value)}; write amp_bf16")
    return _PRECISIONS[word]


_TF32 = "Composer allows TF32 on GPUs (devices/device_gpu.py); set precision.matmul: tf32 for the same"


def _precision(value: Any, given: DocumentValues) -> KeyEffect:
    compute = _compute_of(value)
    if compute == "fp32":
        return KeyEffect(Fit.EQUIVALENT, _TF32, {"precision.compute": compute})
    return KeyEffect(Fit.EQUIVALENT, _AUTOCAST, {"precision.compute": compute})


def _mixed(value: Any, given: DocumentValues) -> KeyEffect:
    """The dtypes of reductions and buffers; FSDP keeps fp32 master weights with each of them."""
    if isinstance(value, Mapping):
        return _formats(value)
    word = one_of({"full": "full", "default": "default", "pure": "pure"})(value)
    if word == "full":
        return KeyEffect(Fit.EXACT, "", {"precision.reduce": "fp32", "precision.buffers": "keep"})
    precision = given.get("precision")
    if isinstance(precision, str) and "${" in precision:
        who = Undecided(f"precision, which is {precision}")
        return KeyEffect(
            Fit.NEEDS_INPUT, f"the dtypes come from {who.who}", {"precision.reduce": who, "precision.buffers": who}
        )
    compute = _compute_of(precision)
    return KeyEffect(fields={"precision.reduce": compute if word == "pure" else "fp32", "precision.buffers": compute})


def _formats(value: Mapping[str, Any]) -> KeyEffect:
    unknown = set(value) - {"param_dtype", "reduce_dtype", "buffer_dtype"}
    if unknown:
        raise Unreadable(f"takes only param_dtype, reduce_dtype, buffer_dtype, got {sorted(unknown)[0]}; remove it")
    read = {key: one_of(_DTYPES)(item) for key, item in value.items() if item is not None}
    reduce = read.get("reduce_dtype", read.get("param_dtype", "fp32"))
    return KeyEffect(fields={"precision.reduce": reduce, "precision.buffers": read.get("buffer_dtype", "keep")})


def _hybrid(given: DocumentValues) -> bool:
    return str(given.get("fsdp_config.sharding_strategy")).upper().removeprefix("_").startswith("HYBRID")


def _shard_degree(value: Any, given: DocumentValues) -> KeyEffect:
    degree = integer(-1)(value)
    if not _hybrid(given):
        return _full_shard_degree(degree, given)
    replicas = given.get("fsdp_config.data_parallel_replicate_degree")
    if degree > 0:
        return KeyEffect(fields={"sharding.group_size": degree})
    if replicas is None:
        return KeyEffect(Fit.IGNORED, "the ranks of a node share a copy")
    return _group_of(integer(1)(replicas), given)


def _full_shard_degree(degree: int, given: DocumentValues) -> KeyEffect:
    """Without a hybrid strategy, all ranks share one copy."""
    if given.topology and degree > 0 and degree != given.topology.world_size:
        raise Unreadable(
            f"must be {given.topology.world_size} (all ranks) without a hybrid strategy, got {degree}; write -1"
        )
    return KeyEffect(Fit.IGNORED, "all ranks share one copy")


def _replicate_degree(value: Any, given: DocumentValues) -> KeyEffect:
    if value is None:
        return KeyEffect(Fit.IGNORED, "is not set")
    degree = integer(1)(value)
    if not _hybrid(given):
        if degree > 1:
            raise Unreadable(f"must be 1 without a hybrid strategy, got {degree}; write HYBRID_SHARD")
        return KeyEffect(Fit.IGNORED, "is off")
    shard = given.get("fsdp_config.data_parallel_shard_degree")
    if shard not in (None, -1, "-1"):
        return KeyEffect(fields={"sharding.group_size": integer(1)(shard)})
    return _group_of(degree, given)


def _group_of(replicas: int, given: DocumentValues) -> KeyEffect:
    if given.topology is None:
        who = Undecided(f"the number of ranks, divided by {replicas}; add --world-size")
        return KeyEffect(Fit.NEEDS_INPUT, f"the value comes from {who.who}", {"sharding.group_size": who})
    return KeyEffect(fields={"sharding.group_size": max(given.topology.world_size // replicas, 1)})


def _device_mesh(value: Any, given: DocumentValues) -> KeyEffect:
    if not isinstance(value, list) or not 1 <= len(value) <= 2:
        raise Unreadable(f"must be one or two sizes, got {shown(value)}; write data_parallel_shard_degree")
    sizes = [integer(1)(size) for size in value]
    if len(sizes) == 1:
        return _full_shard_degree(sizes[0], given)
    if not _hybrid(given):
        raise Unreadable("must have one axis without a hybrid strategy; set sharding_strategy to HYBRID_SHARD")
    return KeyEffect(fields={"sharding.group_size": sizes[1]})


def _off(value: Any) -> bool:
    return value in (None, False, "false")


def _least(value: Any, given: DocumentValues) -> KeyEffect:
    size = integer(0)(value)
    if str(given.get("fsdp_config.sharding_strategy")).upper() == "NO_SHARD":
        return KeyEffect(Fit.IGNORED, "nothing is sharded")
    note = "FSDP cuts at any module of this size, not only at blocks"
    return KeyEffect(Fit.EQUIVALENT, note, {"sharding.min_unit_params": size})


def _drops(why: str) -> Key:
    """Not repeated in another document, whose other keys may not go with it."""
    return Key(lambda value, given: KeyEffect(Fit.IGNORED, why), "", Fit.IGNORED, why)


_MEMORY = "affects only time and memory"

FSDP: Mapping[str, Key] = {
    "precision": Key(_precision, "precision.compute", Fit.EQUIVALENT, _AUTOCAST),
    "fsdp_config.mixed_precision": Key(_mixed, "precision.reduce, precision.buffers"),
    "fsdp_config.data_parallel_shard_degree": Key(_shard_degree, "sharding.group_size"),
    "fsdp_config.data_parallel_replicate_degree": Key(_replicate_degree, "sharding.group_size"),
    "fsdp_config.device_mesh": Key(_device_mesh, "sharding.group_size", note="removed in Composer 0.24"),
    "fsdp_config.min_params": Key(_least, "sharding.min_unit_params", Fit.EQUIVALENT),
    "fsdp_config.auto_wrap": _drops("the model's blocks are units"),
    "fsdp_config.flatten_parameters": _drops("FSDP2 keeps the parameters as they are"),
    "fsdp_config.backward_prefetch_limit": _drops(_MEMORY),
    "fsdp_config.forward_prefetch_limit": _drops(_MEMORY),
    "fsdp_config.te_checkpoint_wrapper": _drops("the same results with torch's own checkpointing"),
    "fsdp_config.te_shard_fp8_weight": refuses("fp8 is not supported; remove it", _off),
    "fsdp_config.keep_low_precision_grads": refuses("gradients keep the dtype of the master weights; remove it", _off),
    "fsdp_config.process_group": refuses(
        "custom process groups are not supported; use HYBRID_SHARD and data_parallel_shard_degree", _off
    ),
    "fsdp_config.load_planner": _drops("affects only how a checkpoint is read"),
    "fsdp_config.save_planner": _drops("affects only how a checkpoint is written"),
    "fsdp_config.sharded_ckpt_prefix_dir": _drops("affects only the files of checkpoints"),
    "fsdp_config.verbose": _drops("affects only logs"),
}
"""Their rows; `fsdp_config` stands for `parallelism_config.fsdp` as well."""

DEEPSPEED = ("deepspeed_config", "deepspeed")
"""Keys that hold DeepSpeed's own config, which Composer read until 0.28."""
_FSDP: Path = ("fsdp_config",)


def engine(shaped: Mapping[str, Any], topology: Topology | None) -> Iterator[Entry]:
    """What the engine's own table makes of its part of the file."""
    deepspeed = next((key for key in DEEPSPEED if isinstance(shaped.get(key), Mapping)), None)
    for key in DEEPSPEED:
        if key in shaped and key != deepspeed:
            yield Entry((key,), shaped[key], KeyEffect(Fit.IGNORED, "is off"))
    if deepspeed is None:
        yield from _fsdp(shaped, topology)
        return
    yield Entry((deepspeed,), "deepspeed", KeyEffect(fields={"backend": "deepspeed"}), assumed=True)
    yield from EngineBlock("deepspeed", (deepspeed,), native=shaped[deepspeed]).entries(topology=topology)
    if "fsdp_config" in shaped:
        sharded = shaped["fsdp_config"]
        keys = [key for key in sharded if key in ARGUMENTS] if isinstance(sharded, Mapping) else []
        refused = KeyEffect(Fit.UNSUPPORTED, f"contradicts {deepspeed}; keep one of the two")
        yield from (Entry(("fsdp_config", key), sharded[key], refused) for key in keys)
        if not isinstance(sharded, Mapping) or not sharded:
            yield Entry(_FSDP, sharded, KeyEffect(Fit.IGNORED, "is off") if not sharded else refused)


def _fsdp(shaped: Mapping[str, Any], topology: Topology | None) -> Iterator[Entry]:
    sharded = shaped.get("fsdp_config")
    if sharded in (None, False):
        if trains(shaped):
            note = "without fsdp_config Composer runs DistributedDataParallel"
            fields = {"backend": "fsdp", "sharding.strategy": "no_shard"}
            yield Entry(_FSDP, sharded, KeyEffect(Fit.EXACT, note, fields), assumed="fsdp_config" not in shaped)
        elif "fsdp_config" in shaped:
            yield Entry(_FSDP, sharded, KeyEffect(Fit.IGNORED, "is off"))
    elif not isinstance(sharded, Mapping):
        yield Entry(
            _FSDP,
            sharded,
            KeyEffect(Fit.UNSUPPORTED, f"must be a mapping, got {shown(sharded)}; write its keys below it"),
        )
    elif not sharded:
        yield Entry(_FSDP, sharded, KeyEffect(Fit.EXACT, "", {"backend": "fsdp", "sharding.strategy": "full_shard"}))
    else:
        yield from _arguments(sharded, topology)


def _arguments(sharded: Mapping[str, Any], topology: Topology | None) -> Iterator[Entry]:
    """FSDP's own arguments, each at its place below `fsdp_config`."""
    names = {own: key for key, own in ARGUMENTS.items() if key in sharded}
    block = EngineBlock("fsdp", _FSDP, {"version": ()})
    for key, value in sharded.items():
        spot = Spot((*_FSDP, key), value)
        if key in ARGUMENTS and names[ARGUMENTS[key]] == key:
            block.add(ARGUMENTS[key], value, spot)
        elif key in ARGUMENTS:
            yield combined(spot, [KeyEffect(Fit.IGNORED, f"{names[ARGUMENTS[key]]} says it as well, and counts")])
    version = 2 if "reshard_after_forward" in block.native and "sharding_strategy" not in block.native else 1
    yield from block.entries(defaults={"version": version}, topology=topology)


def trains(shaped: Mapping[str, Any]) -> bool:
    """Whether the file is for training, and not for evaluation or a benchmark."""
    return any(key in shaped for key in ("optimizer", "max_duration", "global_train_batch_size", "train_loader"))
