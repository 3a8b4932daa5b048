"""The hints for names and arguments of other tools name calls, fields and functions that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import unishard
from unishard import Config, ConfigError, ModelError
from unishard.config import hints, leaves
from unishard.config.loading.other_tools import other_tool
from unishard.contract import registry
from unishard.engine.engine import Engine
from unishard.engine.framework import Framework
from unishard.engine.gradients import Gradients
from unishard.engine.weights import Weights

HINTS = [
    *hints.BACKENDS.values(),
    *hints.IN_SCRIPT.values(),
    *hints.BY_HABIT.values(),
]
PARTS = {"weights": Weights, "gradients": Gradients, "framework": Framework}
FIELDS = {path for path, _ in leaves(Config)}


@pytest.mark.parametrize("hint", dict.fromkeys(HINTS))
def test_what_a_hint_names_exists(hint: str) -> None:
    assert {name for name in re.findall(r"\bengine\.(\w+)", hint) if not hasattr(Engine, name)} == set()
    parts = re.findall(r"\bengine\.(weights|gradients|framework)\.(\w+)", hint)
    assert {(part, name) for part, name in parts if not hasattr(PARTS[part], name)} == set()
    assert {name for name in re.findall(r"\bunishard\.(\w+)", hint) if name not in unishard.__all__} == set()
    sections = "|".join(Config.model_fields)
    assert {path for path in re.findall(rf"\b(?:{sections})\.\w+", hint) if path not in FIELDS} == set()


def test_no_name_is_one_of_ours() -> None:
    assert [name for name in hints.BACKENDS if name in registry.available()] == []
    assert {path.rpartition(".")[2] for path in FIELDS}.isdisjoint(hints.IN_SCRIPT)


def test_no_habit_is_a_name_of_the_engine() -> None:
    assert [name for name in (*hints.BY_HABIT, *hints.MOVED) if hasattr(Engine, name)] == []


def test_what_people_type_on_an_engine_says_what_to_write() -> None:
    engine = object.__new__(Engine)
    with pytest.raises(AttributeError, match=r"has no attribute 'clip_grad_norm_'; write training.gradient_clipping"):
        engine.clip_grad_norm_  # noqa: B018
    with pytest.raises(AttributeError, match=r"has no attribute 'colour'$"):
        engine.colour  # noqa: B018


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        ("scheduler: {warmup_ratio: 0.1}", "write scheduler.warmup_steps in updates, the ratio times total_steps"),
        ("parallel: {cp: 2}", "write parallel: {sequence: N}"),
        ("load_in_4bit: true", "write quantization: nf4"),
        ("activation_offloading: true", "write offload: {activations: cpu}"),
        ("sharding: {ignored_modules: [a]}", "write sharding: {replicate: [PATTERN]}"),
        ("quantization: int4", "got 'int4'; write nf4"),
        ("parallel: {sequence: {size: 2, method: ring}}", "got 'ring'; write allgather"),
        ("optimizer: {lr: 0,001}", "write a number with a point, such as 0.001"),
        ("sharding: {strategy: hybrid_shard, group_size: 1}", "write 2 or more, or strategy: no_shard"),
    ],
)
def test_words_of_the_field_say_what_to_write(lines: str, what: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"backend: fsdp\n{lines}\n")
    with pytest.raises(ConfigError) as caught:
        unishard.load(file)
    assert what in str(caught.value)


def test_a_script_in_the_place_of_a_config_is_named(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("print(1)\n")
    with pytest.raises(ConfigError, match="is a script, and the config stands before it; write"):
        unishard.load(file)
    with pytest.raises(ModelError, match=r"needs a torch.nn.Module, got dict; pass the model"):
        unishard.prepare({}, Config(backend="fsdp"))  # type: ignore[arg-type]


def test_a_config_of_a_tool_that_is_not_translated_is_one_error_too(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("base_model: llama\nsequence_len: 4096\nmicro_batch_size: 2\nlearning_rate: 1e-4\n")
    with pytest.raises(ConfigError, match=r"is a config of axolotl \(.*\), not of unishard, .*; run `unishard init`$"):
        unishard.load(file)


def test_keys_of_other_tools_beside_backend_have_a_hint_each() -> None:
    data = {"backend": "fsdp", "zero_optimization": {"stage": 2}, "train_batch_size": 8}
    assert other_tool(data) == ""
    with pytest.raises(ConfigError, match=r"did you mean 'sharding.strategy'"):
        unishard.load(data)


def test_no_field_is_a_key_of_another_tool_at_the_top() -> None:
    assert other_tool(dict.fromkeys(Config.model_fields)) == ""
    assert other_tool({name: None for name in Config.model_fields if name != "backend"}) == ""
