"""`precision.matmul` and the switches of other tools: what one of them says comes back from the other."""

from __future__ import annotations

from typing import Any

import pytest

from unishard.contract.rules import Fit
from unishard.formats.translating import Outcome, translate


def written(to: str, sections: dict[str, Any]) -> Outcome:
    return translate({"scheduler": {"name": "constant"}, **sections}, to, from_="unishard")


def fit(outcome: Outcome) -> Fit:
    (found,) = [item for item in outcome.items if item.key == "precision.matmul"]
    return found.fit


@pytest.mark.parametrize(
    "sections", [{"backend": "fsdp"}, {"backend": "fsdp", "sharding": "no_shard"}, {"backend": "deepspeed"}]
)
@pytest.mark.parametrize("to", ["hf", "llamafactory", "trl"])
@pytest.mark.parametrize("matmul", ["tf32", "fp32"])
def test_training_arguments_have_a_key_with_and_without_deepspeed(
    to: str, sections: dict[str, Any], matmul: str
) -> None:
    outcome = written(to, {**sections, "precision": {"matmul": matmul}})
    assert outcome.document["tf32"] is (matmul == "tf32")
    assert fit(outcome) in (Fit.EXACT, Fit.EQUIVALENT)
    assert translate(outcome.document, "unishard", from_=to).reading.config.precision.matmul == matmul


@pytest.mark.parametrize("to", ["deepspeed", "accelerate"])
def test_elsewhere_the_training_script_must_say_it(to: str) -> None:
    sections = {"backend": "deepspeed" if to == "deepspeed" else "fsdp"}
    assert fit(written(to, {**sections, "precision": {"matmul": "tf32"}})) is Fit.NEEDS_INPUT
    assert "precision.matmul" not in {item.key for item in written(to, sections).items if item.fit is Fit.NEEDS_INPUT}
