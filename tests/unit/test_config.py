from __future__ import annotations

import pytest

from unishard import Config
from unishard.config import Section, leaves, value_at

ALIASES = [
    ("sharding", "FULL_SHARD", "sharding.strategy", "full_shard"),
    ("sharding", "SHARD_GRAD_OP", "sharding.strategy", "shard_grad_op"),
    ("sharding", "NO_SHARD", "sharding.strategy", "no_shard"),
    ("sharding", "DDP", "sharding.strategy", "no_shard"),
    ("sharding", "zero0", "sharding.strategy", "no_shard"),
    ("sharding", "ZeRO-1", "sharding.strategy", "shard_optimizer"),
    ("sharding", "zero_2", "sharding.strategy", "shard_grad_op"),
    ("sharding", "ZeRO3", "sharding.strategy", "full_shard"),
    ("sharding", "HYBRID_SHARD", "sharding.strategy", "hybrid_shard"),
    ("sharding", "HSDP", "sharding.strategy", "hybrid_shard"),
    ("sharding", "_HYBRID_SHARD_ZERO2", "sharding.strategy", "hybrid_shard_grad_op"),
    ("sharding", "HYBRID_SHARD_ZERO2", "sharding.strategy", "hybrid_shard_grad_op"),
    ("precision", "BF16", "precision.compute", "bf16"),
    ("precision", "bfloat16", "precision.compute", "bf16"),
    ("precision", "float32", "precision.compute", "fp32"),
    ("precision", "16-mixed", "precision.compute", "fp16"),
    ("precision", "Half", "precision.compute", "fp16"),
    ("offload", "none", "offload.params", "none"),
    ("optimizer", "AdamW", "optimizer.name", "adamw"),
    ("scheduler", "Constant", "scheduler.name", "constant"),
    ("backend", "FSDP", "backend", "fsdp"),
]


@pytest.mark.parametrize(("name", "short", "path", "value"), ALIASES, ids=[f"{case[0]}: {case[1]}" for case in ALIASES])
def test_short_forms_and_spellings(name: str, short: str, path: str, value: str) -> None:
    assert value_at(Config.model_validate({name: short}), path) == value


def test_offload_cpu_means_both() -> None:
    offload = Config.model_validate({"offload": "cpu"}).offload
    assert (offload.params, offload.optimizer) == ("cpu", "cpu")


def test_every_field_has_a_description_and_a_default() -> None:
    sections: list[type[Section]] = [Config]
    while sections:
        section = sections.pop()
        assert section.__doc__
        for name, field in section.model_fields.items():
            assert section.descriptions().get(name), f"{section.__name__}.{name} has no docstring"
            assert not field.is_required(), f"{section.__name__}.{name} has no default"
            if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
                sections.append(field.annotation)


def test_sections_that_are_left_out_are_those_that_validation_builds() -> None:
    """They are constructed without validators, which take longer to build than a translation."""
    for name, field in Config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            left_out, given = getattr(Config(), name), getattr(Config(**{name: {}}), name)
            assert left_out == given == field.annotation()
            assert left_out.model_fields_set == given.model_fields_set == set()


def test_empty_defaults_are_not_shared() -> None:
    one, other = Config(), Config()
    for path, field in leaves(Config):
        if isinstance(field.default, list | dict):
            assert value_at(one, path) is not value_at(other, path), path


def test_leaves_are_the_fields_that_hold_values() -> None:
    paths = [path for path, _ in leaves(Config)]
    assert paths[:3] == ["backend", "sharding.strategy", "sharding.group_size"]
    assert "sharding" not in paths
    assert len(paths) == len(set(paths))
    cfg = Config()
    for path, field in leaves(Config):
        assert value_at(cfg, path) == field.get_default(call_default_factory=True, validated_data={"name": "adamw"})


@pytest.mark.parametrize(
    "given",
    [
        {"offload": {"optimizer": "cpu"}, "sharding": "zero1"},
        {"offload": "cpu", "sharding": "zero3"},
        {"offload": "cpu", "sharding": "hybrid_shard"},
        {"offload": {"params": "nvme", "optimizer": "cpu", "nvme_path": "/local"}},
        {"sharding": {"strategy": "hybrid_shard", "group_size": 2, "reshard_after_forward": False}},
        {"precision": {"compute": "bf16", "reduce": "bf16"}},
        {"precision": {"compute": "bf16", "master": "bf16"}},
        {"precision": {"compute": "fp16", "loss_scale": 128}},
        {"precision": {"buffers": "bf16"}},
        {"scheduler": {"warmup_steps": 10}},
        {"optimizer": {"name": "sgd", "momentum": 0.9}},
        {"optimizer": {"name": "sgd", "momentum": 0.9, "nesterov": True}},
        {"optimizer": {"name": "lion", "betas": [0.9, 0.99]}},
        {"optimizer": {"name": "adam", "amsgrad": True, "eps": 1e-6}},
        {"optimizer": {"name": "adagrad", "eps": 1e-6, "weight_decay": 0.1, "no_decay": ["bias"]}},
        {"optimizer": {"groups": [{"params": ["^a$"], "lr": 0.1}, {"params": ["b"], "weight_decay": 0.0}]}},
    ],
    ids=str,
)
def test_what_makes_sense_is_accepted(given: dict[str, object]) -> None:
    Config.model_validate(given)


@pytest.mark.parametrize(
    ("name", "betas", "eps", "weight_decay"),
    [
        ("adamw", (0.9, 0.999), 1e-8, 0.01),
        ("adam", (0.9, 0.999), 1e-8, 0.0),
        ("sgd", (0.9, 0.999), 1e-8, 0.0),
        ("adagrad", (0.9, 0.999), 1e-10, 0.0),
        ("lion", (0.9, 0.99), 1e-8, 0.0),
    ],
)
def test_each_optimizer_has_the_defaults_of_its_library(
    name: str, betas: tuple[float, float], eps: float, weight_decay: float
) -> None:
    optimizer = Config.model_validate({"optimizer": name}).optimizer
    assert (optimizer.betas, optimizer.eps, optimizer.weight_decay) == (betas, eps, weight_decay)
