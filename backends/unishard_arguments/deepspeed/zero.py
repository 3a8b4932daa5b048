"""What is sharded and how ranks talk: what DeepSpeed's keys say, and how it says the fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.config import Config
from unishard.config.nested import Native, merge
from unishard.config.sharding import ZERO_STAGES
from unishard.config.topology import Topology
from unishard.contract.entries import DocumentValues, Key, KeyEffect, Unreadable
from unishard.contract.field_rows import asked, exact, row, when_default
from unishard.contract.key_rows import boolean, drops, integer, listed, refuses, sets
from unishard.contract.render import AUTO
from unishard.contract.rules import SCRIPT, Fit, Rule, When, equivalent, is_, unless
from unishard_arguments.deepspeed.facts import dropped, may_reach, only, quiet, spelt, stage, undecided, unless_auto
from unishard_deepspeed import fields

_Z = "zero_optimization."
_NOT_3 = "only used at stage 3"
_BY_TRANSFORMERS = "transformers computes it from the hidden size; affects only time and memory"
_ONCE = 'in 0.19.8 this is an error; write {"stage": ...}'


def assumed(document: DocumentValues) -> dict[str, Any]:
    """ZeRO is off unless the config says otherwise."""
    return {} if "zero_optimization" in document else {f"{_Z}stage": 0}


def _shards(document: DocumentValues) -> int | None:
    """Ranks in a group of MiCS, which older versions had at stage 3."""
    size = quiet(integer(2), document.get(f"{_Z}mics_shard_size"))
    return int(size) if size and stage(document) == 3 else None


def _stage(value: Any, document: DocumentValues) -> KeyEffect:
    if value == AUTO:
        return undecided("zero_stage of Accelerate's DeepSpeedPlugin, 2 by default", "sharding.strategy")
    stage_value = integer(0, 3)(value)
    return KeyEffect(fields={"sharding.strategy": "hybrid_shard" if _shards(document) else ZERO_STAGES[stage_value]})


def _whole(value: Any, document: DocumentValues) -> KeyEffect:
    """`zero_optimization` as a boolean, or as a number in old files."""
    if isinstance(value, bool):
        return KeyEffect(note="true means stage 1, and false stage 0", fields={"sharding.strategy": ZERO_STAGES[value]})
    if value is None or isinstance(value, Mapping):
        return KeyEffect(note="is empty: stage 0", fields={"sharding.strategy": "no_shard"})
    stage_value = quiet(integer(0, 3), value)
    if stage_value is None:
        raise Unreadable(f'must be a mapping of keys, got {value!r}; write {{"stage": 3}} or another stage', value)
    return KeyEffect(
        note=f"read as the stage; {_ONCE}",
        fields={"sharding.strategy": ZERO_STAGES[stage_value]},
        rejected_upstream=True,
    )


def _mics(value: Any, document: DocumentValues) -> KeyEffect:
    size = _shards(document)
    if size is None:
        return KeyEffect(
            Fit.IGNORED,
            "no groups without stage 3 and at least 2 ranks; DeepSpeed 0.19.8 refuses the key",
            rejected_upstream=True,
        )
    note = "MiCS was removed in DeepSpeed 0.19.8; hybrid_shard has the same groups"
    return KeyEffect(Fit.EQUIVALENT, note, {"sharding.group_size": size}, rejected_upstream=True)


def _gathers_in_group(document: DocumentValues) -> int | None:
    """Ranks in which the backward gathers again (hpZ), where they are known to be fewer than all and parameters do not
    stay.
    """
    size, ranks = (
        quiet(integer(2), document.get(f"{_Z}zero_hpz_partition_size")),
        document.topology.world_size if document.topology else 0,
    )
    stays = any(
        _distance(document.get(f"{_Z}{key}")) >= fields.UNLIMITED
        for key in ("stage3_max_reuse_distance", "max_reuse_distance")
    )
    return (
        int(size)
        if size and stage(document) == 3 and size < ranks and not stays and _shards(document) is None
        else None
    )


def _distance(value: Any) -> int:
    return int(quiet(integer(0), value) or 0)


def _hpz(value: Any, document: DocumentValues) -> KeyEffect:
    size = integer(0)(value)
    if size < 2 or stage(document) != 3:
        return dropped("no secondary copy of the parameters")
    if _gathers_in_group(document):
        return KeyEffect(fields={"sharding.reshard_after_forward": size})
    key = "deepspeed.zero_optimization.zero_hpz_partition_size"
    return KeyEffect(
        Fit.IGNORED,
        _HPZ,
        native={key: size},
        if_other_engine={"sharding.strategy": "hybrid_shard", "sharding.group_size": size},
    )


def _reuse(value: Any, document: DocumentValues) -> KeyEffect:
    distance = integer(0)(value)
    if distance >= fields.UNLIMITED:
        return KeyEffect(fields={"sharding.reshard_after_forward": False})
    effect = KeyEffect(fields={"sharding.reshard_after_forward": _gathers_in_group(document) or True})
    note = f"DeepSpeed keeps parameters used again within {distance:,} elements; same results"
    return effect._replace(fit=Fit.EQUIVALENT, note=note) if distance else effect


def _leaves(value: Any, document: DocumentValues) -> KeyEffect:
    classes = [] if value == [] else listed(value)
    if not classes:
        return dropped("names no class: the model's blocks are units")
    return KeyEffect(fields={"sharding.units": [name.rpartition(".")[2] for name in classes]})


def _leaf_names(value: Any, document: DocumentValues) -> KeyEffect:
    if value == []:
        return dropped("names nothing")
    return dropped("units are named by class; set sharding.units. Affects only memory")


def _norm(value: Any, document: DocumentValues) -> KeyEffect:
    note = "affects only logs: the norm is always computed"
    if boolean(value) or stage(document) in (1, 2):
        return dropped(note)
    return KeyEffect(Fit.IGNORED, f"{note}; DeepSpeed 0.19.8 refuses false at stages 0 and 3", rejected_upstream=True)


def _bucket(value: Any, document: DocumentValues) -> KeyEffect:
    size = integer(0)(value)
    note = "" if size else "0 reduces each gradient by itself, as 1 does"
    return KeyEffect(note=note, fields={"communication.reduce_bucket_size": size or 1})


def _prefetch(value: Any, document: DocumentValues) -> KeyEffect:
    return KeyEffect(fields={"communication.prefetch_bucket_size": integer(0)(value)})


def _granularity(value: Any, document: DocumentValues) -> KeyEffect:
    return (
        dropped("is off") if not integer()(value) else KeyEffect(fields={"sharding.min_unit_params": integer(0)(value)})
    )


def _at_3(read: Any, *fields: str) -> Key:
    return only(Key(read, fields), lambda document: may_reach(document, 3), _NOT_3)


_REUSE = unless_auto(_at_3(_reuse, "sharding.reshard_after_forward"), "affects only memory")
_PREFETCH = unless_auto(_at_3(_prefetch, "communication.prefetch_bucket_size"), _BY_TRANSFORMERS)
_LIVE = drops("limits how much DeepSpeed gathers ahead; affects only memory")
_HPZ = (
    "affects only time and memory: copies parameters within a group; hybrid_shard shards gradients and optimizer "
    "there too"
)
_ZENFLOW = "ZenFlow delays the update of unimportant gradients; remove it"

KEYS: Mapping[str, Key] = {
    "zero_optimization": Key(_whole, ("sharding.strategy",)),
    f"{_Z}stage": Key(_stage, ("sharding.strategy",)),
    f"{_Z}mics_shard_size": Key(_mics, ("sharding.strategy", "sharding.group_size"), Fit.EQUIVALENT),
    f"{_Z}mics_hierarchical_params_gather": Key(
        lambda value, document: KeyEffect(
            Fit.IGNORED, "how MiCS gathers; DeepSpeed 0.19.8 refuses the key", rejected_upstream=True
        ),
        (),
        Fit.IGNORED,
    ),
    f"{_Z}zero_hpz_partition_size": Key(
        _hpz, ("sharding.strategy", "sharding.group_size"), Fit.EQUIVALENT, "with another engine; else kept"
    ),
    f"{_Z}reduce_bucket_size": unless_auto(Key(_bucket, ("communication.reduce_bucket_size",)), _BY_TRANSFORMERS),
    f"{_Z}overlap_comm": unless_auto(sets("communication.overlap", boolean), "DeepSpeed's default: true at stage 3"),
    f"{_Z}stage3_prefetch_bucket_size": _PREFETCH,
    f"{_Z}prefetch_bucket_size": spelt(_PREFETCH, "stage3_prefetch_bucket_size"),
    f"{_Z}stage3_max_reuse_distance": _REUSE,
    f"{_Z}max_reuse_distance": spelt(_REUSE, "stage3_max_reuse_distance"),
    f"{_Z}stage3_max_live_parameters": _LIVE,
    f"{_Z}max_live_parameters": spelt(_LIVE, "stage3_max_live_parameters"),
    f"{_Z}stage3_module_granularity_threshold": _at_3(_granularity, "sharding.min_unit_params"),
    f"{_Z}module_granularity_threshold": spelt(
        _at_3(_granularity, "sharding.min_unit_params"), "stage3_module_granularity_threshold"
    ),
    f"{_Z}leaf_module.classes": _at_3(_leaves, "sharding.units"),
    f"{_Z}leaf_module.names": _at_3(_leaf_names),
    f"{_Z}leaf_module.name_suffixes": _at_3(_leaf_names),
    f"{_Z}compute_grad_norm": Key(_norm, (), Fit.IGNORED, "affects only logs: the norm is always computed"),
    f"{_Z}zenflow": refuses(_ZENFLOW, lambda value: value is None),
    f"{_Z}zeropp_loco_param": refuses(
        "LoCo was removed in DeepSpeed 0.19.8; remove it, or set zero_quantized_gradients", lambda value: value is None
    ),
    "allgather_size": drops("elements of one all-gather if zero_optimization is true; affects only time"),
}


def _three(cfg: Config) -> bool:
    return fields.stage_of_strategy(cfg) == 3


def _stage_of(cfg: Config, topology: Topology) -> Native:
    settings: dict[str, Any] = {"stage": fields.stage_of_strategy(cfg)}
    if _three(cfg):
        settings["memory_efficient_linear"] = False
    return fields.zero(**settings) | ({"zero_allow_untested_optimizer": True} if fields.stage_of_strategy(cfg) else {})


def _hpz_of(cfg: Config, topology: Topology) -> Native:
    if not cfg.sharding.hybrid or not _three(cfg) or not cfg.sharding.reshard_after_forward:
        return {}
    return fields.zero(zero_hpz_partition_size=cfg.sharding.group_size or topology.local_world_size)


def _next_unit(cfg: Config) -> bool:
    """Whether as much is gathered ahead as the next unit has; DeepSpeed knows no units here."""
    return cfg.communication.prefetch_bucket_size is None


def _kept_in_group(cfg: Config) -> Native:
    group = cfg.sharding.reshard_group
    return fields.zero(zero_hpz_partition_size=group) if group and _three(cfg) and not cfg.sharding.hybrid else {}


def _units_of(cfg: Config, topology: Topology) -> Native:
    classes = [*(cfg.sharding.units if cfg.sharding.units != "auto" else ()), *cfg.sharding.conditional_modules]
    return fields.zero(leaf_module={"classes": classes}) if _three(cfg) and classes else {}


_NOT_FULL = When("strategy is not full_shard", lambda cfg: not _three(cfg), Fit.EXACT, "only stage 3 gathers")

RULES: Mapping[str, Rule] = {
    "backend": Rule(Fit.EXACT, "deepspeed.initialize(config=...)"),
    "sharding.strategy": exact(
        "zero_optimization.stage",
        equivalent(
            *is_("sharding.strategy", "hybrid_shard"),
            "stage 3 over all ranks, and a second copy of the parameters in each group (hpZ)",
        ),
        equivalent(
            "hybrid_shard_grad_op",
            lambda cfg: cfg.sharding.hybrid,
            "stage 2 over all ranks: less memory, more traffic between nodes",
        ),
        to=_stage_of,
    ),
    "sharding.group_size": row(
        Fit.EQUIVALENT,
        "zero_optimization.zero_hpz_partition_size",
        "the ranks that share the second copy of the parameters",
        to=_hpz_of,
    ),
    "sharding.reshard_after_forward": exact(
        "zero_optimization.stage3_max_reuse_distance, stage3_max_live_parameters, zero_hpz_partition_size",
        equivalent(
            "a number with hybrid_shard",
            lambda cfg: cfg.sharding.hybrid and cfg.sharding.reshard_group is not None,
            "backward gathers in the group of hybrid_shard (hpZ)",
        ),
        to=lambda cfg, topology: merge(fields.gathering(cfg, topology), _kept_in_group(cfg)),
    ),
    "sharding.units": exact(
        "zero_optimization.leaf_module.classes",
        _NOT_FULL,
        equivalent(*is_("sharding.units", "auto"), "DeepSpeed gathers each module by itself"),
        to=_units_of,
    ),
    "sharding.min_unit_params": row(
        Fit.IGNORED,
        "",
        "DeepSpeed chooses its units otherwise; affects only time and memory",
    ),
    "sharding.conditional_modules": row(
        Fit.EQUIVALENT,
        "zero_optimization.leaf_module.classes",
        "gathered whole, and a rank that does not use one adds zeros",
        equivalent("strategy is not full_shard", lambda cfg: not _three(cfg), "unused parameters are reduced as zeros"),
    ),
    "sharding.replicate": row(
        Fit.APPROXIMATE,
        "zero_optimization.stage3_param_persistence_threshold",
        "DeepSpeed chooses by size what stays whole, not by name: these are sharded too, with the same maths unless "
        "their weights are read outside their modules or ranks skip them",
        when_default("sharding.replicate"),
        unless("strategy is not full_shard", lambda cfg: not _three(cfg), "every rank holds every parameter whole"),
    ),
    "communication.reduce_bucket_size": exact(
        "zero_optimization.reduce_bucket_size",
        to=lambda cfg, topology: fields.zero(reduce_bucket_size=cfg.communication.reduce_bucket_size),
    ),
    "communication.prefetch_bucket_size": exact(
        "zero_optimization.stage3_prefetch_bucket_size",
        equivalent("null", _next_unit, "left to DeepSpeed's 50,000,000 elements; affects only time and memory"),
        to=lambda cfg, topology: (
            fields.zero(stage3_prefetch_bucket_size=fields.ahead(cfg)) if _three(cfg) and not _next_unit(cfg) else {}
        ),
    ),
    "communication.overlap": exact(
        "zero_optimization.overlap_comm", to=lambda cfg, topology: fields.zero(overlap_comm=cfg.communication.overlap)
    ),
    **asked(
        Fit.NEEDS_INPUT,
        SCRIPT,
        {"communication.timeout": "deepspeed.init_distributed(timeout=...), or DEEPSPEED_TIMEOUT in minutes"},
    ),
    "communication.desync_check": Rule(
        Fit.IGNORED, "", "a check of the training loop, which changes nothing in training"
    ),
    "communication.desync_timeout": Rule(Fit.IGNORED, "", "belongs to a check of the training loop"),
}
