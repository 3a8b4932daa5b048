"""Accelerate takes what we write: its own loader, its launcher's environment, and the plugins that it builds in the
processes.

And its defects that the notes name are there, so that a note goes when its defect does.
"""

from __future__ import annotations

import json
import os
from contextlib import contextmanager

import pytest
import torch
from accelerate import ParallelismConfig
from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import launch
from accelerate.utils.dataclasses import DeepSpeedPlugin, FullyShardedDataParallelPlugin, TorchDynamoPlugin
from accelerate.utils.deepspeed import map_pytorch_optim_to_deepspeed
from torch.distributed.fsdp import CPUOffloadPolicy, ShardingStrategy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from unishard import formats
from unishard.config.topology import Topology
from unishard.formats import catalog
from unishard.formats.verify import verify

EIGHT = Topology(world_size=8, local_world_size=8)
SIXTEEN = Topology(world_size=16, local_world_size=8)


def environment(path):
    """What `accelerate launch --config_file path train.py` gives to its processes."""
    arguments = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    arguments, defaults, formatted = _validate_launch_command(arguments)
    if not arguments.use_deepspeed:
        return launch.prepare_multi_gpu_env(arguments)
    fields = [*defaults.deepspeed_config, *(["mixed_precision"] if formatted else [])]
    arguments.deepspeed_fields_from_accelerate_config = ",".join(fields)
    return launch.prepare_deepspeed_cmd_env(arguments)[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("accelerate")


@contextmanager
def launched(folder, text):
    """Inside, the environment is that of a process that Accelerate started with this file."""
    path = folder / "accelerate.yaml"
    path.write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "is_port_in_use", lambda port=None: False)
        for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_"))]:
            patch.delenv(name)
        found = environment(path)
        for name, value in found.items():
            patch.setenv(name, value)
        yield found


def written(document, topology=EIGHT):
    return formats.translate(document, "accelerate", from_="unishard", topology=topology)


def file(document):
    """A document as a file holds it: JSON is YAML as well."""
    return json.dumps(document)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("units", ["auto", ["Block", "T5Block"]])
def test_the_plugin_of_fsdp_holds_what_was_meant(folder, reshard, units):
    sharding = {"strategy": "full_shard", "reshard_after_forward": reshard, "units": units}
    document = {"sharding": sharding, "offload": "cpu", "precision": "bf16", "activation_checkpointing": "full"}
    with launched(folder, written(document).text) as found:
        plugin = FullyShardedDataParallelPlugin()
        plugin.set_mixed_precision(found["ACCELERATE_MIXED_PRECISION"])
    assert (plugin.fsdp_version, plugin.reshard_after_forward) == (2, reshard)
    assert isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    assert plugin.auto_wrap_policy is transformer_auto_wrap_policy
    assert plugin.transformer_cls_names_to_wrap == (None if units == "auto" else units)
    assert plugin.activation_checkpointing
    assert plugin.mixed_precision_policy.param_dtype is plugin.mixed_precision_policy.reduce_dtype is torch.bfloat16


def test_units_of_a_least_size(folder):
    with launched(folder, written({"sharding": {"min_unit_params": 5000}}).text):
        plugin = FullyShardedDataParallelPlugin()
    assert (plugin.auto_wrap_policy, plugin.min_num_params) == (size_based_auto_wrap_policy, 5000)


def test_groups_are_a_mesh(folder):
    with launched(folder, written({"sharding": "hybrid_shard"}, SIXTEEN).text) as found:
        sizes = ParallelismConfig()
        assert found["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"
    assert (sizes.dp_replicate_size, sizes.dp_shard_size, sizes.total_size) == (2, 8, 16)


@pytest.mark.parametrize(("mode", "regional"), [("full", False), ("per_block", True)])
def test_compilation(folder, mode, regional):
    with launched(folder, written({"compile": {"mode": mode, "backend": "aot_eager"}}).text):
        plugin = TorchDynamoPlugin()
    assert (plugin.backend.value, plugin.use_regional_compilation) == ("AOT_EAGER", regional)


def test_replicas_start_without_a_plugin(folder):
    with launched(folder, written({"sharding": "no_shard", "precision": "fp16"}).text) as found:
        assert "ACCELERATE_USE_FSDP" not in found
        assert found["ACCELERATE_MIXED_PRECISION"] == "fp16"


@pytest.mark.parametrize(
    ("strategy", "stage"), [("no_shard", 0), ("shard_optimizer", 1), ("shard_grad_op", 2), ("full_shard", 3)]
)
@pytest.mark.parametrize("clipping", [0.5, None])
def test_the_plugin_of_deepspeed_holds_what_was_meant(folder, strategy, stage, clipping):
    training = {"gradient_accumulation_steps": 4, "gradient_clipping": clipping}
    place = "none" if strategy == "no_shard" else "cpu"
    document = {
        "backend": "deepspeed",
        "sharding": strategy,
        "training": training,
        "precision": "bf16",
        "offload": {"optimizer": place},
    }
    with launched(folder, written(document).text) as found:
        plugin = DeepSpeedPlugin()
        plugin.set_mixed_precision(found["ACCELERATE_MIXED_PRECISION"])
    said = plugin.deepspeed_config
    assert (said["zero_optimization"]["stage"], said["gradient_accumulation_steps"]) == (stage, 4)
    assert said["zero_optimization"]["offload_optimizer"]["device"] == place
    assert (said["bf16"], said["fp16"]) == ({"enabled": True}, {"enabled": False})
    assert said["gradient_clipping"] == clipping if clipping else said["gradient_clipping"] > 1e20


@pytest.fixture(scope="module")
def deepspeed_config():
    from unishard_deepspeed.start import quiet

    with pytest.MonkeyPatch.context() as environment, quiet():
        environment.setenv("DS_ACCELERATOR", "cpu")
        import deepspeed

        return deepspeed.DeepSpeedConfig


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("clipping", [0.5, None])
def test_deepspeed_takes_what_accelerate_makes_of_it(folder, deepspeed_config, precision, clipping):
    training = {"gradient_accumulation_steps": 4, "gradient_clipping": clipping}
    document = {"backend": "deepspeed", "precision": precision, "offload": "cpu", "training": training}
    with launched(folder, written(document).text) as found:
        plugin = DeepSpeedPlugin()
        plugin.set_mixed_precision(found["ACCELERATE_MIXED_PRECISION"])
    sizes = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
    config = deepspeed_config({**plugin.deepspeed_config, **sizes, "steps_per_print": 10})
    assert (config.zero_config.stage, config.gradient_accumulation_steps) == (3, 4)
    assert (config.bfloat16_config.enabled, config.float16_config.enabled) == (precision == "bf16", precision == "fp16")
    assert config.zero_config.offload_param.device == config.zero_config.offload_optimizer.device == "cpu"
    assert config.gradient_clipping == (clipping or 1e30)


def test_layers_with_experts_reach_deepspeed(folder):
    document = {
        "backend": "deepspeed",
        "sharding": {"strategy": "full_shard", "conditional_modules": ["Moe", "Experts"]},
    }
    with launched(folder, written(document, SIXTEEN).text) as found:
        assert found["ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES"] == "Moe,Experts"


def test_what_a_file_of_version_1_means_is_what_its_plugin_holds(folder):
    for number, strategy in enumerate(ShardingStrategy, 1):
        block = {
            "fsdp_sharding_strategy": number,
            "fsdp_sync_module_states": False,
            "fsdp_cpu_ram_efficient_loading": False,
        }
        document = {"distributed_type": "FSDP", "num_processes": 8, "fsdp_config": block}
        with launched(folder, file(document)):
            assert FullyShardedDataParallelPlugin().sharding_strategy is strategy
        sharding = formats.read(document).config.sharding
        kept = strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)
        assert sharding.hybrid == ("HYBRID" in strategy.name)
        assert sharding.reshard_after_forward == (not kept)


def test_defect_reshard_after_forward_of_version_1_is_ignored(folder):
    block = {
        "fsdp_reshard_after_forward": "SHARD_GRAD_OP",
        "fsdp_sync_module_states": False,
        "fsdp_cpu_ram_efficient_loading": False,
    }
    document = {"distributed_type": "FSDP", "num_processes": 8, "fsdp_config": block}
    with launched(folder, file(document)):
        assert FullyShardedDataParallelPlugin().sharding_strategy is ShardingStrategy.FULL_SHARD


def test_defect_a_list_of_classes_becomes_text(folder):
    block = {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": ["A", "B"],
    }
    with launched(folder, file({"distributed_type": "FSDP", "num_processes": 8, "fsdp_config": block})):
        assert FullyShardedDataParallelPlugin().transformer_cls_names_to_wrap == ["['A'", " 'B']"]


def deepspeed(**block):
    return {"distributed_type": "DEEPSPEED", "num_processes": 8, "deepspeed_config": block}


def test_defect_paths_of_nvme_are_never_passed_on(folder):
    document = deepspeed(zero_stage=3, offload_optimizer_device="nvme", offload_optimizer_nvme_path="/local")
    with launched(folder, file(document)):
        assert DeepSpeedPlugin().deepspeed_config["zero_optimization"]["offload_optimizer"]["nvme_path"] == "none"


def test_defect_no_clipping_is_left_out(folder):
    with launched(folder, file(deepspeed(zero_stage=2, gradient_clipping=0.0))):
        assert "gradient_clipping" not in DeepSpeedPlugin().deepspeed_config


def test_defect_sgd_becomes_adam_where_the_optimizer_is_offloaded(deepspeed_config, monkeypatch):
    made = []
    monkeypatch.setattr("deepspeed.ops.adam.DeepSpeedCPUAdam", lambda groups, **arguments: made.append(arguments))
    map_pytorch_optim_to_deepspeed(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5))
    assert made == [{"lr": 0.5, "weight_decay": 0, "adamw_mode": False}]


def test_defect_deepspeeds_launcher_passes_no_compilation_on(folder):
    document = {**deepspeed(zero_stage=2), "dynamo_config": {"dynamo_backend": "INDUCTOR"}}
    with launched(folder, file(document)):
        assert TorchDynamoPlugin().backend.value == "NO"


def test_what_we_refuse_beside_deepspeeds_own_file_is_refused_by_accelerate(folder):
    (folder / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    for extra, precision, status in (
        ({"zero_stage": 2}, {}, 1),
        ({}, {"mixed_precision": "fp16"}, 1),
        ({}, {"mixed_precision": "no"}, 0),
    ):
        document = {**deepspeed(deepspeed_config_file=str(folder / "ds.json"), **extra), **precision}
        assert (
            formats.translate(document, "unishard").status(strict=False) == status
        )  # "no" adds nothing to what the file says
        with launched(folder, file(document)), pytest.raises(ValueError, match="will be ignored"):
            DeepSpeedPlugin()


def test_a_file_of_deepspeeds_own_and_one_in_the_text_itself(folder):
    (folder / "ds.json").write_text('{"zero_optimization": {"stage": 1}, "gradient_clipping": 0.5}')
    for name in (str(folder / "ds.json"), (folder / "ds.json").read_text()):
        document = deepspeed(deepspeed_config_file=name)
        with launched(folder, file(document)):
            plugin = DeepSpeedPlugin()
        config = formats.read(document).config
        assert (config.sharding.strategy, plugin.zero_stage) == ("shard_optimizer", 1)
        assert config.training.gradient_clipping == plugin.gradient_clipping == 0.5


def test_a_number_of_processes_that_nobody_has_said_is_asked_for(folder):
    text = formats.translate({"backend": "fsdp"}, "accelerate", from_="unishard").text
    with pytest.raises(ValueError, match="num_processes"), launched(folder, text):
        pass


def test_the_table_has_every_key_of_accelerate():
    known = {key.partition(".")[0] for key in catalog.get("accelerate").keys} | {"fsdp_config", "deepspeed_config"}
    fields = {*ClusterConfig.__dataclass_fields__, *SageMakerConfig.__dataclass_fields__}
    assert fields <= known
    older = {"fp16", "dynamo_backend", "ipex_config", "xpu_config", "tp_config", "tpu_cluster"}
    assert known - fields == older | {"env", "kt_config"}


def test_a_file_of_its_own_is_taken_again(tmp_path):
    (tmp_path / "ds.json").write_text(
        json.dumps(
            {
                "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 0, "reduce_bucket_size": "auto"},
                "bf16": {"enabled": True},
                "train_micro_batch_size_per_gpu": "auto",
            }
        )
    )
    named = {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"deepspeed_config_file": "ds.json"},
        "num_processes": 2,
        "num_machines": 1,
    }
    alone = {"distributed_type": "NO", "gpu_ids": "0", "num_processes": 1, "num_machines": 1}
    for document in (named, alone):
        path = tmp_path / "accelerate.yaml"
        path.write_text(json.dumps(document))
        again = formats.translate(path, "accelerate")
        verified = verify(again)
        assert verified.clean
        assert not verified.effective.refused
        assert again.document.items() >= document.items()
    path.write_text(json.dumps(named))
    changed = formats.translate(path, "accelerate", overrides=["training.gradient_clipping=0.5"])
    assert verify(changed).effective.settings["training.gradient_clipping"] == 0.5
    assert "deepspeed_config_file" not in changed.document["deepspeed_config"]


def test_what_accelerate_refuses_is_not_excused_by_what_is_still_open():
    outcome = formats.translate(
        {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}, "accelerate", from_="deepspeed"
    )
    assert outcome.reading.undecided
    verified = verify(outcome._replace(text=f"{outcome.text}no_such_key: 1\n"))
    assert verified.effective.refused
    assert not verified.clean
