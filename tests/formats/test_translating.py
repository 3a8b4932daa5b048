from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unishard import ConfigError, Topology
from unishard.config.nested import Native, flat
from unishard.contract import registry
from unishard.contract.entries import Entry, Key, KeyEffect, interpret
from unishard.contract.key_rows import boolean, drops, integer, number, own, refuses, sets
from unishard.contract.render import RenderedDocument, render
from unishard.contract.rules import Fit, Rule, When
from unishard.formats import Item, Outcome, catalog, translate
from unishard.formats.files.source import Source, open_source
from unishard.formats.markers import Markers
from unishard.formats.reading.document import ReadDocument, assemble

SCRIPT = "batch_size of the script"


def _both(value: Any, given: Any) -> KeyEffect:
    return KeyEffect(Fit.IGNORED, "time alone", {"training.seed": value}, {"deepspeed.bucket": value})


class Toy:
    """A format of a tool that nobody has."""

    name = "toy"
    tool = "Toy 1.0"
    suffix = ".json"
    engine = ""
    keys: Mapping[str, Key] = {
        "engine": sets("backend", str),
        "batch": sets("training.micro_batch_size", integer(1), auto=SCRIPT),
        "seed": sets("training.seed", integer(0), Fit.APPROXIMATE, "another generator"),
        "clip": sets("training.gradient_clipping", number(0), tool_default=1.0),
        "log": drops("logs alone"),
        "magic": refuses("cannot be had; remove it", off=lambda value: not boolean(value)),
        "group.size": own(
            "deepspeed.zero_optimization.sub_group_size", integer(1), Fit.APPROXIMATE, "only DeepSpeed has it"
        ),
        "both": Key(_both),
    }
    rules: Mapping[str, Rule] = {
        "backend": Rule(Fit.EXACT, "engine", to=lambda cfg, topology: {"engine": cfg.backend}),
        "training.micro_batch_size": Rule(
            Fit.EXACT, "batch", to=lambda cfg, topology: {"batch": cfg.training.micro_batch_size}, auto=True
        ),
        "training.gradient_clipping": Rule(
            Fit.EXACT,
            "clip",
            to=lambda cfg, topology: {"clip": cfg.training.gradient_clipping},
            when=(When("2", lambda cfg: cfg.training.gradient_clipping == 2, Fit.UNSUPPORTED, "never 2; write 3"),),
        ),
        "training.seed": Rule(Fit.NEEDS_INPUT, "your training script", "call torch.manual_seed"),
    }
    held = True

    def read(self, source: Source, overrides: Iterable[str] = (), topology: Topology | None = None) -> ReadDocument:
        entries = interpret(self.keys, source.data, tool=self.tool, ignores_unknown=lambda key: key.startswith("x"))
        return assemble(self.name, source, entries, overrides=overrides, topology=topology)

    def ranks(self, source: Source) -> Topology | None:
        return None

    def write(self, reading: ReadDocument, topology: Topology) -> RenderedDocument:
        document, words = render(self.rules, reading.config, topology, set(reading.undecided))
        return RenderedDocument(
            document | (reading.config.native.get(reading.config.backend, {}) if self.held else {}), words
        )

    def render(self, document: Native, reading: ReadDocument) -> str:
        return str(document)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Toy:
    one, twin, known = Toy(), Toy(), catalog.get
    twin.name = "twin"
    monkeypatch.setattr(catalog, "get", lambda name: {"toy": one, "twin": twin}.get(name) or known(name))
    return one


def item(outcome: Outcome, key: str) -> Item:
    (found,) = [one for one in outcome.items if one.key == key]
    return found


@pytest.mark.usefixtures("toy")
def test_each_key_is_one_line_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "toy.json"
    path.write_text('{"batch": 4,\n "seed": 1,\n "log": true,\n "magic": true,\n\n "group":\n {"size": 5}}')
    outcome = translate(path, "toy", from_="toy")
    assert [(one.key, one.line, one.assumed) for one in outcome.items] == [
        ("batch", 1, False),
        ("seed", 2, False),
        ("log", 3, False),
        ("magic", 4, False),
        ("group.size", 7, False),
        ("clip", None, True),
    ]
    assert outcome.status(strict=False) == 1
    assert [one.key for one in outcome.of(Fit.UNSUPPORTED)] == ["magic"]


@pytest.mark.usefixtures("toy")
def test_the_worse_of_what_a_key_means_and_what_is_made_of_it_counts() -> None:
    outcome = translate({"seed": 1, "batch": 2, "clip": 2}, "twin", from_="toy")
    assert (item(outcome, "seed").fit, item(outcome, "seed").note) == (
        Fit.NEEDS_INPUT,
        "another generator; call torch.manual_seed",
    )
    assert item(outcome, "batch").fit is Fit.EXACT
    assert (item(outcome, "clip").fit, item(outcome, "clip").note) == (Fit.UNSUPPORTED, "never 2; write 3")


@pytest.mark.usefixtures("toy")
def test_strict_makes_an_approximation_an_error() -> None:
    outcome = translate({"seed": 1}, "unishard", from_="toy")
    assert (outcome.status(strict=False), outcome.status(strict=True)) == (0, 2)


@pytest.mark.usefixtures("toy")
def test_what_concerns_the_tool_alone_is_kept_in_its_own_format_and_dropped_elsewhere() -> None:
    data = {"log": {"every": 5}, "xyz": 1, "magic": False, "batch": 2}
    same, other = translate(data, "toy", from_="toy"), translate(data, "unishard", from_="toy")
    assert {key: same.document[key] for key in data} == data
    assert {item(same, key).fit for key in ("log", "xyz", "magic")} == {Fit.EXACT}
    assert {item(other, key).fit for key in ("log", "xyz", "magic")} == {Fit.IGNORED}
    assert "log" not in other.document


@pytest.mark.usefixtures("toy")
def test_a_setting_of_one_engine_is_exact_where_that_engine_runs_and_the_document_holds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = {"engine": "deepspeed", "group": {"size": 5}}
    here = item(translate(data, "twin", from_="toy"), "group.size")
    assert (here.fit, here.becomes) == (Fit.EXACT, "zero_optimization.sub_group_size")
    ours = translate(data, "unishard", from_="toy")
    assert item(ours, "group.size").becomes == "native.deepspeed.zero_optimization.sub_group_size"
    assert ours.document["native"] == {"deepspeed": {"zero_optimization": {"sub_group_size": 5}}}
    switched = item(translate(data, "toy", from_="toy", overrides=["backend=fsdp"]), "group.size")
    assert (switched.fit, switched.note) == (Fit.APPROXIMATE, "only DeepSpeed has it")
    monkeypatch.setattr(Toy, "held", False)
    assert item(translate(data, "twin", from_="toy"), "group.size").fit is Fit.APPROXIMATE


@pytest.mark.usefixtures("toy")
def test_a_key_may_say_a_field_and_a_setting_of_one_engine() -> None:
    here = item(translate({"engine": "deepspeed", "both": 3}, "unishard", from_="toy"), "both")
    assert (here.fit, here.becomes) == (Fit.EXACT, "training.seed, native.deepspeed.bucket")
    other = item(translate({"engine": "fsdp", "both": 3}, "unishard", from_="toy"), "both")
    assert (other.fit, other.note) == (Fit.IGNORED, "time alone")


@pytest.mark.usefixtures("toy")
def test_what_the_script_decides_is_named_until_an_override_decides_it() -> None:
    outcome = translate({"batch": "auto"}, "unishard", from_="toy")
    assert item(outcome, "batch").fit is Fit.NEEDS_INPUT
    assert (
        "${training.micro_batch_size}  # needs your decision: the value comes from batch_size of the script"
        in outcome.text
    )
    decided = translate({"batch": "auto"}, "unishard", from_="toy", overrides=["training.micro_batch_size=3"])
    assert (item(decided, "batch").fit, decided.document["training"]["micro_batch_size"]) == (Fit.EXACT, 3)
    assert translate({"batch": "auto"}, "toy", from_="toy").document["batch"] == "auto"


@pytest.mark.usefixtures("toy")
def test_overrides_may_come_from_a_generator() -> None:
    outcome = translate(
        {"clip": 2}, "toy", from_="toy", overrides=(text for text in ["training.gradient_clipping=3.0"])
    )
    assert outcome.document["clip"] == 3.0


@pytest.mark.usefixtures("toy")
def test_an_engine_that_nobody_offers() -> None:
    with pytest.raises(ConfigError, match="backend: no backend named 'zzz'; installed: "):
        translate({"engine": "zzz"}, "unishard", from_="toy")


def test_formats_that_there_are_not() -> None:
    with pytest.raises(ConfigError, match="no format named 'deepsped'; did you mean 'deepspeed'"):
        translate({}, "deepsped")
    with pytest.raises(ConfigError, match="no format named 'x'; installed: accelerate, deepspeed"):
        translate({}, "unishard", from_="x")


def test_a_file_that_is_open_already(toy: Toy) -> None:
    source = open_source({"log": 1})
    assert translate(source, "toy", from_="toy").reading.source is source
    assert isinstance(toy.read(source).entries[0], Entry)


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ({"sharding": "full_shard"}, "unishard"),
        ({"optimizer": {"name": "sgd", "lr": 0.1}}, "unishard"),
        ({"training": {"micro_batch_size": 2}, "optimizer": {"lr": 1}}, "unishard"),
        ({"zero_optimization": {"stage": 2}}, "deepspeed"),
        ({"optimizer": {"type": "Adam", "params": {"lr": 1}}}, "deepspeed"),
        ({"fp16": {"enabled": True}}, "deepspeed"),
    ],
)
def test_recognised(data: dict[str, Any], name: str) -> None:
    assert catalog.recognise(open_source(data)).name == name
    assert catalog.loudest(open_source(data))[0] == name


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (
            {},
            r"matches no known format \(its keys: none\); name one with `unishard translate --from`: accelerate, "
            r"deepspeed",
        ),
        ({"a": 1, "b": 2}, r"matches no known format \(its keys: a, b\)"),
        ({"model": 1}, "matches no known format"),
    ],
)
def test_not_recognised(data: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        catalog.recognise(open_source(data))


def test_a_format_of_anyone_is_found_and_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = SimpleNamespace(name="toy", markers=Markers({"toy.box": 3}))
    monkeypatch.setattr(catalog, "NAMES", (*catalog.NAMES, "toy"))
    known = registry.load
    monkeypatch.setattr(
        registry,
        "load",
        lambda group, name: theirs if (group, name) == ("unishard.formats", "toy") else known(group, name),
    )
    assert catalog.recognise(open_source({"toy": {"box": 1}, "optimizer": {}})).name == "toy"


def test_short_forms_placeholders_and_empty_sections_of_our_own_files() -> None:
    data = {
        "offload": "cpu",
        "precision": {},
        "training": {"micro_batch_size": "${training.micro_batch_size}"},
        "scheduler": {"total_steps": "${scheduler.total_steps}"},
        "native": {"fsdp": {"x": {"y": 1}}},
    }
    outcome = translate(data, "unishard")
    written = {one.key: one for one in outcome.items if not one.assumed}
    assert set(written) == {
        "offload.params",
        "offload.optimizer",
        "precision",
        "training.micro_batch_size",
        "scheduler.total_steps",
        "native.fsdp.x.y",
    }
    assert written["offload.params"].becomes == "offload.params"
    assert written["precision"].note == "is empty"
    assert outcome.document["scheduler"] == {"total_steps": "${scheduler.total_steps}"}
    again = translate(outcome.document, "unishard", from_="unishard")
    assert (again.document, again.text) == (outcome.document, outcome.text)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        ({"sharding.strategy": "full_shard"}, "sharding.strategy: is a dotted name"),
        (
            {"sharding": "full_shard", "training": {"seed": "${training.seeed}"}},
            "training.seed: holds|training.seed: must be",
        ),
        ({"sharding": []}, r"sharding\.strategy: must be one of"),
        ({"native": 3}, "native: must be a mapping"),
    ],
)
def test_mistakes_in_our_own_files(data: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        translate(data, "unishard", from_="unishard")


@pytest.mark.parametrize(
    ("name", "document", "override", "key", "value"),
    [
        (
            "deepspeed",
            {"zero_optimization": {"stage": 3}},
            "sharding.strategy=shard_grad_op",
            "zero_optimization.stage",
            2,
        ),
        ("hf", {"output_dir": "o", "learning_rate": 1e-5}, "optimizer.lr=0.1", "learning_rate", 0.1),
        ("accelerate", {"distributed_type": "NO"}, "precision.compute=bf16", "mixed_precision", "bf16"),
    ],
)
def test_an_override_holds_in_a_file_of_the_same_tool(
    name: str, document: dict[str, Any], override: str, key: str, value: Any
) -> None:
    assert dict(flat(translate(document, name, from_=name, overrides=[override]).document))[key] == value


def test_a_file_of_the_same_tool_leaves_its_defaults_out() -> None:
    arguments = {"output_dir": "o", "per_device_train_batch_size": 2, "learning_rate": 1e-5}
    outcome = translate(arguments, "hf", from_="hf")
    assert outcome.document.items() >= arguments.items()
    assert not {"adam_beta1", "seed", "max_grad_norm", "num_train_epochs"} & outcome.document.keys()


@pytest.mark.parametrize("value", [True, False])
def test_a_key_that_its_tool_has_renamed_is_not_written_under_both_names(value: bool) -> None:
    zero = {"stage": 3, "stage3_gather_fp16_weights_on_model_save": value}
    document = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    written = translate(document, "deepspeed", from_="deepspeed").document["zero_optimization"]
    assert {key: kept for key, kept in written.items() if key.endswith("_weights_on_model_save")} == {
        "stage3_gather_fp16_weights_on_model_save": value
    }
