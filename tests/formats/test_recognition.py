"""A format is recognized by how much it explains of a document; tools that unishard does not read are named, and none
is guessed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from documents import SEEDS

from unishard.contract import registry
from unishard.errors import ConfigError
from unishard.formats import catalog, read, translate
from unishard.formats.advice.remedies import remedy
from unishard.formats.files.source import open_source
from unishard.formats.hf.dialects import DIALECT
from unishard.formats.markers import by_entries
from unishard.formats.other_tools import tools

FILES = yaml.safe_load((Path(__file__).parent / "files_of_other_tools.yaml").read_text(encoding="utf-8"))
"""A config of each tool that is named, as text."""
MIXED = ("pipeline_model_parallel_size",)
"""Keys of Megatron that people also write, with 1, beside TrainingArguments."""


def recognized(document: dict[str, Any] | Path) -> str:
    return catalog.recognise(open_source(document)).name


@pytest.mark.parametrize("name", FILES)
def test_a_tool_that_is_not_read_is_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(FILES[name])
    with pytest.raises(ConfigError) as caught:
        recognized(path)
    assert f"is a config of {name} (" in str(caught.value)
    instead = (
        "translate the file from which the run was started" if name == "Weights & Biases" else "run `unishard init`"
    )
    assert f"which unishard does not read; {instead}" in str(caught.value)
    assert catalog.loudest(open_source(path))[1] == 0
    assert read(path, "deepspeed").format == "deepspeed"  # whoever names a format gets it


def test_what_names_a_tool_is_no_key_of_a_format_that_is_read() -> None:
    keys = {
        *registry.arguments("deepspeed").keys,
        *DIALECT,
        *(key for name in catalog.NAMES for key in catalog.get(name).keys),
    }
    for tool in tools():
        telling = {key for key, weight in tool.markers.keys.items() if weight > 1} - set(MIXED)
        assert not telling & keys, tool.name


AXOLOTL = {"base_model": "m", "sequence_len": 8, "micro_batch_size": 1, "optimizer": "adamw_torch"}
SWIFT = {"model": "m", "tuner_type": "lora", "per_device_train_batch_size": 1}
COMPOSER = {"max_duration": "1ep", "train_batch_size": 8, "schedulers": []}
ZERO = {"zero_optimization": {"stage": 3}}


@pytest.mark.parametrize(
    ("document", "instead"),
    [
        (AXOLOTL | {"deepspeed": ZERO}, "translate the config of DeepSpeed in it (deepspeed) with `unishard translate"),
        (COMPOSER | {"deepspeed_config": ZERO}, "translate the config of DeepSpeed in it (deepspeed_config) with"),
        (AXOLOTL | {"deepspeed": "a/z.json"}, "translate the DeepSpeed JSON that it names (a/z.json) with `unishard"),
        (AXOLOTL | {"fsdp_config": {"fsdp_offload_params": True}}, "put it and `distributed_type: FSDP` into a file"),
        (SWIFT | {"deepspeed": "zero3"}, "that it names (zero3) with `unishard translate --from deepspeed`"),
        (SWIFT | {"fsdp": "fsdp2"}, "that it names (fsdp2) with `unishard translate --from hf`"),
    ],
)
def test_a_tool_that_is_not_read_comes_with_what_can_be_translated(document: dict[str, Any], instead: str) -> None:
    with pytest.raises(
        ConfigError, match="if it is not one, name its format with `unishard translate --from`"
    ) as caught:
        recognized(document)
    assert instead in str(caught.value)
    assert "or run `unishard init`" in str(caught.value)


def test_what_an_error_says_to_translate_can_be_translated(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    path = tmp_path / "axolotl.yaml"
    path.write_text(yaml.safe_dump(AXOLOTL | {"deepspeed": "ds.json", "gradient_accumulation_steps": 2}))
    with pytest.raises(
        ConfigError, match=r"DeepSpeed in it \(deepspeed: ds.json\) with `unishard translate --from deep"
    ):
        recognized(path)
    assert translate(path, "unishard", from_="deepspeed").reading.config.sharding.strategy == "shard_grad_op"
    config = {"fsdp_version": 2, "offload_params": True, "transformer_layer_cls_to_wrap": "Block"}
    assert read({"distributed_type": "FSDP", "fsdp_config": config}).config.offload.params == "cpu"


def test_read_as_another_format_a_file_of_a_known_tool_comes_with_a_warning() -> None:
    assert any("has keys of ms-swift (tuner_type" in text for text in translate(SWIFT, "unishard", from_="hf").warnings)


@pytest.mark.parametrize("name", ["axolotl", "composer", "swift", "torchtitan"])
def test_a_format_that_once_was_says_what_to_write(name: str) -> None:
    with pytest.raises(ConfigError, match=r"are not translated any more; .* leave --from out; .* write --to hf$"):
        translate({"zero_optimization": {"stage": 1}}, name)


def test_files_that_only_resemble_those_of_another_tool_are_read() -> None:
    arguments = {"per_device_train_batch_size": 1, "learning_rate": 1e-4, "output_dir": "o", "num_train_epochs": 1}
    assert recognized(arguments | {"base_model": "m", "val_set_size": 0, "sequence_len": 8, "bf16": True}) == "hf"
    assert recognized(arguments | {"model": "m", "dataset": "d", "padding_free": True}) == "hf"
    with pytest.raises(ConfigError, match="matches no known format"):
        recognized({"model": {"name": "m"}, "training": {"iterations": 2}, "job": {"name": "x"}, "lr_scheduler": {}})


def test_the_manifest_of_a_checkpoint_is_no_config() -> None:
    manifest = {
        "format": "unishard",
        "version": 1,
        "model": {"fingerprint": "0", "numel": 1},
        "optimizer": {"groups": []},
        "world_size": 2,
    }
    with pytest.raises(ConfigError, match=r"is the manifest of a checkpoint; .*name the config of the run"):
        recognized(manifest)


OWN = {f"my_{index}": index for index in range(12)}


@pytest.mark.parametrize(
    ("document", "tool"),
    [
        (
            {
                "zero_optimization": {"stage": 2, "overlap_comm": True},
                "fp16": {"enabled": True},
                "precision": "bf16",
                **OWN,
            },
            "DeepSpeed",
        ),
        ({"distributed_type": "FSDP", "num_processes": 2, "mixed_precision": "bf16", **OWN}, "Accelerate"),
        (
            {
                "trainer": {"devices": 2, "max_epochs": 1, "actor": 1, "critic": 2, "rollout": 3, "envs": 4},
                "model": {"a": 1},
            },
            "Lightning",
        ),
        ({"training": {"micro_batch_size": 1}, "sharding": "full_shard", **OWN}, "unishard"),
        ({"learning_rate": 1e-4, "num_train_epochs": 1, "output_dir": "o", **OWN}, "transformers"),
    ],
)
def test_a_file_most_keys_of_which_are_unknown_is_not_guessed(document: dict[str, Any], tool: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"resembles a config of {tool}.*most of its keys \(.*`unishard translate --from \w+`"
    ) as caught:
        recognized(document)
    assert "my_3" in str(caught.value) or "my_0" not in document


def test_with_half_of_its_keys_known_a_file_is_read() -> None:
    few = {"my_0": 0, "my_1": 1}
    assert recognized({"zero_optimization": {"stage": 2}, "train_batch_size": 8, **few}) == "deepspeed"
    assert recognized({"distributed_type": "FSDP", "num_processes": 2, **few}) == "accelerate"


def test_a_scripts_own_keys_around_training_arguments_do_not_matter() -> None:
    arguments = {
        "per_device_train_batch_size": 1,
        "learning_rate": 1e-4,
        "output_dir": "o",
        "bf16": True,
        "num_train_epochs": 1,
    }
    assert recognized({**arguments, **OWN}) == "hf"
    assert (
        recognized(
            {
                **arguments,
                "pipeline_model_parallel_size": 4,
                "use_distributed_optimizer": True,
                "overlap_grad_reduce": True,
            }
        )
        == "hf"
    )


def test_of_two_formats_that_a_file_speaks_for_as_much_the_one_that_knows_more_counts() -> None:
    assert recognized({"accelerator": "gpu", "num_processes": 2}) == "lightning"
    with pytest.raises(
        ConfigError, match=r"matches several formats: llamafactory, trl \(its keys: .*\); name one with"
    ):
        recognized({"assistant_only_loss": True, "cutoff_len": 8})


@pytest.mark.parametrize("name", SEEDS)
def test_what_people_write_is_explained(name: str) -> None:
    for data in SEEDS[name]:
        assert catalog.get(name).coverage(open_source(data)).most


@pytest.mark.parametrize("name", ["hf", "deepspeed", "llamafactory"])
def test_a_document_that_says_nothing_is_no_config(name: str, tmp_path: Path) -> None:
    path = tmp_path / "nothing.yaml"
    path.write_text("model: {path: m}\ncolor: red\n")
    with pytest.raises(ConfigError, match="so that the engine and all else are unknown; name its format with --from"):
        translate(path, "trl", from_=name)


def test_of_arguments_that_are_silent_the_engine_is_asked(tmp_path: Path) -> None:
    path = tmp_path / "quick.yaml"
    path.write_text("model_name_or_path: m\ndataset_name: d\n")
    with pytest.raises(ConfigError, match="does not say its engine"):
        translate(path, "unishard", from_="trl")
    plain = translate(path, "unishard", from_="trl", overrides=["sharding.strategy=no_shard"]).reading.config
    assert (plain.optimizer.lr, plain.precision.compute) == (2e-5, "bf16")


def test_of_a_document_that_is_unknown_nothing_works_without_its_keys() -> None:
    assert remedy(open_source({"color": "red"}), "trl", from_="accelerate") is None


def test_a_reading_that_knows_nothing_explains_nothing() -> None:
    found = by_entries(read({"zero_stage": 3, "lr": 1}, "deepspeed").entries)
    assert (found.share, found.most, found.unknown) == (0, False, ("zero_stage", "lr"))
    assert by_entries([]).most


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (
            "from torchtitan.trainer import Trainer\n\ndef debug() -> Trainer.Config:\n    return Trainer.Config()\n",
            "is a Python config of torchtitan, which unishard does not run; run `unishard init`",
        ),
        ("config = {}\n", "is Python, which unishard does not run; name a YAML, JSON or TOML file"),
    ],
)
def test_python_is_not_run(text: str, what: str, tmp_path: Path) -> None:
    path = tmp_path / "config_registry.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=what):
        recognized(path)


ZERO = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}


@pytest.mark.parametrize(
    ("document", "key"),
    [
        ({"deepspeed_config": ZERO, "name": "x"}, "deepspeed_config"),
        ({"deepspeed": {"config": ZERO}, "model": "x"}, "deepspeed.config"),
        ({"a": {"b": {"c": {"d": {"e": {"f": {"g": ZERO}}}}}}}, "a.b.c.d.e.f.g"),
        (
            {"sequence_parallel_size": 8, "deepspeed": ZERO, "optimizer": {"type": "AdamW", "learning_rate": 1e-5}},
            "deepspeed",
        ),
    ],
)
def test_a_config_of_deepspeed_is_found_inside_and_the_advice_finds_it_too(
    document: dict[str, Any], key: str, tmp_path: Path
) -> None:
    file = tmp_path / "c.json"
    file.write_text(json.dumps(document))
    with pytest.raises(ConfigError) as error:
        read(file)
    assert f"the config of DeepSpeed in it ({key}) is read with `unishard translate --from deepspeed`" in str(
        error.value
    )
    config = read(file, "deepspeed").config
    assert (config.sharding.strategy, config.precision.compute, config.training.micro_batch_size) == (
        "shard_grad_op",
        "bf16",
        2,
    )
