"""YAML of llm-foundry and Composer: what each key says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unishard.config.nested import flat
from unishard.config.topology import Topology
from unishard.contract.rules import Fit
from unishard.formats import read, translate
from unishard.formats.catalog import recognise
from unishard.formats.composer import FORMAT
from unishard.formats.source import open_source

EIGHT = Topology(world_size=8, local_world_size=8)
TRAINING = {
    "model": {"name": "mpt_causal_lm", "d_model": 64},
    "tokenizer": {"name": "gpt2"},
    "train_loader": {"name": "text", "dataset": {"split": "train"}},
    "optimizer": {"name": "decoupled_adamw", "lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 1e-5},
    "scheduler": {"name": "cosine_with_warmup", "t_warmup": "100ba", "alpha_f": 0.1},
    "algorithms": {"gradient_clipping": {"clipping_type": "norm", "clipping_threshold": 0.5}},
    "max_duration": "2000ba",
    "global_train_batch_size": 64,
    "device_train_microbatch_size": 4,
    "precision": "amp_bf16",
    "seed": 17,
    "fsdp_config": {"sharding_strategy": "FULL_SHARD", "mixed_precision": "PURE", "activation_checkpointing": True},
}


def config(document, topology=EIGHT):
    return read(document, "composer", topology=topology).config


def items(document, to="unishard", topology=EIGHT):
    return {item.key: item for item in translate(document, to, from_="composer", topology=topology).items}


def changed(**settings):
    return {**TRAINING, **settings}


def test_a_run_file_is_unwrapped():
    run = {"name": "mine", "command": "composer train.py", "compute": {"gpus": 16}, "parameters": TRAINING}
    outcome = translate(run, "unishard")
    assert outcome.reading.format == "composer"
    assert outcome.reading.config.training.gradient_accumulation_steps == 1
    assert {item.key for item in outcome.items} >= {
        "compute",
        "parameters.seed",
        "parameters.fsdp_config.sharding_strategy",
    }


def test_groups_of_parameters():
    optimizer = {"name": "decoupled_adamw", "lr": 0.5, "weight_decay": 0.25}
    groups = [{"param_str_match": "norm", "weight_decay": 0.0}, {"param_str_match": "embed", "lr": 0.125}]
    cfg = config(changed(optimizer={**optimizer, "param_groups": groups}))
    norm, embed = cfg.optimizer.groups
    assert (norm.params, norm.lr, norm.weight_decay) == (["norm"], None, 0.0)
    assert (embed.params, embed.lr, embed.weight_decay) == (["embed"], 0.125, 2.0)
    refused = items(changed(optimizer={**optimizer, "param_groups": [{"param_str_match": "norm", "betas": [0, 0]}]}))
    assert refused["optimizer.param_groups"].fit is Fit.UNSUPPORTED


def test_two_names_of_one_argument_are_both_accounted_for():
    sharded = {"load_fsdp_monolith_rank0_only": True, "load_monolith_rank0_only": False}
    found = items(changed(fsdp_config=sharded))
    assert {"fsdp_config.load_fsdp_monolith_rank0_only", "fsdp_config.load_monolith_rank0_only"} <= set(found)


def test_deepspeed_of_older_files_goes_to_the_engines_table():
    document = {key: value for key, value in TRAINING.items() if key != "fsdp_config"}
    document["deepspeed_config"] = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    reading = read(document, "composer", topology=EIGHT)
    assert (reading.config.backend, reading.config.sharding.strategy) == ("deepspeed", "shard_grad_op")
    assert "deepspeed_config.zero_optimization.stage" in {entry.key for entry in reading.entries}


def test_newer_shape_of_the_parallelism():
    document = {key: value for key, value in TRAINING.items() if key != "fsdp_config"}
    document["parallelism_config"] = {"fsdp": {"reshard_after_forward": False}, "tp": None}
    assert config(document).sharding.reshard_after_forward is False
    assert "parallelism_config.fsdp.reshard_after_forward" in items(document)


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("algorithms.alibi", {"algorithms": {"alibi": {"max_sequence_length": 8}}}),
        (
            "algorithms.gradient_clipping.clipping_type",
            {"algorithms": {"gradient_clipping": {"clipping_type": "adaptive"}}},
        ),
        ("optimizer.name", {"optimizer": {"name": "no_op"}}),
        ("scheduler.name", {"scheduler": {"name": "inv_sqrt_with_warmup"}}),
        ("scheduler.t_warmup", {"scheduler": {"name": "cosine_with_warmup", "t_warmup": "soon"}}),
        ("tp_config", {"tp_config": {"tensor_parallel_degree": 2}}),
        ("precision", {"precision": "amp_fp8"}),
        ("fsdp_config.sharding_strategy", {"fsdp_config": {"sharding_strategy": "ZERO3"}}),
        ("fsdp_config.te_shard_fp8_weight", {"fsdp_config": {"te_shard_fp8_weight": True}}),
        ("fsdp_config.data_parallel_replicate_degree", {"fsdp_config": {"data_parallel_replicate_degree": 2}}),
        ("fsdp_config.verbos", {"fsdp_config": {"verbos": True}}),
        ("max_durations", {"max_durations": "1ep"}),
        ("seed", {"seed": -1}),
    ],
)
def test_what_cannot_be_had_is_refused(key, settings):
    item = items(changed(**settings))[key]
    assert item.fit is Fit.UNSUPPORTED
    assert item.note


ODD = [
    {"parameters": {}, "name": "x"},
    changed(fsdp_config="text", schedulers=[{"constant": {}}]),
    *(
        changed(**{key: value})
        for key in ("fsdp_config", "optimizer", "scheduler", "algorithms")
        for value in (None, {}, [], 3)
    ),
]


@pytest.mark.parametrize("document", [TRAINING, *ODD])
def test_every_key_is_accounted_for_once(document):
    keys = [item.key for item in translate(document, "unishard", from_="composer").items if not item.assumed]
    assert len(keys) == len(set(keys))
    for path, _ in flat(document):
        assert any(path == key or path.startswith(f"{key}.") for key in keys), path


JUNK = st.sampled_from(
    [
        None,
        True,
        False,
        0,
        -1,
        2.5,
        10**30,
        "",
        "auto",
        "${x.y}",
        "1ep",
        "text",
        [],
        [1, "a", {}],
        {},
        {"a": {"b": 1}},
        [[]],
    ]
)
PLACES = [tuple(key.split(".")) for key, _ in flat(TRAINING)] + [(key,) for key in TRAINING]


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(PLACES), JUNK, st.sampled_from(["unishard", "hf"]))
def test_whatever_stands_at_a_key_it_gets_its_verdict(place, junk, to):
    document = _with(TRAINING, place, junk)
    keys = [item.key for item in translate(document, to, from_="composer", topology=EIGHT).items]
    for path, _ in flat(document):
        assert any(path == key or path.startswith(f"{key}.") for key in keys), path


def _with(document, place, value):
    name, *below = place
    return {**document, name: _with(document[name], below, value) if below else value}


def test_it_is_recognised():
    assert recognise(open_source(TRAINING)) is FORMAT
    assert recognise(open_source({"name": "x", "image": "y", "command": "z", "parameters": TRAINING})) is FORMAT
