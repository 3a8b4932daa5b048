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


def test_a_whole_training_is_understood():
    cfg = config(TRAINING)
    assert cfg.backend == "fsdp"
    assert (cfg.sharding.strategy, cfg.sharding.reshard_after_forward) == ("full_shard", True)
    assert (cfg.precision.compute, cfg.precision.reduce, cfg.precision.buffers, cfg.precision.master) == (
        "bf16",
        "bf16",
        "bf16",
        "fp32",
    )
    assert (cfg.training.micro_batch_size, cfg.training.gradient_accumulation_steps) == (4, 2)
    assert (cfg.training.gradient_clipping, cfg.training.seed, cfg.activation_checkpointing) == (0.5, 17, "full")
    assert (cfg.optimizer.name, cfg.optimizer.lr, cfg.optimizer.betas) == ("adamw", 1e-3, (0.9, 0.95))
    assert (cfg.scheduler.name, cfg.scheduler.warmup_steps, cfg.scheduler.total_steps, cfg.scheduler.min_lr_ratio) == (
        "cosine",
        100,
        2000,
        0.1,
    )


def test_decoupled_decay_is_divided_by_the_learning_rate():
    assert config(TRAINING).optimizer.weight_decay == pytest.approx(1e-2)
    assert items(TRAINING)["optimizer.weight_decay"].fit is Fit.EQUIVALENT
    plain = changed(optimizer={"name": "adamw", "lr": 1e-3, "weight_decay": 0.1})
    assert config(plain).optimizer.weight_decay == 0.1
    silent = changed(optimizer={"name": "decoupled_adamw", "lr": 1e-4})
    assert config(silent).optimizer.weight_decay == pytest.approx(0.1)
    assert config(silent).optimizer.betas == (0.9, 0.95)


@pytest.mark.parametrize(
    ("word", "formats"),
    [("PURE", ("bf16", "bf16")), ("DEFAULT", ("fp32", "bf16")), ("FULL", ("fp32", "keep")), (None, ("fp32", "bf16"))],
)
def test_mixed_precision_words_lean_on_the_precision(word, formats):
    sharded = {"sharding_strategy": "FULL_SHARD"} | ({"mixed_precision": word} if word else {})
    cfg = config(changed(fsdp_config=sharded))
    assert (cfg.precision.reduce, cfg.precision.buffers) == formats


def test_mixed_precision_by_format():
    sharded = {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "float32"}}
    cfg = config(changed(fsdp_config=sharded))
    assert (cfg.precision.reduce, cfg.precision.buffers) == ("fp32", "fp32")


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


def test_interpolations_are_followed_within_the_file():
    document = changed(
        variables={"seed": 5, "strategy": "SHARD_GRAD_OP", "again": "${variables.seed}"},
        seed="${variables.again}",
        global_seed=3,
        fsdp_config={"sharding_strategy": "${variables.strategy}"},
    )
    cfg = config(document)
    assert (cfg.training.seed, cfg.sharding.reshard_after_forward) == (5, False)


@pytest.mark.parametrize("text", ["${variables.missing}", "${oc.env:SEED}", "${seed}"])
def test_what_the_file_does_not_hold_needs_a_decision(text):
    document = changed(seed=text)
    assert items(document)["seed"].fit is Fit.NEEDS_INPUT
    assert "training.seed" in read(document, "composer").undecided


def test_batches_without_known_ranks_need_a_decision():
    reading = read(TRAINING, "composer")
    assert reading.config.training.global_batch_size == 64
    assert set(reading.undecided) == {"training.gradient_accumulation_steps"}
    automatic = read(changed(device_train_microbatch_size="auto"), "composer", topology=EIGHT)
    assert set(automatic.undecided) == {"training.micro_batch_size", "training.gradient_accumulation_steps"}


def test_uneven_micro_batches_become_even_ones():
    document = changed(global_train_batch_size=48, device_train_microbatch_size=4)
    cfg = config(document)
    assert (cfg.training.micro_batch_size, cfg.training.gradient_accumulation_steps) == (3, 2)
    assert items(document)["device_train_microbatch_size"].fit is Fit.EQUIVALENT
    refused = items(changed(global_train_batch_size=63))["global_train_batch_size"]
    assert refused.fit is Fit.UNSUPPORTED
    assert "multiple of the 8 ranks" in refused.note


def test_groups_of_parameters():
    optimizer = {"name": "decoupled_adamw", "lr": 0.5, "weight_decay": 0.25}
    groups = [{"param_str_match": "norm", "weight_decay": 0.0}, {"param_str_match": "embed", "lr": 0.125}]
    cfg = config(changed(optimizer={**optimizer, "param_groups": groups}))
    norm, embed = cfg.optimizer.groups
    assert (norm.params, norm.lr, norm.weight_decay) == (["norm"], None, 0.0)
    assert (embed.params, embed.lr, embed.weight_decay) == (["embed"], 0.125, 2.0)
    refused = items(changed(optimizer={**optimizer, "param_groups": [{"param_str_match": "norm", "betas": [0, 0]}]}))
    assert refused["optimizer.param_groups"].fit is Fit.UNSUPPORTED


def test_older_shapes():
    document = {
        "optimizers": {"decoupled_adamw": {"lr": 6e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0}},
        "schedulers": [{"cosine_decay_with_warmup": {"t_warmup": "0.01dur"}}],
        "max_duration": "20000ba",
        "train_batch_size": 256,
        "grad_accum": 8,
        "grad_clip_norm": 1.0,
        "precision": "amp",
        "seed": 17,
    }
    cfg = config(document)
    assert (cfg.optimizer.lr, cfg.scheduler.warmup_steps, cfg.scheduler.total_steps) == (6e-4, 200, 20000)
    assert (cfg.training.micro_batch_size, cfg.training.gradient_accumulation_steps) == (4, 8)
    assert (cfg.sharding.strategy, cfg.precision.compute, cfg.training.gradient_clipping) == ("no_shard", "fp16", 1.0)
    assert {"optimizers.decoupled_adamw.lr", "schedulers"} <= set(items(document))


def test_two_names_of_one_argument_are_both_accounted_for():
    sharded = {"load_fsdp_monolith_rank0_only": True, "load_monolith_rank0_only": False}
    found = items(changed(fsdp_config=sharded))
    assert {"fsdp_config.load_fsdp_monolith_rank0_only", "fsdp_config.load_monolith_rank0_only"} <= set(found)


def test_two_engines_at_once_contradict_each_other():
    found = items(changed(deepspeed_config={"zero_optimization": {"stage": 1}}))
    assert found["fsdp_config.sharding_strategy"].fit is Fit.UNSUPPORTED
    assert found["deepspeed_config.zero_optimization.stage"].becomes == "sharding.strategy"


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


def test_hybrid_groups():
    sharded = {
        "sharding_strategy": "HYBRID_SHARD",
        "data_parallel_shard_degree": 4,
        "data_parallel_replicate_degree": 2,
    }
    assert config(changed(fsdp_config=sharded)).sharding.group_size == 4
    replicas = {"sharding_strategy": "_HYBRID_SHARD_ZERO2", "data_parallel_replicate_degree": 4}
    cfg = config(changed(fsdp_config=replicas))
    assert (cfg.sharding.strategy, cfg.sharding.group_size, cfg.sharding.reshard_after_forward) == (
        "hybrid_shard",
        2,
        False,
    )
    assert config(changed(fsdp_config={"device_mesh": [8]})).sharding.strategy == "full_shard"


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


def test_without_sharding_it_is_ddp_and_nothing_clips():
    document = {key: value for key, value in TRAINING.items() if key not in ("fsdp_config", "algorithms")}
    reading = read(document, "composer", topology=EIGHT)
    assert reading.config.sharding.strategy == "no_shard"
    assert "training.gradient_clipping" in reading.decided
    assert reading.config.training.gradient_clipping is None


def test_it_is_recognised():
    assert recognise(open_source(TRAINING)) is FORMAT
    assert recognise(open_source({"name": "x", "image": "y", "command": "z", "parameters": TRAINING})) is FORMAT
