"""Laws of the formats that hold TrainingArguments: what they say exactly comes back, and what they wrote once they
write again."""

from __future__ import annotations

from typing import Any

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unishard import ConfigError
from unishard.config import Config, leaves, value_at
from unishard.config.topology import Topology
from unishard.contract.rules import Fit
from unishard.formats import catalog, translate
from unishard.formats.hf.optimizing import NO_DECAY
from unishard.formats.hf.sharding import BOTH, FIRST

MANY = 60
RANKS = Topology(world_size=8, local_world_size=4)

# Fields that a file of another tool has no place for, and that its tool has in one way only.
ELSEWHERE = (
    "strict",
    "native",
    "training.global_batch_size",
    "training.nonfinite",
    "training.last_window",
    "communication.desync",
)

RATES = st.sampled_from([1e-5, 3e-4, 0.002, 5e-05, 1.0])


def _some(draw: Any, fields: dict[str, Any]) -> dict[str, Any]:
    return {name: draw(values) for name, values in fields.items() if draw(st.booleans())}


@st.composite
def configs(draw: Any) -> dict[str, Any]:
    """Configs as people write them; what the schema refuses is filtered out by the test."""
    strategies = ["no_shard", "shard_optimizer", "shard_grad_op", "full_shard", "hybrid_shard"]
    config: dict[str, Any] = {"backend": draw(st.sampled_from(["fsdp", "deepspeed"]))}
    strategy = draw(st.sampled_from(strategies))
    config["sharding"] = {"strategy": strategy}
    if strategy == "full_shard":
        config["sharding"] |= _some(draw, {"reshard_after_forward": st.booleans()})
    if strategy == "hybrid_shard":
        config["sharding"]["group_size"] = draw(st.sampled_from([2, 4]))
    if strategy != "no_shard":
        config["sharding"] |= _some(draw, {"units": st.sampled_from([["LlamaDecoderLayer"], ["A", "B"], "auto"])})
        config["offload"] = _some(draw, {"optimizer": st.just("cpu")})
    config["precision"] = _some(
        draw, {"compute": st.sampled_from(["bf16", "fp16", "fp32"]), "reduce": st.sampled_from(["bf16", "fp32"])}
    )
    config["activation_checkpointing"] = draw(st.sampled_from(["none", "full", "selective"]))
    config["training"] = _some(
        draw,
        {
            "micro_batch_size": st.integers(1, 64),
            "gradient_accumulation_steps": st.integers(1, 9),
            "gradient_clipping": st.sampled_from([None, 0.5, 1.0, 3.0]),
            "seed": st.integers(0, 2**32 - 1),
        },
    )
    config["optimizer"] = _optimizer(draw)
    config["scheduler"] = _scheduler(draw)
    config["compile"] = draw(st.sampled_from([{}, {"mode": "full"}, {"mode": "full", "backend": "aot_eager"}]))
    return config


def _idle(path: str) -> bool:
    """Whether a field that nobody wrote may stand for nothing."""
    return path.startswith(("sharding.", "offload.", "precision.", "communication.", "compile."))


def _optimizer(draw: Any) -> dict[str, Any]:
    name = draw(st.sampled_from(["adamw", "sgd", "adagrad", "lion"]))
    decay = draw(st.sampled_from([0.0, 0.1]))
    optimizer = {"name": name, "lr": draw(RATES), "weight_decay": decay, **({"no_decay": [NO_DECAY]} if decay else {})}
    if name in ("adamw", "lion"):
        optimizer |= _some(draw, {"betas": st.sampled_from([[0.9, 0.95], [0.8, 0.99]])})
    if name in ("adamw", "adagrad"):
        optimizer |= _some(draw, {"eps": st.sampled_from([1e-6, 1e-12])})
    if name == "sgd":
        optimizer |= draw(st.sampled_from([{}, {"momentum": 0.9}, {"momentum": 0.5, "nesterov": True}]))
    return optimizer


def _scheduler(draw: Any) -> dict[str, Any]:
    name = draw(st.sampled_from(["constant", "linear", "cosine", "inverse_sqrt"]))
    scheduler: dict[str, Any] = {"name": name, "warmup_steps": draw(st.sampled_from([0, 1, 10]))}
    if name in ("linear", "cosine"):
        scheduler |= {
            "total_steps": draw(st.integers(11, 5000)),
            "min_lr_ratio": draw(st.sampled_from([0.0, 0.1, 0.25])),
        }
    return scheduler


@settings(max_examples=MANY, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(data=configs())
def test_what_is_said_exactly_comes_back(data: dict[str, Any]) -> None:
    try:
        config = Config.model_validate(data)
    except ConfigError:
        return
    there = translate(data, "hf", from_="unishard", topology=RANKS)
    back = translate(yaml.safe_load(there.text), "unishard", from_="hf", topology=RANKS)
    again = Config.model_validate(back.document)
    exact = {item.key for item in there.items if item.fit is Fit.EXACT and not (item.assumed and _idle(item.key))}
    exact -= {"sharding.units"} if config.backend == "deepspeed" else set()  # named only where parameters are sharded
    kept = [path for path, _ in leaves(Config) if path in exact and not path.startswith(ELSEWHERE)]
    assert {path: value_at(again, path) for path in kept} == {path: value_at(config, path) for path in kept}
    assert {"optimizer.lr", "training.micro_batch_size", "scheduler.name", "backend"} <= set(kept)


@settings(
    max_examples=MANY // 2, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)
@given(data=configs())
def test_translating_twice_changes_nothing(data: dict[str, Any]) -> None:
    try:
        Config.model_validate(data)
    except ConfigError:
        return
    once = translate(data, "hf", from_="unishard", topology=RANKS)
    twice = translate(yaml.safe_load(once.text), "hf", from_="hf", topology=RANKS)
    assert twice.document == translate(twice.document, "hf", from_="hf", topology=RANKS).document
    assert not twice.of(Fit.UNSUPPORTED)


WORDS = ["", "auto", "true", "1e-5", "x" * 9, "a=b", "${V}", "no_such_file.json", '{"a": 1}', "{"]
NUMBERS = [0, -1, 1, 2, 0.5, 1e-5, float("inf"), float("nan"), 2**70]
NESTED = [[], [1], ["full_shard"], {}, {"a": 1}, {"": None}, {"version": 1}, {"stage": 3}, {"min_lr": "x"}]
ODD = st.sampled_from([None, True, False, *WORDS, *NUMBERS, *NESTED])


@settings(max_examples=MANY // 2, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_whatever_is_written_gets_one_place_for_each_key(data: st.DataObject) -> None:
    engines = [
        "fsdp",
        "fsdp_config",
        "deepspeed",
        "lr_scheduler_kwargs",
        "gradient_checkpointing_kwargs",
    ]
    keys = st.sampled_from([*engines, *catalog.get("hf").keys, "unheard_of"])
    inner = st.dictionaries(
        st.sampled_from([*BOTH, *FIRST, "fsdp_version", "offload_params", "zero_optimization", "optimizer"]),
        ODD,
        max_size=4,
    )
    document = data.draw(st.dictionaries(keys, ODD | inner, min_size=1, max_size=7))
    outcome = translate(document, "unishard", from_="hf")
    places = [item.key for item in outcome.items if not item.assumed]
    assert len(places) == len(set(places))
    assert {place.partition(".")[0] for place in places} == set(document)
    translate(document, "hf", from_="hf")
