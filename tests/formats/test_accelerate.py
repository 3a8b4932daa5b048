"""Accelerate's files: what each key says in the config's words, and what becomes of what the file cannot say."""

from __future__ import annotations

import base64
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
from unishard.formats.source import open_source

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
    ("kind", "backend", "strategy"),
    [
        ("FSDP", "fsdp", "full_shard"),
        ("DEEPSPEED", "deepspeed", "shard_grad_op"),
        ("MULTI_GPU", "fsdp", "no_shard"),
        ("MULTI_CPU", "fsdp", "no_shard"),
        ("MULTI_NPU", "fsdp", "no_shard"),
        ("NO", "fsdp", "no_shard"),
        (False, "fsdp", "no_shard"),
    ],
)
def test_distributed_type_selects_the_engine_and_where_the_file_is_silent_the_launcher_the_strategy(
    kind, backend, strategy
):
    found = config({"distributed_type": kind})
    assert (found.backend, found.sharding.strategy) == (backend, strategy)


@pytest.mark.parametrize("kind", ["XLA", "MEGATRON_LM", "fsdp", "MULTI_GPUS", 3, None])
def test_what_is_no_data_parallelism_is_refused_with_what_instead(kind):
    item = items({"distributed_type": kind})["distributed_type"]
    assert item.fit is Fit.UNSUPPORTED
    assert "write " in item.note


def test_without_distributed_type_the_rest_is_read_as_the_engine_whose_block_is_there():
    found = items({"num_processes": 2, "fsdp_config": {"fsdp_offload_params": True}})
    assert found["distributed_type"].fit is Fit.UNSUPPORTED
    assert "write distributed_type: FSDP" in found["distributed_type"].note
    assert found["fsdp_config.fsdp_offload_params"].becomes == "offload.params, offload.optimizer"


@pytest.mark.parametrize(("name", "value"), [("AMAZON_SAGEMAKER", "SageMaker"), ("SLURM", "LOCAL_MACHINE")])
def test_other_compute_environments_are_refused(name, value):
    item = items({**FSDP, "compute_environment": name})["compute_environment"]
    assert item.fit is Fit.UNSUPPORTED
    assert value in item.note


@pytest.mark.parametrize("prefix", ["fsdp_", ""])
def test_the_prefix_of_fsdps_keys_may_be_left_out(prefix):
    keys = {
        "version": 2,
        "reshard_after_forward": "False",
        "offload_params": "yes",
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_layer_cls_to_wrap": "Block, Encoder",
        "activation_checkpointing": "on",
    }
    found = config({**FSDP, "fsdp_config": {f"{prefix}{name}": value for name, value in keys.items()}})
    assert found.sharding.strategy == "full_shard"
    assert not found.sharding.reshard_after_forward
    assert found.offload.params == found.offload.optimizer == "cpu"
    assert found.sharding.units == ["Block", "Encoder"]
    assert found.activation_checkpointing == "full"


def test_the_launchers_least_size_holds_where_the_file_is_silent():
    assert config(block(FSDP2, fsdp_auto_wrap_policy="SIZE_BASED_WRAP")).sharding.min_unit_params == 100_000_000
    assert config(block(FSDP2, fsdp_auto_wrap_policy="TRANSFORMER_BASED_WRAP")).sharding.min_unit_params == 0


def test_a_key_with_and_without_prefix_counts_as_accelerate_reads_it():
    document = block(FSDP2, fsdp_offload_params=True, offload_params=False)
    assert config(document).offload.params == "none"
    found = items(document)
    assert found["fsdp_config.fsdp_offload_params"].fit is Fit.IGNORED
    assert "offload_params, which takes precedence" in found["fsdp_config.fsdp_offload_params"].note


def test_the_launcher_assumes_version_1_and_the_whole_model_as_one_unit():
    found = items(FSDP)
    assert (found["fsdp_config.fsdp_version"].value, found["fsdp_config.fsdp_version"].assumed) == (1, True)
    assert found["fsdp_config.fsdp_auto_wrap_policy"].value == "NO_WRAP"


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


def test_an_unknown_key_at_the_top_is_refused_as_accelerate_does():
    assert items({**FSDP, "num_proceses": 8})["num_proceses"].fit is Fit.UNSUPPORTED
    assert "num_processes" in items({**FSDP, "num_proceses": 8})["num_proceses"].note
    assert "accelerate-kt" in items({**FSDP, "kt_config": {"enabled": True}})["kt_config"].note


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


def test_null_is_what_accelerate_takes_for_nothing_where_it_does():
    found = items(
        block(FSDP, fsdp_transformer_layer_cls_to_wrap=None, fsdp_backward_prefetch=None, fsdp_offload_params=None)
    )
    assert found["fsdp_config.fsdp_transformer_layer_cls_to_wrap"].fit is Fit.IGNORED
    assert found["fsdp_config.fsdp_offload_params"].fit is not Fit.EXACT


def test_a_list_of_classes_is_read_as_it_is_meant_and_the_defect_named():
    document = block(
        FSDP2, fsdp_auto_wrap_policy="TRANSFORMER_BASED_WRAP", fsdp_transformer_layer_cls_to_wrap=["A", "B"]
    )
    assert config(document).sharding.units == ["A", "B"]
    assert "takes no list" in items(document)["fsdp_config.fsdp_transformer_layer_cls_to_wrap"].note


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("word", ["bf16", "fp16"])
def test_fsdp_computes_and_reduces_in_the_format_and_keeps_fp32_masters(version, word):
    found = config({**block(FSDP, fsdp_version=version), "mixed_precision": word}).precision
    assert (found.compute, found.reduce, found.master) == (word, word, "fp32")
    assert found.buffers == ("keep" if version == 2 else word)


@pytest.mark.parametrize(
    ("document", "word"),
    [(FSDP2, "no"), (DEEPSPEED, "no"), (FSDP2, False), (FSDP2, None), ({"distributed_type": "NO"}, "NO")],
)
def test_no_mixed_precision_is_fp32(document, word):
    assert items({**document, "mixed_precision": word})["mixed_precision"].fit is Fit.EXACT
    assert config({**document, "mixed_precision": word}).precision.compute == "fp32"


def test_autocast_of_replicas_is_approximate():
    document = {"distributed_type": "MULTI_GPU", "mixed_precision": "fp16", "num_processes": 2}
    item = items(document)["mixed_precision"]
    assert item.fit is Fit.APPROXIMATE
    assert "autocast" in item.note
    assert (config(document).precision.compute, config(document).precision.reduce) == ("fp16", "fp32")


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


@pytest.mark.parametrize("value", ["bf32", 16, ["bf16"], True])
def test_no_other_format_is_read(value):
    assert items({**FSDP2, "mixed_precision": value})["mixed_precision"].fit is Fit.UNSUPPORTED


def test_a_format_that_is_none_is_refused_once_beside_deepspeeds_own_file_too():
    document = {**DEEPSPEED, "mixed_precision": [], "deepspeed_config": {"deepspeed_config_file": "gone.json"}}
    assert [entry.key for entry in formats.read(document).entries].count("mixed_precision") == 1


def test_the_old_name_of_mixed_precision():
    assert config({**FSDP2, "fp16": True}).precision.compute == "fp16"
    assert config({**FSDP2, "fp16": False}).precision.compute == "fp32"
    found = items({**FSDP2, "fp16": True, "mixed_precision": "bf16"})
    assert found["fp16"].fit is Fit.IGNORED
    assert found["mixed_precision"].fit is not Fit.UNSUPPORTED


@pytest.mark.parametrize("key", ["dynamo_backend", "dynamo_config"])
def test_compilation_by_the_new_and_the_old_key(key):
    document = {
        **FSDP2,
        key: "INDUCTOR" if key == "dynamo_backend" else {"dynamo_backend": "INDUCTOR", "use_dynamic": True},
    }
    assert (config(document).compile.mode, config(document).compile.backend) == ("full", "inductor")


def test_regional_compilation_is_per_block_and_no_backend_is_none():
    settings = {"backend": "EAGER", "dynamo_use_regional_compilation": "true"}
    assert config({**FSDP2, "dynamo_config": settings}).compile.mode == "per_block"
    assert (
        config({**FSDP2, "dynamo_config": {"backend": "NO", "use_regional_compilation": True}}).compile.mode == "none"
    )
    assert items({**FSDP2, "dynamo_backend": "TURBO"})["dynamo_backend"].fit is Fit.UNSUPPORTED


def test_the_last_of_two_names_for_one_key_counts():
    document = {**FSDP2, "dynamo_config": {"backend": "EAGER", "dynamo_backend": "INDUCTOR"}}
    assert config(document).compile.backend == "inductor"
    assert "dynamo_backend, which takes precedence" in items(document)["dynamo_config.backend"].note


def test_the_old_key_of_compilation_takes_the_place_of_the_new_ones():
    document = {**FSDP2, "dynamo_backend": "NO", "dynamo_config": {"dynamo_backend": "INDUCTOR"}}
    assert config(document).compile.mode == "none"
    assert items(document)["dynamo_config.dynamo_backend"].fit is Fit.IGNORED


def test_accelerates_deepspeed_launcher_passes_no_compilation_on():
    item = items({**DEEPSPEED, "dynamo_config": {"dynamo_backend": "INDUCTOR"}})["dynamo_config.dynamo_backend"]
    assert item.fit is Fit.IGNORED
    assert "does not pass this on" in item.note


def groups(replicate, shard, **others):
    sizes = {"dp_replicate_size": replicate, "dp_shard_size": shard, **others}
    return {**FSDP2, "parallelism_config": {f"parallelism_config_{name}": size for name, size in sizes.items()}}


def test_a_compiler_that_deepspeeds_launcher_never_hears_of_is_not_judged():
    assert items({**DEEPSPEED, "dynamo_backend": "yes"})["dynamo_backend"].fit is Fit.IGNORED


def test_keys_of_older_versions_that_concern_nothing_here():
    older = {
        "ipex_config": {"ipex": False, "use_xpu": False},
        "tpu_cluster": False,
        "num_machines": None,
        "tp_config": {"tp_size": 1},
    }
    found = items({**FSDP2, **older})
    assert {found[key].fit for key in ("ipex_config", "tpu_cluster", "num_machines", "tp_config.tp_size")} == {
        Fit.IGNORED
    }
    assert items({**FSDP2, "tp_config": {"tp_size": 2}})["tp_config.tp_size"].fit is Fit.UNSUPPORTED


@pytest.mark.parametrize(
    ("policy", "fit"), [("SIZE_BASED_WRAP", Fit.IGNORED), ("TRANSFORMER_BASED_WRAP", Fit.UNSUPPORTED)]
)
def test_a_class_without_a_name_matters_where_classes_are_looked_for(policy, fit):
    document = block(FSDP2, fsdp_auto_wrap_policy=policy, fsdp_transformer_layer_cls_to_wrap="")
    assert items(document)["fsdp_config.fsdp_transformer_layer_cls_to_wrap"].fit is fit


def test_groups_count_the_ranks_of_a_model_that_is_split():
    found = items(groups(2, 2, tp_size=2))
    assert found["parallelism_config.parallelism_config_tp_size"].fit is Fit.UNSUPPORTED
    assert "ranks of the" not in found["parallelism_config.parallelism_config_dp_shard_size"].note


def test_replicas_of_shards_are_hybrid_and_both_sizes_say_it():
    found = config(groups(2, 4))
    assert (found.sharding.strategy, found.sharding.group_size) == ("hybrid_shard", 4)
    for name in ("replicate", "shard"):
        assert (
            "sharding.group_size"
            in items(groups(2, 4))[f"parallelism_config.parallelism_config_dp_{name}_size"].becomes
        )
    assert config(groups(1, 8)).sharding.strategy == "full_shard"


@pytest.mark.parametrize(
    ("document", "why"),
    [
        (groups(2, 8), "num_processes"),
        (groups(8, 1), "nothing to shard"),
        (block(groups(2, 4), fsdp_version=1), "only in FSDP2"),
        (groups("two", 4), "whole number"),
    ],
)
def test_groups_that_accelerate_refuses(document, why):
    assert why in items(document)["parallelism_config.parallelism_config_dp_replicate_size"].note
    assert items(document)["parallelism_config.parallelism_config_dp_replicate_size"].fit is Fit.UNSUPPORTED


@pytest.mark.parametrize("axis", ["tp", "cp", "sp"])
def test_other_parallelism_is_refused_unless_it_is_off(axis):
    key = f"parallelism_config.parallelism_config_{axis}_size"
    assert items(groups(1, 8, **{f"{axis}_size": 1}))[key].fit is Fit.IGNORED
    assert items(groups(1, 4, **{f"{axis}_size": 2}))[key].fit is Fit.UNSUPPORTED


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_stages_by_their_names_here(stage):
    names = ("no_shard", "shard_optimizer", "shard_grad_op", "full_shard")
    assert config(block(DEEPSPEED, zero_stage=stage)).sharding.strategy == names[stage]
    assert config(block(DEEPSPEED, zero_stage=str(stage))).sharding.strategy == names[stage]


@pytest.mark.parametrize(("clipping", "norm"), [("auto", 1.0), (None, 1.0), (0, 1.0), ("0.5", 0.5), (1e30, None)])
def test_clipping_is_what_comes_out_of_accelerate(clipping, norm):
    assert config(block(DEEPSPEED, gradient_clipping=clipping)).training.gradient_clipping == norm


def test_no_clipping_that_becomes_clipping_is_named():
    item = items(block(DEEPSPEED, gradient_clipping=0.0))["deepspeed_config.gradient_clipping"]
    assert item.fit is Fit.APPROXIMATE
    assert "clips to 1.0" in item.note
    assert items(DEEPSPEED)["deepspeed_config.gradient_clipping"].assumed


def test_accumulation_that_the_script_decides_stays_with_it():
    document = block(DEEPSPEED, gradient_accumulation_steps="auto")
    item = items(document)["deepspeed_config.gradient_accumulation_steps"]
    assert item.fit is Fit.NEEDS_INPUT
    assert "gradient_accumulation_steps of the Accelerator" in item.note
    assert (
        config(document, overrides=["training.gradient_accumulation_steps=4"]).training.gradient_accumulation_steps == 4
    )
    assert (
        formats.translate(document, "accelerate").document["deepspeed_config"]["gradient_accumulation_steps"] == "auto"
    )


def test_offload_and_the_path_that_accelerate_never_passes_on():
    document = block(
        DEEPSPEED, offload_optimizer_device="nvme", offload_optimizer_nvme_path="/local", offload_param_device="CPU"
    )
    found = config(document).offload
    assert (found.optimizer, found.params, found.nvme_path) == ("nvme", "cpu", "/local")
    assert "DeepSpeedCPUAdam" in items(document)["deepspeed_config.offload_optimizer_device"].note
    assert "never passes it on" in items(document)["deepspeed_config.offload_optimizer_nvme_path"].note
    idle = items(block(DEEPSPEED, offload_param_nvme_path="/local"))["deepspeed_config.offload_param_nvme_path"]
    assert idle.fit is Fit.IGNORED


def test_layers_with_experts_are_conditional_modules():
    document = block(DEEPSPEED, deepspeed_moe_layer_cls_names="MoeBlock,Router")
    assert config(document).sharding.conditional_modules == ["MoeBlock", "Router"]
    assert config(block(document, zero_stage=2)).sharding.conditional_modules == []


def test_a_setting_of_deepspeed_alone_is_kept_where_deepspeed_runs():
    key = "deepspeed_config.zero3_save_16bit_model"
    document = block(DEEPSPEED, zero3_save_16bit_model=True)
    assert items(document)[key].fit is Fit.EXACT
    assert items(document, "accelerate")[key].becomes == key
    assert formats.translate(document, "accelerate").document["deepspeed_config"]["zero3_save_16bit_model"] is True


def test_a_block_of_another_engine_is_not_looked_at():
    found = items({**DEEPSPEED, "fsdp_config": {"fsdp_offload_params": True}})
    assert found["fsdp_config.fsdp_offload_params"].fit is Fit.IGNORED
    assert "only used with distributed_type: FSDP" in found["fsdp_config.fsdp_offload_params"].note
    assert items({**FSDP, "deepspeed_config": {}})["deepspeed_config"].fit is Fit.IGNORED
    wrong = items({**DEEPSPEED, "deepspeed_config": "./ds.json"})["deepspeed_config"]
    assert (wrong.fit, "deepspeed_config_file" in wrong.note) == (Fit.UNSUPPORTED, True)


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


@pytest.mark.parametrize("name", [None, "none"])
def test_no_file_of_deepspeeds_own(name):
    document = block(DEEPSPEED, deepspeed_config_file=name, gradient_clipping=0.5)
    assert config(document).training.gradient_clipping == 0.5
    assert items(document)["deepspeed_config.deepspeed_config_file"].note == "names no file"


def test_deepspeeds_own_file_is_looked_for_in_the_working_directory_too(tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    (tmp_path / "ds.json").write_text(json.dumps(JSON))
    path = with_file(tmp_path / "configs", name="./other/ds.json")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "ds.json").write_text(json.dumps({**JSON, "zero_optimization": {"stage": 1}}))
    monkeypatch.chdir(tmp_path)
    assert config(path).sharding.strategy == "shard_optimizer"


@pytest.mark.parametrize("encoded", [json.dumps(JSON), base64.urlsafe_b64encode(json.dumps(JSON).encode()).decode()])
def test_deepspeeds_own_file_may_stand_in_the_text_itself(encoded):
    document = {**DEEPSPEED, "deepspeed_config": {"deepspeed_config_file": encoded}}
    assert config(document).precision.compute == "bf16"


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


@pytest.mark.parametrize(
    ("document", "ranks"),
    [
        ({**FSDP, "num_machines": 2}, Topology(8, 4)),
        (FSDP, Topology(8, 8)),
        ({"distributed_type": "NO"}, Topology(1, 1)),
        ({**FSDP, "num_processes": -1}, None),
        ({**FSDP, "num_machines": 3}, None),
        ({**FSDP, "num_processes": "many"}, None),
    ],
)
def test_the_ranks_that_a_file_speaks_of(document, ranks):
    assert formats.read(document, "accelerate").topology == ranks


def test_a_number_of_processes_that_cannot_be_is_refused():
    assert items({**FSDP, "num_machines": 3})["num_processes"].fit is Fit.UNSUPPORTED
    assert items({**FSDP, "num_processes": -1})["num_processes"].fit is Fit.IGNORED


def test_sharding_on_the_cpu_names_what_accelerate_does():
    item = items({**FSDP, "use_cpu": True})["use_cpu"]
    assert item.fit is Fit.APPROXIMATE
    assert "does not shard" in item.note
    assert items({**FSDP, "use_cpu": False})["use_cpu"].fit is Fit.IGNORED


def test_a_file_in_its_own_format_again_keeps_what_concerns_the_launcher_alone():
    launcher = {"main_process_port": 0, "same_network": True, "rdzv_backend": "c10d", "tpu_env": [], "debug": False}
    outcome = formats.translate({**FSDP2, **launcher}, "accelerate")
    assert {key: outcome.document[key] for key in launcher} == launcher
    moved = formats.translate({**FSDP2, **launcher}, "accelerate", topology=SIXTEEN)
    assert (moved.document["num_processes"], moved.document["num_machines"]) == (16, 2)
    assert {key: moved.document[key] for key in launcher} == launcher


def test_nothing_that_the_script_decides_is_made_up():
    document = {**FSDP2, "mixed_precision": "bf16"}
    outcome = formats.translate(document, "accelerate")
    assert outcome.document == document
    assert {item.fit for item in outcome.items} == {Fit.EXACT}
    assert "gradient_accumulation_steps" not in formats.translate(DEEPSPEED, "accelerate").document["deepspeed_config"]


def test_words_that_yaml_1_1_takes_for_booleans_are_quoted():
    assert "mixed_precision: 'no'" in formats.translate({**FSDP2, "mixed_precision": "no"}, "accelerate").text


def test_ranks_that_nobody_has_said_are_left_to_the_command_line():
    assert "num_processes" not in formats.translate({"backend": "fsdp"}, "accelerate", from_="unishard").document
    assert (
        formats.translate({"backend": "fsdp"}, "accelerate", from_="unishard", topology=SIXTEEN).document[
            "num_processes"
        ]
        == 16
    )


def test_groups_need_the_number_of_ranks():
    document = {"sharding": "hybrid_shard"}
    refused = {item.key: item for item in formats.translate(document, "accelerate", from_="unishard").items}[
        "sharding.strategy"
    ]
    assert refused.fit is Fit.UNSUPPORTED
    assert "--world-size" in refused.note
    written = formats.translate(document, "accelerate", from_="unishard", topology=SIXTEEN)
    assert not written.of(Fit.UNSUPPORTED)
    assert set(written.document["parallelism_config"].values()) == {2, 8}


def test_an_engine_that_accelerate_does_not_have_is_an_error():
    class Reading:
        config = Config.model_validate({"backend": "horovod"})

    with pytest.raises(ConfigError, match="no backend horovod"):
        catalog.get("accelerate").write(Reading(), Topology())


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
def test_the_schemas_defaults_are_not_refused(backend):
    outcome = formats.translate({"backend": backend}, "accelerate", from_="unishard")
    assert not outcome.of(Fit.UNSUPPORTED)


def test_every_word_of_a_row_says_something_where_something_is_lost():
    for backend in ("fsdp", "deepspeed"):
        reading = formats.read({"backend": backend}, "unishard")
        words = catalog.get("accelerate").write(reading, SIXTEEN).fields
        assert set(words) == {path for path, _ in leaves(Config)}
        assert [path for path, word in words.items() if word.fit is not Fit.EXACT and not word.note] == []


words = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**40) | st.floats(allow_nan=False) | words,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2),
    max_leaves=4,
)
TOP = tuple(catalog.get("accelerate").keys)
BLOCKS = {
    "fsdp_config": st.sampled_from(tuple(NAMES)) | words,
    "deepspeed_config": st.sampled_from(
        ("zero_stage", "gradient_clipping", "offload_param_device", "deepspeed_config_file")
    )
    | words,
    "dynamo_config": st.sampled_from(("backend", "dynamo_backend", "use_dynamic", "dynamo_use_regional_compilation"))
    | words,
    "fp8_config": st.sampled_from(("margin", "fp8_margin", "fp8_format", "format")) | words,
    "parallelism_config": st.sampled_from(("parallelism_config_dp_shard_size", "parallelism_config_dp_replicate_size"))
    | words,
}


@st.composite
def documents(draw):
    """Whatever somebody could write into such a file."""
    document = draw(
        st.dictionaries(st.sampled_from([key for key in TOP if "." not in key]) | words, values, max_size=4)
    )
    document |= draw(
        st.fixed_dictionaries({}, optional={"distributed_type": st.sampled_from(("FSDP", "DEEPSPEED", "MULTI_GPU"))})
    )
    for name, keys in BLOCKS.items():
        document |= draw(st.fixed_dictionaries({}, optional={name: st.dictionaries(keys, values, max_size=4)}))
    return document


def ends(value, path=()):
    """The paths at which a document says something."""
    if isinstance(value, dict) and value:
        return [end for key, inner in value.items() for end in ends(inner, (*path, str(key)))]
    return [path]


@settings(deadline=None, derandomize=True)
@given(documents(), st.sampled_from(("unishard", "accelerate", "deepspeed")))
def test_each_key_of_any_document_ends_in_one_place_of_the_report(document, to):
    outcome = formats.translate(document, to, from_="accelerate")
    said = [entry.path for entry in outcome.reading.entries if not entry.assumed]
    for end in ends(document) if document else []:
        holders = [path for path in said if path == end[: len(path)]]
        assert len(holders) == 1, end


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


def test_a_file_with_the_usual_keys_is_recognised(tmp_path):
    path = tmp_path / "default_config.yaml"
    path.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 2\n"
    )
    assert catalog.recognise(open_source(path)).name == "accelerate"
