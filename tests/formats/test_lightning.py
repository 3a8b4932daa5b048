"""Lightning's arguments say what Lightning would do, and are written so that they can be read back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from accounting import faults_of
from hypothesis import given, settings
from hypothesis import strategies as st

from unishard.config import Config, leaves, value_at
from unishard.config.topology import Topology
from unishard.contract.rules import Fit
from unishard.formats import translating
from unishard.formats.items import Item
from unishard.formats.lightning import FORMAT
from unishard.formats.reading import ReadDocument
from unishard.formats.translating import Outcome


def read(document: dict[str, Any], *overrides: str) -> ReadDocument:
    return translating.read(document, "lightning", overrides)


def config(document: dict[str, Any]) -> Config:
    return read(document).config


def item(document: dict[str, Any], key: str, to: str = "unishard") -> Item:
    outcome = translating.translate(document, to, from_="lightning")
    return next(item for item in outcome.items if item.key == key)


def built(name: str, *, package: str = "lightning.pytorch.strategies", **arguments: Any) -> dict[str, Any]:
    return {"class_path": f"{package}.{name}", "init_args": arguments}


# DeepSpeedStrategy.


def test_a_config_in_a_file_is_read_beside_the_document(tmp_path: Any) -> None:
    (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    path = tmp_path / "lightning.yaml"
    path.write_text("strategy:\n  class_path: DeepSpeedStrategy\n  init_args: {config: zero.json}\n")
    assert translating.read(path).config.sharding.strategy == "shard_optimizer"
    (tmp_path / "zero.json").unlink()
    refused = translating.translate(path, "unishard").of(Fit.UNSUPPORTED)
    assert [found.key for found in refused] == ["strategy.init_args.config"]
    assert "put the file beside" in refused[0].note


# Laws.


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.floats(allow_nan=True)
    | st.sampled_from(("", "auto", "fsdp", "a.b.C", "16-true"))
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(("class_path", "init_args", "x")), inner)
    ),
)
names = st.sampled_from(
    [name for name in FORMAT.keys if "." not in name]
    + [
        "stage",
        "config",
        "device_mesh",
        "auto_wrap_policy",
        "mixed_precision",
        "offload_optimizer",
        "cpu_offload",
        "optimizer",
        "lr_scheduler",
    ]
)
strategies = st.sampled_from(["ddp", "fsdp", "deepspeed"]) | st.builds(
    lambda name, arguments: built(name, **arguments),
    st.sampled_from(["FSDPStrategy", "DeepSpeedStrategy", "DDPStrategy", "ModelParallelStrategy"]),
    st.dictionaries(names, values, max_size=4),
)


def _flat(value: Any, path: tuple[str, ...] = ()) -> list[str]:
    if isinstance(value, dict) and value:
        return [key for name, inner in value.items() for key in _flat(inner, (*path, name))]
    return [".".join(path)]


@settings(max_examples=200, deadline=None)
@given(strategies | values, st.dictionaries(names, values, max_size=5), st.booleans())
def test_whatever_stands_in_a_file_every_key_is_accounted_for(
    strategy: Any, arguments: dict[str, Any], cli: bool
) -> None:
    inner = {**arguments, "strategy": strategy}
    document = {"trainer": inner} if cli else inner
    for to in ("unishard", "lightning"):
        outcome = translating.translate(document, to, from_="lightning")
        keys = [item.key for item in outcome.items if not item.assumed]
        assert len(keys) == len(set(keys))
        for leaf in _flat(document):
            assert any(leaf == key or leaf.startswith(f"{key}.") or key.startswith(f"{leaf}.") for key in keys), leaf


def test_an_argument_that_goes_into_a_block_that_is_off_has_a_line() -> None:
    arguments = {"stage": 2, "partition_activations": False, "cpu_checkpointing": False}
    document = {"strategy": {"_target_": "lightning.pytorch.strategies.DeepSpeedStrategy", **arguments}}
    outcome = translating.translate(document, "unishard", from_="lightning")
    assert not faults_of(outcome)
    assert {item.key for item in outcome.items} >= {f"strategy.{name}" for name in arguments}


sections = st.fixed_dictionaries(
    {},
    optional={
        "precision": st.sampled_from(
            [
                "fp32",
                "bf16",
                "fp16",
                {"compute": "bf16", "reduce": "bf16", "buffers": "bf16"},
                {"compute": "bf16", "master": "bf16"},
                {"compute": "fp16", "initial_loss_scale": 1024.0, "loss_scale_growth_interval": 50},
                {"compute": "fp16", "master": "fp16", "loss_scale": 1.0},
            ]
        ),
        "training": st.fixed_dictionaries(
            {},
            optional={
                "gradient_accumulation_steps": st.integers(1, 64),
                "gradient_clipping": st.none() | st.floats(1e-3, 100),
                "seed": st.integers(0, 2**32 - 1),
            },
        ),
        "optimizer": st.fixed_dictionaries(
            {"name": st.sampled_from(("adamw", "adam", "sgd", "adagrad", "lion"))},
            optional={"lr": st.floats(1e-6, 1.0), "weight_decay": st.floats(0, 1)},
        ),
    },
)
shardings = st.sampled_from(
    [
        {"strategy": "no_shard"},
        {"strategy": "full_shard"},
        {"strategy": "full_shard", "reshard_after_forward": False, "units": ["Block", "Head"]},
        {"strategy": "full_shard", "min_unit_params": 1000},
        {"strategy": "hybrid_shard", "group_size": 4, "units": ["Block"]},
        {"strategy": "hybrid_shard", "reshard_after_forward": False, "units": ["Block"]},
    ]
)
BY_SCRIPT = ("your training script", "your LightningModule", "none", "")


@settings(max_examples=150, deadline=None)
@given(shardings, sections, st.booleans(), st.sampled_from(("none", "cpu")), st.sampled_from(("none", ["Block"])))
def test_what_lightning_can_say_comes_back_the_same(
    sharding: dict[str, Any], rest: dict[str, Any], deepspeed: bool, offload: str, recomputed: Any
) -> None:
    sharded = sharding["strategy"] != "no_shard"
    said = {
        "sharding": sharding,
        **rest,
        **({"activation_checkpointing": recomputed} if sharded and not deepspeed else {}),
    }
    if sharded and sharding["strategy"] != "hybrid_shard":
        said["offload"] = offload
    if deepspeed:
        said |= {"backend": "deepspeed", "sharding": {"strategy": "full_shard" if sharded else "no_shard"}}
    ranks = Topology(world_size=8, local_world_size=4)
    reading = translating.read(said, "unishard")
    words = FORMAT.write(reading, ranks).fields
    outcome = translating.translate(said, "lightning", topology=ranks)
    compile(outcome.text, "snippet", "exec")
    again = translating.read(outcome.document, "lightning")
    for path, word in words.items():
        if path in ("launch.nodes", "launch.processes_per_node"):
            assert (
                value_at(again.config, path) == {"nodes": 2, "processes_per_node": 4}[path.removeprefix("launch.")]
            ), "as asked for"
        elif word.fit in (Fit.EXACT, Fit.EQUIVALENT) and word.key not in BY_SCRIPT:
            assert value_at(again.config, path) == value_at(reading.config, path), path


@settings(max_examples=60, deadline=None)
@given(strategies, st.sampled_from(("32-true", "bf16-mixed", "16-true")), st.booleans())
def test_writing_lightning_again_changes_nothing(strategy: Any, precision: str, cli: bool) -> None:
    inner = {"strategy": strategy, "precision": precision, "logger": False, "max_steps": 10}
    once = _again({"trainer": inner} if cli else inner)
    twice = _again(once.document)
    assert twice.document == once.document


def _again(document: Any) -> Outcome:
    return translating.translate(document, "lightning", from_="lightning")


def test_every_leaf_of_the_schema_has_a_row_in_order() -> None:
    assert list(FORMAT.rules) == [path for path, _ in leaves(Config)]


def test_a_backend_that_lightning_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = read({"strategy": "fsdp"})
    other = reading._replace(config=reading.config.model_copy(update={"backend": "third"}))
    found = FORMAT.write(other, Topology())
    assert found.document == {}
    assert found.fields["backend"].fit is Fit.UNSUPPORTED
    assert FORMAT.render(found.document, other).startswith("# Lightning has no strategy")


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
