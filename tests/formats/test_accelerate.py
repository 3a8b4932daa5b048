"""Accelerate's files: what each key says in the config's words, and what becomes of what the file cannot say."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from unishard import formats
from unishard.config import Config, leaves, value_at
from unishard.config.topology import Topology
from unishard.contract.rules import Fit
from unishard.errors import ConfigError
from unishard.formats import catalog
from unishard.formats.accelerate.fsdp import NAMES

FSDP = {"distributed_type": "FSDP", "num_processes": 8}
FSDP2 = {**FSDP, "fsdp_config": {"fsdp_version": 2}}
DEEPSPEED = {"distributed_type": "DEEPSPEED", "num_processes": 8, "deepspeed_config": {"zero_stage": 3}}
SIXTEEN = Topology(world_size=16, local_world_size=8)


def block(document, **keys):
    """A document with these keys in the block of its engine."""
    name = f"{document['distributed_type'].lower()}_config"
    return {**document, name: {**document.get(name, {}), **keys}}


def items(document, to="unishard", **options):
    outcome = formats.translate(document, to, from_="accelerate", **options)
    return {item.key: item for item in outcome.items}


def config(document, **options):
    return formats.read(document, "accelerate", **options).config


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("fsdp_backward_prefetch_policy", "fsdp_backward_prefetch"),
        ("fsdp_transformer_cls_names_to_wrap", "fsdp_transformer_layer_cls_to_wrap"),
        ("offload_param", "fsdp_offload_params"),
    ],
)
def test_a_key_that_accelerate_overlooks_is_dropped_with_the_one_that_was_meant(key, meant):
    item = items(block(FSDP, **{key: "X"}))[f"fsdp_config.{key}"]
    assert item.fit is Fit.IGNORED
    assert f"did you mean '{meant}'" in item.note.replace(f"'{key}'", "")


@pytest.mark.parametrize(
    "key", [name for name in NAMES if name not in ("fsdp_ignored_modules", "fsdp_transformer_layer_cls_to_wrap")]
)
def test_a_value_that_a_key_cannot_have_is_refused_and_the_rest_stands(key):
    document = block(
        FSDP, **{"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", key: "quite so"}
    )
    found = items({**document, "mixed_precision": "bf16"})
    assert found[f"fsdp_config.{key}"].fit is Fit.UNSUPPORTED
    assert "must be" in found[f"fsdp_config.{key}"].note
    assert found["mixed_precision"].fit is not Fit.UNSUPPORTED


@pytest.mark.parametrize("document", [FSDP2, DEEPSPEED, {"distributed_type": "MULTI_GPU", "num_processes": 8}])
def test_fp8_becomes_bf16_and_says_so(document):
    found = items(
        {
            **document,
            "mixed_precision": "fp8",
            "fp8_config": {"backend": "TE", "amax_history_length": 16, "fp8_margin": 0},
        }
    )
    assert found["mixed_precision"].fit is Fit.APPROXIMATE
    assert "instead of fp8" in found["mixed_precision"].note or "run in bf16" in found["mixed_precision"].note
    assert "reads amax_history_len instead" in found["fp8_config.amax_history_length"].note
    assert found["fp8_config.fp8_margin"].fit is Fit.IGNORED
    assert config({**document, "mixed_precision": "fp8"}).precision.compute == "bf16"


def test_a_format_that_is_none_is_refused_once_beside_deepspeeds_own_file_too():
    document = {**DEEPSPEED, "mixed_precision": [], "deepspeed_config": {"deepspeed_config_file": "gone.json"}}
    assert [entry.key for entry in formats.read(document).entries].count("mixed_precision") == 1


def groups(replicate, shard, **others):
    sizes = {"dp_replicate_size": replicate, "dp_shard_size": shard, **others}
    return {**FSDP2, "parallelism_config": {f"parallelism_config_{name}": size for name, size in sizes.items()}}


def test_groups_count_the_ranks_of_a_model_that_is_split():
    found = items(groups(2, 2, tp_size=2))
    assert found["parallelism_config.parallelism_config_tp_size"].fit is Fit.EQUIVALENT
    assert config(groups(2, 2, tp_size=2)).sharding.group_size == 4
    assert "ranks of the" not in found["parallelism_config.parallelism_config_dp_shard_size"].note


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_stages_by_their_names_here(stage):
    names = ("no_shard", "shard_optimizer", "shard_grad_op", "full_shard")
    assert config(block(DEEPSPEED, zero_stage=stage)).sharding.strategy == names[stage]
    assert config(block(DEEPSPEED, zero_stage=str(stage))).sharding.strategy == names[stage]


JSON = {
    "zero_optimization": {"stage": 3},
    "bf16": {"enabled": True},
    "gradient_clipping": "auto",
    "train_micro_batch_size_per_gpu": 2,
}


def with_file(folder, name="ds.json", content=JSON, **keys):
    """A document beside DeepSpeed's own file."""
    (folder / "ds.json").write_text(json.dumps(content))
    document = {
        "distributed_type": "DEEPSPEED",
        "num_processes": 4,
        "deepspeed_config": {"deepspeed_config_file": name, **keys},
    }
    path = folder / "accelerate.yaml"
    with path.open("w") as file:
        YAML().dump(document, file)
    return path


def test_deepspeeds_own_file_is_read_beside_the_document(tmp_path):
    path = with_file(tmp_path, zero3_init_flag=True)
    found = config(path)
    assert (found.sharding.strategy, found.precision.compute, found.training.micro_batch_size) == (
        "full_shard",
        "bf16",
        2,
    )
    assert found.training.gradient_clipping == 1.0
    clipping = items(path)["deepspeed_config.deepspeed_config_file.gradient_clipping"]
    assert (clipping.value, clipping.fit) == ("auto", Fit.EXACT)
    assert items(path)["deepspeed_config.deepspeed_config_file"].note == "its keys follow"


def test_deepspeeds_own_file_is_looked_for_in_the_working_directory_too(tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    (tmp_path / "ds.json").write_text(json.dumps(JSON))
    path = with_file(tmp_path / "configs", name="./other/ds.json")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "ds.json").write_text(json.dumps({**JSON, "zero_optimization": {"stage": 1}}))
    monkeypatch.chdir(tmp_path)
    assert config(path).sharding.strategy == "shard_optimizer"


def test_a_file_that_is_not_there_leaves_one_decision(tmp_path):
    path = with_file(tmp_path, name="gone.json")
    item = items(path)["deepspeed_config.deepspeed_config_file"]
    assert item.fit is Fit.NEEDS_INPUT
    assert "gone.json" in item.note
    assert "${sharding.strategy}" in formats.translate(path, "unishard").text
    assert config(path, overrides=["sharding.strategy=zero3"]).sharding.strategy == "full_shard"


@pytest.mark.parametrize("content", ["[1, 2]", "{", ""])
def test_a_file_that_is_none_of_deepspeeds_is_one_refusal(tmp_path, content):
    path = with_file(tmp_path)
    (tmp_path / "ds.json").write_text(content)
    assert items(path)["deepspeed_config.deepspeed_config_file"].fit is Fit.UNSUPPORTED


def test_keys_that_accelerate_refuses_beside_a_file(tmp_path):
    found = items(with_file(tmp_path, zero_stage=2, gradient_clipping=1.0, zero_stag=1, zero3_init_flag=False))
    for key in ("zero_stage", "gradient_clipping"):
        assert found[f"deepspeed_config.{key}"].fit is Fit.UNSUPPORTED
        assert "beside deepspeed_config_file" in found[f"deepspeed_config.{key}"].note
    assert found["deepspeed_config.zero_stag"].fit is Fit.IGNORED
    assert found["deepspeed_config.zero3_init_flag"].fit is Fit.IGNORED
    document = {**DEEPSPEED, "mixed_precision": "bf16", "deepspeed_config": {"deepspeed_config_file": json.dumps(JSON)}}
    assert items(document)["mixed_precision"].fit is Fit.UNSUPPORTED
    without = {**DEEPSPEED, "deepspeed_config": {"deepspeed_config_file": json.dumps({"bf16": {"enabled": True}})}}
    assert "without zero_optimization" in items(without)["deepspeed_config.deepspeed_config_file"].note


def test_an_engine_that_accelerate_does_not_have_is_an_error():
    class Reading:
        config = Config.model_validate({"backend": "horovod"})

    with pytest.raises(ConfigError, match="no backend horovod"):
        catalog.get("accelerate").write(Reading(), Topology())


def test_every_word_of_a_row_says_something_where_something_is_lost():
    for backend in ("fsdp", "deepspeed"):
        reading = formats.read({"backend": backend}, "unishard")
        words = catalog.get("accelerate").write(reading, SIXTEEN).fields
        assert set(words) == {path for path, _ in leaves(Config)}
        assert [path for path, word in words.items() if word.fit is not Fit.EXACT and not word.note] == []


@st.composite
def expressible(draw):
    """Configs that Accelerate's file can say, field by field."""
    backend = draw(st.sampled_from(("fsdp", "deepspeed")))
    compute = draw(st.sampled_from(("fp32", "bf16", "fp16")))
    fsdp = backend == "fsdp"
    strategies = (
        ("full_shard", "hybrid_shard") if fsdp else ("no_shard", "shard_optimizer", "shard_grad_op", "full_shard")
    )
    strategy = draw(st.sampled_from(strategies))
    document = {
        "backend": backend,
        "sharding": {"strategy": strategy},
        "precision": {"compute": compute, "reduce": compute},
    }
    if fsdp:
        document["sharding"] |= draw(
            st.fixed_dictionaries(
                {
                    "units": st.just("auto")
                    | st.lists(st.sampled_from(("Block", "T5Block")), min_size=1, max_size=2, unique=True)
                },
                optional={"reshard_after_forward": st.booleans()},
            )
        )
        document["sharding"] |= {"group_size": 8} if strategy == "hybrid_shard" else {}
        document["offload"] = draw(st.sampled_from(("none", "cpu")))
        document["activation_checkpointing"] = draw(st.sampled_from(("none", "full")))
        document["compile"] = draw(st.sampled_from(("none", "full", "per_block")))
        return document
    document["precision"] |= {
        "accumulate": compute,
        **({"loss_scale_growth_interval": 1000} if compute == "fp16" else {}),
    }
    window = st.integers(1, 64)
    document["training"] = {
        "gradient_accumulation_steps": draw(window),
        "gradient_clipping": draw(st.none() | st.floats(0.1, 100)),
    }
    document["offload"] = {
        "optimizer": draw(st.sampled_from(("none", "cpu"))) if strategy != "no_shard" else "none",
        "params": draw(st.sampled_from(("none", "cpu"))) if strategy == "full_shard" else "none",
    }
    return document


@settings(deadline=None, derandomize=True)
@given(expressible())
def test_there_and_back_is_what_it_was(document):
    before = formats.read(document, "unishard").config
    there = formats.translate(document, "accelerate", from_="unishard", topology=SIXTEEN)
    assert not there.of(Fit.UNSUPPORTED)
    back = formats.translate(there.document, "unishard", from_="accelerate").reading
    decided = {path for path in back.decided if path in {name for name, _ in leaves(Config)} and path != "native"}
    assert {"sharding.strategy", "precision.compute", "backend"} <= decided
    assert (back.config.launch.nodes, back.config.launch.processes_per_node) == (2, 8)  # the ranks that were asked for
    decided -= {"launch.nodes", "launch.processes_per_node"}
    decided -= {
        "precision.accumulate"
    }  # the one default of DeepSpeed that is not taken over, since FSDP2 adds up in fp32 alone
    assert {path: value_at(back.config, path) for path in decided} == {path: value_at(before, path) for path in decided}
    again = formats.translate(there.document, "accelerate", from_="accelerate")
    assert again.document == there.document
