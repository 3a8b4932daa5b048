"""A file with open lines takes every value that these allow, by its own `--set`."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from documents import SEEDS

from unishard import ConfigError, load
from unishard.config import Config
from unishard.contract.rules import Fit
from unishard.errors import UnusedFieldWarning
from unishard.formats import translate

SCALED = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "initial_scale_power": 10, "loss_scale_window": 100},
    "zero_optimization": {"stage": 2},
}
PURE = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": "auto", "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
    "fp16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2},
}
WARMED = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_type": "linear"}},
}
ANY_SCHEDULE = {
    "per_device_train_batch_size": 1,
    "learning_rate": 1e-4,
    "bf16": True,
    "lr_scheduler_type": "${schedule}",
    "fsdp": "full_shard",
}
DTYPES = ("bf16", "fp16", "fp32")
CHOICES = {"precision.compute": DTYPES, "scheduler.warmup_steps": (0, 10)}


def opened(document: Any, from_: str, path: Path) -> list[str]:
    """Write the translation; its open fields."""
    outcome = translate(document, "unishard", from_=from_)
    path.write_text(outcome.text)
    return [] if outcome.of(Fit.UNSUPPORTED) else list(outcome.reading.undecided)


def chosen(path: Path, open_: list[str], **choice: Any) -> Config:
    """The config with a value in each open line: those of `choice`, and the defaults."""
    values: dict[str, Any] = {"scheduler.total_steps": 100, "training.micro_batch_size": 1}
    values |= {"precision.reduce": choice.get("precision.compute"), **choice}
    default = Config.parse({})
    changes = []
    for field in open_:
        section, _, name = field.partition(".")
        value = values.get(field, getattr(getattr(default, section), name) if name else None)
        changes.append(f"{field}={json.dumps(value)}")
    return load(path, overrides=changes)


@pytest.mark.parametrize("document", [SCALED, PURE, WARMED], ids=["scaled", "pure", "warmed"])
def test_every_value_of_an_open_line_is_taken(document: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    open_ = opened(document, "deepspeed", path)
    for field in set(open_) & CHOICES.keys():
        for value in CHOICES[field]:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UnusedFieldWarning)
                chosen(path, open_, **{field: value})


def test_what_does_not_count_is_left_out_with_a_word_and_kept_where_it_counts(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    open_ = opened(SCALED, "deepspeed", path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scale = chosen(path, open_, **{"precision.compute": "fp16"}).precision
    assert (scale.initial_loss_scale, scale.loss_scale_growth_interval) == (1024.0, 100)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UnusedFieldWarning)
        precision = chosen(path, open_, **{"precision.compute": "bf16"}).precision
    fields = ("initial_loss_scale", "loss_scale_growth_interval")
    assert not precision.changed.intersection(fields)
    notes = [re.sub(r".*c\.yaml:\d+: ", "", str(one.message)) for one in told]
    assert notes == [f"precision.{name} is left out: only fp16 has a loss scale" for name in fields]


def test_masters_of_another_dtype_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    open_ = opened(PURE, "deepspeed", path)
    assert chosen(path, open_, **{"precision.compute": "bf16"}).precision.master == "bf16"
    with pytest.warns(UnusedFieldWarning, match="it needs precision.compute bf16"):
        assert chosen(path, open_, **{"precision.compute": "fp16"}).precision.master == "fp32"


def test_what_is_wrong_in_itself_or_said_by_an_override_is_still_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("precision:\n  compute: ${precision.compute}\n  loss_scale_growth_interval: 7\n")
    with pytest.raises(ConfigError, match="is unused with compute bf16"):
        load(path, overrides=["precision.compute=bf16", "precision.loss_scale_growth_interval=8"])
    path.write_text("sharding: {strategy: full_shard, units: 7}\nprecision: {compute: '${precision.compute}'}\n")
    with pytest.raises(ConfigError, match="units: must be"):
        load(path, overrides=["precision.compute=bf16"])
    path.write_text("precision:\n  compute: bf16\n  loss_scale_growth_interval: 7\n")
    with pytest.raises(ConfigError, match="is unused with compute bf16"):
        load(path, overrides=["training.seed=1"])
    path.write_text("scheduler:\n  name: linear\n  warmup_steps: 9\n  total_steps: ${scheduler.total_steps}\n")
    with pytest.raises(ConfigError, match="must be smaller than total_steps"):
        load(path, overrides=["scheduler.total_steps=5"])


@pytest.mark.parametrize("from_", sorted(SEEDS))
def test_every_file_takes_every_dtype(from_: str, tmp_path: Path) -> None:
    for data in SEEDS[from_]:
        path = tmp_path / "c.yaml"
        open_ = opened(data, from_, path)
        for value in DTYPES if "precision.compute" in open_ else ():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UnusedFieldWarning)
                chosen(path, open_, **{"precision.compute": value})


def test_what_an_override_leaves_unused_is_set_aside_in_a_translation_too() -> None:
    scaled = SCALED | {"fp16": {"enabled": True, "initial_scale_power": 10}}
    outcome = translate(scaled, "unishard", from_="deepspeed", overrides=["precision.loss_scale=8.0"])
    assert outcome.of(Fit.UNSUPPORTED) == []
    (item,) = (item for item in outcome.items if item.key == "fp16.initial_scale_power")
    assert (item.fit, item.note) == (Fit.IGNORED, "is unused with a constant loss_scale of 8")


def test_an_open_schedule_asks_for_its_end_too_and_takes_every_name(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    opened(ANY_SCHEDULE, "hf", path)
    given = {"scheduler.total_steps=100", "scheduler.min_lr_ratio=0.1"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("linear", "cosine"):
            assert load(path, overrides=[f"scheduler.name={name}", *given]).scheduler.total_steps == 100
        for name in ("constant", "inverse_sqrt"):
            assert load(path, overrides=[f"scheduler.name={name}"]).scheduler.total_steps is None
    with pytest.raises(ConfigError, match=r"scheduler\.total_steps: needs a value"):
        load(path, overrides=["scheduler.name=linear", "scheduler.min_lr_ratio=0.1"])
