"""Lightning's arguments say what Lightning would do."""

from __future__ import annotations

import json
from typing import Any

import pytest
from accounting import faults_of

from unishard.config import Config
from unishard.contract.rules import Fit
from unishard.formats import translating
from unishard.formats.reading.document import ReadDocument
from unishard.formats.report.items import Item


def read(document: dict[str, Any], *overrides: str) -> ReadDocument:
    return translating.read(document, "lightning", overrides)


def config(document: dict[str, Any]) -> Config:
    return read(document).config


def item(document: dict[str, Any], key: str, to: str = "unishard") -> Item:
    outcome = translating.translate(document, to, from_="lightning")
    return next(item for item in outcome.items if item.key == key)


def built(name: str, *, package: str = "lightning.pytorch.strategies", **arguments: Any) -> dict[str, Any]:
    return {"class_path": f"{package}.{name}", "init_args": arguments}


def test_a_config_in_a_file_is_read_beside_the_document(tmp_path: Any) -> None:
    (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    path = tmp_path / "lightning.yaml"
    path.write_text("strategy:\n  class_path: DeepSpeedStrategy\n  init_args: {config: zero.json}\n")
    assert translating.read(path).config.sharding.strategy == "shard_optimizer"
    (tmp_path / "zero.json").unlink()
    refused = translating.translate(path, "unishard").of(Fit.UNSUPPORTED)
    assert [found.key for found in refused] == ["strategy.init_args.config"]
    assert "put the file beside" in refused[0].note


def test_an_argument_that_goes_into_a_block_that_is_off_has_a_line() -> None:
    arguments = {"stage": 2, "partition_activations": False, "cpu_checkpointing": False}
    document = {"strategy": built("DeepSpeedStrategy", **arguments)}
    outcome = translating.translate(document, "unishard", from_="lightning")
    assert not faults_of(outcome)
    assert {item.key for item in outcome.items} >= {f"strategy.init_args.{name}" for name in arguments}


def test_a_file_of_lightning_is_recognised_and_another_trainers_is_not() -> None:
    for document in ({"trainer": {"strategy": "ddp"}}, {"strategy": "fsdp", "precision": "32"}, built("DDPStrategy")):
        assert translating.read(document).format == "lightning"
    with pytest.raises(Exception, match="is a config of verl"):
        translating.read({"trainer": {"total_epochs": 3, "nnodes": 1}, "actor": {}})
    with pytest.raises(Exception, match="no known format"):
        translating.read({"trainer": {"total_epochs": 3, "workers": 1}, "actor": {}})


def test_a_block_in_a_config_file_decides_the_format(tmp_path: Any) -> None:
    (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}))
    path = tmp_path / "lightning.yaml"
    path.write_text(
        "trainer:\n  precision: bf16-mixed\n  strategy: {class_path: DeepSpeedStrategy, init_args: {config: "
        "zero.json}}\n"
    )
    outcome = translating.translate(path, "unishard")
    assert outcome.reading.config.precision.compute == "bf16"
    found = {item.key: item for item in outcome.items}
    assert found["trainer.strategy.init_args.config.bf16.enabled"].becomes == "precision.compute"
    assert found["trainer.precision"].fit is Fit.IGNORED


def test_an_argument_of_the_class_hides_none_of_the_trainers() -> None:
    document = {"class_path": "FSDPStrategy", "init_args": {"devices": 2}, "devices": 4}
    keys = [item.key for item in translating.translate(document, "unishard", from_="lightning").items]
    assert {"devices", "init_args.devices"} <= set(keys)
