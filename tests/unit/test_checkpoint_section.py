"""The `checkpoint` section: what it takes, and what it says of a mistake."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import unishard
from unishard.config.checkpoint import SIGNALS
from unishard.config.topology import Topology
from unishard.contract import registry
from unishard.contract.rules import Fit


def section(**fields: Any) -> Any:
    return unishard.load({"checkpoint": fields}).checkpoint


def test_nothing_is_saved_unless_asked() -> None:
    found = unishard.load({}).checkpoint
    assert (found.dir, found.every_steps, found.every_minutes, found.keep_last, found.keep_every) == (None,) * 5
    assert (found.async_save, found.on_signal, found.automatic) == (False, [], False)
    assert (found.on_existing, found.keep_best, found.best) == ("error", None, "min")


def test_a_bare_path_is_the_directory() -> None:
    found = unishard.load({"checkpoint": "runs/a"}).checkpoint
    assert (found.dir, found.automatic) == ("runs/a", False)


@pytest.mark.parametrize(
    ("fields", "automatic"), [({"every_steps": 3}, True), ({"every_minutes": 0.5}, True), ({"on_signal": []}, False)]
)
def test_what_saves_by_itself(fields: dict[str, Any], automatic: bool) -> None:
    assert section(dir="a", **fields).automatic is automatic


@given(name=st.sampled_from(SIGNALS), data=st.data())
def test_a_signal_is_known_in_any_case_with_and_without_sig(name: str, data: st.DataObject) -> None:
    short = data.draw(st.sampled_from((name, name.removeprefix("SIG"))))
    written = "".join(data.draw(st.sampled_from((letter.lower(), letter))) for letter in short)
    assert section(dir="a", on_signal=[written]).on_signal == [name]


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
def test_every_engine_saves_alike(backend: str) -> None:
    cfg = unishard.load(
        {"backend": backend, "checkpoint": {"dir": "a", "every_steps": 5, "keep_last": 2, "on_signal": ["TERM"]}}
    )
    lines = [
        line for line in registry.get(backend).translate(cfg, Topology()).report if line.path.startswith("checkpoint.")
    ]
    assert len(lines) == 11
    assert {(line.fit, line.native) for line in lines} == {(Fit.EXACT, "unishard's loop")}
    assert not any("checkpoint" in key for key in registry.get(backend).translate(cfg, Topology()).native)
