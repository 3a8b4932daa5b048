"""Which versions count as tested, and the one line that says of a run that its versions do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from unishard.contract import tested_versions


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested_versions, "_said", set())


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        ("2.11.0", True),
        ("2.11.1+cu128", True),
        ("2.11", True),
        ("2.1.0", False),
        ("2.110.0", False),
        ("2.12.0", False),
        ("2", False),
        ("0.19.8", True),
        ("0.19.9", False),
        ("not installed", False),
    ],
)
def test_a_version_is_tested_if_it_begins_with_a_tested_one_number_by_number(version: str, tested: bool) -> None:
    assert tested_versions.is_tested(version, ("2.11", "0.19.8")) is tested


def backend(**tested: tuple[str, ...]) -> Any:
    return SimpleNamespace(name="b", tested=tested)


def test_what_several_backends_were_tested_on() -> None:
    both = [backend(torch=("2.11", "2.12")), backend(torch=("2.12", "2.13"), engine=("1",))]
    assert tested_versions.tested(both) == {"torch": ("2.12",), "engine": ("1",)}
    assert tested_versions.span(("2.11", "2.12", "2.13")) == "2.11 to 2.13"
    assert tested_versions.span(("2.11", "2.13")) == "2.11, 2.13"
    assert tested_versions.span(("1",)) == "1"
    assert tested_versions.span(()) == "none"


def test_tested_versions_are_no_news(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(tested_versions, "version_of", lambda _: "2.11.5")
    tested_versions.warn_if_untested(backend(torch=("2.11",)), 0)
    assert caplog.records == []
