"""A config made in Python: the messages of `unishard.load`, overrides, copies and dumps."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from schema_strategies import documents

import unishard
from unishard import Config, ConfigError
from unishard.checkpoint.files import path_of
from unishard.config import Checkpoint, Logging, Offload, Profile, Sharding, Training
from unishard.errors import ContractError

WRONG: list[dict[str, Any]] = [
    {"sharding": "wat"},
    {"trainin": {}},
    {"training": {"micro_batch_size": "4"}},
    {"training": {"micro_batch_size": 0, "seed": 1.5}},
    {"training": None},
    {"optimizer": {"name": "sgdd", "betas": [1]}},
    {"optimizer": {"name": 3, "groups": [{"params": ["a"], "lr": "x"}]}},
    {"optimizer": {"groups": [{"params": ["a"]}]}},
    {"precision": {"compute": "fp7", "master": "bf16"}},
    {"precision": "fp16", "training": {"nonfinite": "ignore"}},
    {"checkpoint": {"every_steps": 5, "on_signal": ["KILL"]}},
    {"backend": None, "strict": "yes", "native": []},
    {"training.seed": 3},
]


def problems(make: Any, *arguments: Any, **named: Any) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        make(*arguments, **named)
    return sorted(f"{problem.path}: {problem.what}" for problem in refused.value.problems)


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_wrong_config_in_python_gets_the_messages_of_load(wrong: dict[str, Any]) -> None:
    expected = problems(unishard.load, wrong)
    assert problems(Config.model_validate, wrong) == expected
    assert problems(Config.model_validate_json, json.dumps(wrong)) == expected
    assert problems(Config, **wrong) == expected
    assert not any("default factory" in line or "Input should" in line or "pydantic" in line for line in expected)


def test_a_section_in_python_is_refused_with_its_own_fields() -> None:
    assert problems(Sharding, strategy="full_shart")[0].endswith("got 'full_shart'; did you mean 'full_shard'?")
    assert problems(Training, micro_batch=3) == ["micro_batch: unknown field; did you mean 'micro_batch_size'?"]


def test_text_that_is_no_json_is_refused() -> None:
    assert problems(Config.model_validate_json, "{")[0].startswith(": is not JSON: ")


def test_a_config_in_a_model_of_the_user_keeps_the_places_of_pydantic() -> None:
    class Mine(BaseModel):
        config: Config

    assert Mine(config={"sharding": "zero2"}).config.sharding.strategy == "shard_grad_op"  # type: ignore[arg-type]
    with pytest.raises(ValidationError) as refused:
        Mine(config={"training": {"seed": -1}})  # type: ignore[arg-type]
    assert refused.value.errors()[0]["loc"] == ("config", "training", "seed")


def test_override_returns_a_checked_config() -> None:
    cfg = Config(sharding="full_shard")  # type: ignore[arg-type]
    changed = cfg.override("training.micro_batch_size=4", "sharding=zero2", "optimizer={name: sgd, momentum: 0.9}")
    assert (changed.training.micro_batch_size, changed.sharding.strategy, changed.optimizer.momentum) == (
        4,
        "shard_grad_op",
        0.9,
    )
    assert (cfg.training.micro_batch_size, cfg.sharding.strategy) == (1, "full_shard")
    assert problems(cfg.override, "training.micro_batch=4") == [
        "training.micro_batch: unknown field; did you mean 'micro_batch_size'?"
    ]
    assert problems(cfg.override, "training.seed=x", "optimizer.lr=-1")[0].startswith(
        "optimizer.lr: must be a number of at least 0"
    )


def test_model_copy_checks_what_it_updates() -> None:
    cfg = Config(sharding="full_shard")  # type: ignore[arg-type]
    assert cfg.model_copy(update={"training": Training(seed=4)}).training.seed == 4
    assert cfg.model_copy(update={"sharding": "zero2"}).sharding.strategy == "shard_grad_op"
    assert cfg.model_copy() == cfg
    assert problems(cfg.model_copy, update={"training.seed": 4})[0].startswith("training.seed: is a dotted name")
    assert problems(cfg.model_copy, update={"training": 4})[0].startswith("training: must be a section of fields")
    assert problems(cfg.model_copy, update={"offload": {"params": "cpu"}, "sharding": "no_shard"})


def yaml_of(data: Any) -> str:
    text = io.StringIO()
    YAML(typ="safe", pure=True).dump(data, text)
    return text.getvalue()


@given(document=documents())
def test_dumps_load_again(document: dict[str, Any]) -> None:
    try:
        cfg = unishard.load(document)
    except ConfigError:
        return
    assert Config.model_validate(cfg.model_dump()) == cfg
    assert Config.model_validate_json(cfg.model_dump_json()) == cfg
    assert unishard.load(cfg.model_dump(mode="json", exclude_unset=True)) == cfg
    assert unishard.load(YAML(typ="safe", pure=True).load(yaml_of(cfg.model_dump(mode="json")))) == cfg


def test_a_file_may_hold_sections_of_the_user(tmp_path: Any) -> None:
    file = tmp_path / "train.yaml"
    file.write_text("x-mine:\n  root: ${DATA}\n  limit: .inf\nbackend: deepspeed\n")
    assert unishard.load(file).backend == "deepspeed"
    file.write_text("model: ${MODEL}\nrun:\n  unishard:\n    backend: deepspeed\n    training: {seed: 7}\n")
    assert unishard.load(file, section="run.unishard").training.seed == 7
    assert unishard.load(file, ["training.seed=8"], section="run.unishard").training.seed == 8
    file.write_text("run:\n  unishard:\n    training: {seed: -7}\n")
    with pytest.raises(ConfigError, match=rf"^{file}:3: training.seed: must be "):
        unishard.load(file, section="run.unishard")
    with pytest.raises(ConfigError, match=rf"^{file}:1: has no section 'run.unishart'; it has unishard$"):
        unishard.load(file, section="run.unishart")
    with pytest.raises(ConfigError, match=r"has no fields in the section 'run.unishard.training.seed'"):
        unishard.load(file, section="run.unishard.training.seed")


DIRECTORIES = {
    "checkpoint.dir": lambda path: unishard.Config(checkpoint=Checkpoint(dir=path)).checkpoint.dir,
    "logging.dir": lambda path: Logging(to=["jsonl"], dir=path).dir,
    "profile.dir": lambda path: Profile(steps=[3, 4], dir=path).dir,
    "offload.nvme_path": lambda path: Offload(params="nvme", optimizer="nvme", nvme_path=path).nvme_path,
}


@pytest.mark.parametrize("field", DIRECTORIES)
def test_a_directory_may_be_a_path_and_in_the_home_directory(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    directory: Any = DIRECTORIES[field]
    for written, meant in (
        (Path("runs/a"), "runs/a"),
        ("~/runs", "/home/me/runs"),
        (Path("~") / "runs", "/home/me/runs"),
        ("runs/~a", "runs/~a"),
    ):
        assert directory(written) == meant


@pytest.mark.parametrize("field", DIRECTORIES)
@pytest.mark.parametrize(
    ("given", "what"),
    [
        ("s3://bucket/runs", r"is a URL \(s3://\.\.\.\), and files are written only to directories; write a directory"),
        (Path("gs://bucket/runs"), r"is a URL \(gs://\.\.\.\)"),
        ("$HOME/runs", r"contains \$HOME, but environment variables are not expanded; write the value"),
        ("runs/$USER", r"contains \$USER, but environment variables are not expanded"),
        ("~nobody-of-this-name/runs", "begins with ~nobody-of-this-name, and there is no such user"),
    ],
)
def test_what_is_no_directory_is_refused(field: str, given: str | Path, what: str) -> None:
    directory: Any = DIRECTORIES[field]
    with pytest.raises(ConfigError, match=rf"{field.partition('.')[2]}: {what}"):
        directory(given)
    with pytest.raises(ContractError, match=rf"save: {re.escape(repr(str(given)))} {what}"):
        path_of(given, "save")
