"""Which parameters a config puts into which group."""

from __future__ import annotations

from typing import Any

import pytest

from unishard.config import Optimizer
from unishard.contract.kit.parameter_groups import NamedGroup, groups_of, without_match
from unishard.errors import ConfigError

NAMES = (
    "embed.weight",
    "layers.0.up.weight",
    "layers.0.up.bias",
    "layers.0.norm.weight",
    "layers.10.up.weight",
    "head.weight",
)


def groups(**fields: Any) -> list[NamedGroup]:
    return groups_of(Optimizer.model_validate({"lr": 1.0, "weight_decay": 0.5, **fields}), NAMES, ("frozen.bias",))


def test_without_patterns_there_is_one() -> None:
    assert groups() == [NamedGroup(NAMES, 1.0, 0.5)]


def test_no_decay() -> None:
    exempt = ("layers.0.up.bias", "layers.0.norm.weight")
    assert groups(no_decay=["bias", r"norm\.weight$"]) == [
        NamedGroup(tuple(name for name in NAMES if name not in exempt), 1.0, 0.5),
        NamedGroup(exempt, 1.0, 0.0),
    ]


def test_what_no_section_takes_comes_first_and_the_first_section_that_matches_takes() -> None:
    assert groups(groups=[{"params": [r"layers\.0\."], "lr": 0.1}, {"params": ["up"], "weight_decay": 0.25}]) == [
        NamedGroup(("embed.weight", "head.weight"), 1.0, 0.5),
        NamedGroup(("layers.0.up.weight", "layers.0.up.bias", "layers.0.norm.weight"), 0.1, 0.5),
        NamedGroup(("layers.10.up.weight",), 1.0, 0.25),
    ]


def test_a_section_is_split_by_no_decay_unless_it_states_a_weight_decay() -> None:
    both = groups(no_decay=["bias", "norm"], groups=[{"params": [r"layers\.0"], "lr": 0.1}])
    assert both[1:] == [
        NamedGroup(("layers.0.up.weight",), 0.1, 0.5),
        NamedGroup(("layers.0.up.bias", "layers.0.norm.weight"), 0.1, 0.0),
    ]
    stated = groups(no_decay=["bias", "norm"], groups=[{"params": [r"layers\.0"], "weight_decay": 0.1}])
    assert {(name, group.weight_decay) for group in stated[1:] for name in group.names} == {
        (name, 0.1) for name in NAMES[1:4]
    }


def test_everything_may_be_in_sections() -> None:
    assert groups(groups=[{"params": ["."], "lr": 0.1}]) == [NamedGroup(NAMES, 0.1, 0.5)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"no_decay": ["layernorm"]},
            "optimizer.no_decay: 'layernorm' matches no parameter; write part of a name, such as embed.weight, "
            "layers.0.up.weight, layers.0.up.bias, layers.0.norm.weight, head.weight",
        ),
        (
            {"groups": [{"params": ["embed"], "lr": 0.1}, {"params": ["head", "Head"], "lr": 0.1}]},
            "optimizer.groups[1].params: 'Head' matches no parameter",
        ),
        (
            {"groups": [{"params": ["frozen"], "lr": 0.1}]},
            "optimizer.groups[0].params: 'frozen' matches only frozen parameters; remove it, or call requires_grad_(True) on "
            "them",
        ),
        (
            {"groups": [{"params": ["weight"], "lr": 0.1}, {"params": ["head"], "lr": 0.1}]},
            "optimizer.groups[1].params: matches only parameters of earlier sections; move this section up",
        ),
    ],
    ids=["no match", "no match in a section", "frozen", "taken"],
)
def test_a_pattern_without_effect_is_an_error(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        groups(**fields)
    assert str(caught.value).startswith(message)


def test_all_patterns_without_a_match_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        groups(no_decay=["xx", "yy"], groups=[{"params": ["zz"], "lr": 0.1}])
    assert [problem.what.split()[0] for problem in caught.value.problems] == ["'xx'", "'yy'", "'zz'"]


def test_a_pattern_of_no_decay_without_a_match_is_not_an_error_beside_others() -> None:
    cfg = Optimizer.model_validate({"lr": 1.0, "weight_decay": 0.5, "no_decay": ["bias", "layernorm"]})
    assert groups_of(cfg, NAMES)[1] == NamedGroup(("layers.0.up.bias",), 1.0, 0.0)
    assert [problem.what.partition(";")[0] for problem in without_match(cfg, NAMES)] == [
        "'layernorm' matches no parameter"
    ]


def test_what_only_frozen_parameters_match_is_no_error_in_no_decay() -> None:
    """As in a recipe of the whole model, with LoRA."""
    cfg = Optimizer.model_validate({"lr": 1.0, "weight_decay": 0.5, "no_decay": ["norm"]})
    adapters, frozen = ["0.lora_A.weight"], ["0.norm.weight"]
    assert groups_of(cfg, adapters, frozen) == [NamedGroup(tuple(adapters), 1.0, 0.5)]
    (note,) = without_match(cfg, adapters, frozen)
    assert note.what.startswith("'norm' matches only frozen parameters")
