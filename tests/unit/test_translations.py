"""What a config becomes on each engine, what the report says of it, and what is refused: the cases of
translations.yaml."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

import unishard
from unishard import ConfigError, Topology
from unishard.config.nested import flat
from unishard.errors import TranslationError
from unishard.testing.cells import BACKENDS, STRATEGIES

CASES = YAML(typ="safe", pure=True).load(Path(__file__).with_name("translations.yaml"))
OF = [
    (backend, case)
    for case in CASES
    for backend in BACKENDS
    if any(backend in part for part in (case, *(case.get(name, {}) for name in ("fits", "refused", "approximate"))))
]
PRECISIONS = ["fp32", "bf16", {"compute": "bf16", "reduce": "bf16"}, "fp16"]


def translate(backend: str, config: dict[str, Any], ranks: tuple[int, int] = (2, 2)) -> unishard.Translation:
    return unishard.translate(unishard.load(config), backend=backend, topology=Topology(ranks[0], ranks[1]))


def told(error: BaseException, outcome: str) -> bool:
    return re.search("(?s:.*)".join(map(re.escape, outcome.split("..."))), str(error)) is not None


@pytest.mark.parametrize(
    ("backend", "case"), OF, ids=lambda each: each if isinstance(each, str) else str(each["config"])
)
def test_case(backend: str, case: dict[str, Any]) -> None:
    given = case["config"], tuple(case.get("ranks", (2, 2)))
    refused, approximate = (case.get(kind, {}).get(backend) for kind in ("refused", "approximate"))
    if refused:
        with pytest.raises((ConfigError, TranslationError)) as caught:
            translate(backend, *given).check(strict=False)
        assert told(caught.value, refused), caught.value
        return
    translation = translate(backend, *given).check(strict=not approximate)
    if approximate:
        with pytest.raises(TranslationError) as caught:
            translation.check(strict=True)
        assert told(caught.value, approximate), caught.value
    native = dict(flat(translation.native)) | {"engine": translation.engine}
    wanted = case.get(backend, {})
    assert {name: native.get(name) for name in wanted} == wanted
    fits = {line.path: str(line.fit) for line in translation.report}
    said = case.get("fits", {}).get(backend, {})
    assert {name: fits[name] for name in said} == said


@pytest.mark.parametrize("backend", BACKENDS)
def test_by_default_nothing_is_approximate(backend: str) -> None:
    for strategy, precision, overlap in product(STRATEGIES, PRECISIONS, (True, False)):
        translate(backend, {"sharding": strategy, "precision": precision, "communication": {"overlap": overlap}}).check(
            strict=True
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_settings_of_another_backend_are_left_to_it(backend: str) -> None:
    other = BACKENDS[1 - BACKENDS.index(backend)]
    assert translate(backend, {"native": {other: {"anything": 1}}}).native == translate(backend, {}).native


NODES = (8, 4)


@pytest.mark.parametrize(
    ("strategy", "within"), [("hybrid_shard", "full_shard"), ("hybrid_shard_grad_op", "shard_grad_op")]
)
def test_a_hybrid_strategy_is_the_plain_one_within_a_group(strategy: str, within: str) -> None:
    grouped = translate("deepspeed", {"sharding": {"strategy": strategy, "group_size": 2}}, NODES)
    assert grouped.native == translate("deepspeed", {"sharding": within}).native
    assert "MiCS" in next(line.note for line in grouped.report if line.path == "sharding.strategy")
    for reduce, averaged in (("fp32", "last_micro_batch"), ("bf16", "every_micro_batch")):
        precision = {"compute": "bf16", "reduce": reduce}
        grouped, plain = (
            translate("fsdp", {"sharding": each, "precision": precision}, NODES).check(strict=True).native
            for each in (strategy, within)
        )
        assert grouped == plain | {"mesh": {"replicate": 2, "shard": 4}, "requires_all_reduce": averaged}
        assert (plain["mesh"], plain["requires_all_reduce"]) == (None, None)
    one = (4, 4)
    assert translate("fsdp", {"sharding": strategy}, one).native == translate("fsdp", {"sharding": within}, one).native
