"""What every backend's table must keep, whatever the config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schema_strategies import documents

import unishard
from unishard import Config, ConfigError, Fit, Topology, TranslationError, translate
from unishard.config import leaves, value_at
from unishard.config.nested import flat, merge, nested
from unishard.contract import registry
from unishard.contract.report import Line, Report, Translation, apply
from unishard.contract.rules import Rule, When

BACKENDS = sorted(registry.available())
LEAVES = [path for path, _ in leaves(Config)]
topologies = st.just(Topology()) | st.builds(
    lambda nodes, local: Topology(world_size=nodes * local, local_world_size=local),
    st.integers(1, 8),
    st.integers(2, 8),
)
"""Those in which the ranks of a node can share one copy."""


@pytest.mark.parametrize("name", BACKENDS)
def test_one_rule_for_each_field_in_the_order_of_the_schema(name: str) -> None:
    assert list(registry.get(name).rules) == LEAVES


@pytest.mark.parametrize("name", BACKENDS)
def test_every_case_says_how_it_differs(name: str) -> None:
    for path, rule in registry.get(name).rules.items():
        assert rule.key, path
        for case in rule.when:
            assert case.case, path
            if case.fit is Fit.UNSUPPORTED:
                assert "; " in case.note, f"{path}: says why, but not what instead"
            if case.fit in (Fit.APPROXIMATE, Fit.EQUIVALENT):
                assert case.note, f"{path}: differs, but does not say how"


@pytest.mark.parametrize("name", BACKENDS)
@given(document=documents(), topology=topologies)
def test_translation(name: str, document: dict[str, Any], topology: Topology) -> None:
    cfg = unishard.load(document)
    first, again = (translate(unishard.load(document), backend=name, topology=topology) for _ in range(2))
    assert first == again, "the same config gives the same native config"
    assert [line.path for line in first.report] == LEAVES, "nothing is dropped in silence"
    assert [line.value for line in first.report] == [value_at(cfg, path) for path in LEAVES]
    assert json.loads(json.dumps(first.native, allow_nan=False)) == _lists(first.native), "plain JSON"
    written = dict(flat(first.native))
    for key in registry.get(name).constants:
        *sections, last = key.split(".")
        place: Any = first.native
        for section in sections:
            place = place.get(section, {})
        if last in place:
            assert place[last] == registry.get(name).constants[key][0], (
                f"{key} is called constant, and a field decides it"
            )
    assert written


@pytest.mark.parametrize("name", BACKENDS)
@given(document=documents(), topology=topologies)
def test_no_native_key_is_decided_by_two_fields(name: str, document: dict[str, Any], topology: Topology) -> None:
    cfg = unishard.load(document)
    owners: dict[str, str] = {}
    for path, rule in registry.get(name).rules.items():
        for key, _ in flat(rule.to(cfg, topology)):
            assert owners.setdefault(key, path) == path, f"{key} is decided by {owners[key]} and by {path}"


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("name", BACKENDS)
@given(document=documents(), topology=topologies)
def test_the_backend_word_changes_nothing_in_a_translation(
    name: str, document: dict[str, Any], topology: Topology
) -> None:
    natives = [
        translate(unishard.load(document | {"backend": word}), backend=name, topology=topology).native
        for word in BACKENDS
    ]
    assert natives[0] == natives[1]


@given(text=st.text(alphabet=" \n\t-:,.[]{}'\"#&*!|>%@`?<=~$_ab1eé\0\x85\u2028"))
def test_any_text_is_a_config_or_a_config_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path: Path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    try:
        unishard.load(path)
    except ConfigError as error:
        message = str(error)
    else:
        message = str(path)
    assert message.startswith(str(path))


def _rules(**rules: Rule) -> dict[str, Rule]:
    return {name.replace("__", "."): rule for name, rule in rules.items()}


def test_fragments_are_merged_and_unsupported_ones_left_out() -> None:
    refused = When("always", lambda cfg: True, Fit.UNSUPPORTED, "cannot; do not")
    rules = _rules(
        training__seed=Rule(Fit.EXACT, "a", to=lambda cfg, topology: {"zero": {"a": 1}}),
        strict=Rule(Fit.EXACT, "b", to=lambda cfg, topology: {"zero": {"b": topology.world_size}}),
        backend=Rule(Fit.EXACT, "c", to=lambda cfg, topology: {"zero": {"c": 1}}, when=(refused,)),
    )
    native, report = apply(rules, Config(), Topology(world_size=3))
    assert native == {"zero": {"a": 1, "b": 3}}
    assert [line.fit for line in report] == [Fit.EXACT, Fit.EXACT, Fit.UNSUPPORTED]


def test_the_first_case_that_holds_counts() -> None:
    rule = Rule(
        Fit.EXACT,
        "x",
        "as it is",
        when=(
            When("strict", lambda cfg: cfg.strict, Fit.APPROXIMATE, "roughly"),
            When("strict again", lambda cfg: cfg.strict, Fit.UNSUPPORTED, "never; do not"),
        ),
    )
    assert rule.outcome("training.seed", Config()) == (Fit.EXACT, "as it is")
    assert rule.outcome("training.seed", Config(strict=True)) == (Fit.APPROXIMATE, "roughly")


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("sharding.group_size", "the strategy has no groups"),
        ("compile.backend", "nothing is compiled"),
        ("compile.mode", ""),
        ("logging.project", "nothing is logged"),
    ],
)
def test_no_row_is_asked_about_a_field_that_decides_nothing(path: str, why: str) -> None:
    assert Rule(Fit.UNSUPPORTED, "x", "never; do not").outcome(path, Config()) == (Fit.EXACT, why)


def test_merge_replaces_everything_but_mappings() -> None:
    base = {"a": {"b": [1], "c": 2}, "d": None}
    assert merge(base, {"a": {"b": [2]}, "d": {"e": 1}}) == {"a": {"b": [2], "c": 2}, "d": {"e": 1}}
    assert base == {"a": {"b": [1], "c": 2}, "d": None}


def test_nested_undoes_flat() -> None:
    native = {"a": {"b": 1, "c": {"d": [1]}}, "e": {}}
    assert list(flat(native)) == [("a.b", 1), ("a.c.d", [1]), ("e", {})]
    assert nested(dict(flat(native))) == native


def _translation(fit: Fit) -> Translation:
    return Translation("toy", "ToyEngine", {}, Report((Line("training.seed", 3, fit, "seed", "why; what instead"),)))


def test_unsupported_is_always_an_error() -> None:
    with pytest.raises(TranslationError, match=r"training\.seed: 3 is not supported by toy: why; what instead"):
        _translation(Fit.UNSUPPORTED).check(strict=False)


def test_approximate_is_an_error_under_strict() -> None:
    translation = _translation(Fit.APPROXIMATE)
    assert translation.check(strict=False) is translation
    with pytest.raises(
        TranslationError, match=r"training\.seed: 3 is only approximate on toy, and strict is true: why; what instead"
    ):
        translation.check(strict=True)


def test_batch_sizes_must_agree() -> None:
    cfg = unishard.load(
        {"training": {"micro_batch_size": 2, "gradient_accumulation_steps": 3, "global_batch_size": 12}}
    )
    assert translate(cfg, topology=Topology(world_size=2)).backend == "fsdp"
    with pytest.raises(ConfigError) as caught:
        translate(cfg, topology=Topology(world_size=4))
    assert str(caught.value) == (
        "training.global_batch_size: is 12, but micro_batch_size 2 x gradient_accumulation_steps 3 x 4 ranks is 24; "
        "write gradient_accumulation_steps: 3 and micro_batch_size: 1, or remove global_batch_size"
    )


def test_a_backend_that_is_not_installed_is_an_error_at_its_field() -> None:
    with pytest.raises(ConfigError) as caught:
        translate(unishard.load({"backend": "deepsped", "native": {"fsdq": {}}}))
    assert str(caught.value).splitlines() == [
        "backend: no backend named 'deepsped'; did you mean 'deepspeed'? installed: deepspeed, fsdp",
        "native.fsdq: no backend named 'fsdq'; did you mean 'fsdp'? installed: deepspeed, fsdp",
    ]


def test_a_path_is_no_config() -> None:
    with pytest.raises(
        ConfigError, match=r"expected a unishard\.Config, got str; load one with unishard\.load\(path\)"
    ):
        translate("configs/llama_tiny.yaml")  # type: ignore[arg-type]
