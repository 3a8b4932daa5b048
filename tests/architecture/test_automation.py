"""What runs by itself: workflows and hooks call what a person would call, and nothing that is not there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from unishard.contract import tested_versions

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))


def loaded(path: Path) -> Any:
    return YAML(typ="safe").load(path)


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in loaded(path)["jobs"].values() for step in job["steps"]]


def targets_of(command: str) -> list[str]:
    """The targets of a call of make; its variables are left out."""
    words = re.sub(r"\$\{\{.*?\}\}|\"[^\"]*\"", "_", command).split()
    return [word for word in words[1:] if "=" not in word]


def test_workflows_are_there() -> None:
    assert [path.stem for path in WORKFLOWS] == ["check", "deep", "site", "versions"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_only_targets_of_the_makefile(path: Path) -> None:
    assert loaded(path)["on"]
    commands = [line for step in steps(path) for line in step.get("run", "").splitlines()]
    assert commands
    for command in commands:
        assert command.startswith("make "), command
        assert targets_of(command), command
        assert set(targets_of(command)) <= TARGETS, command


def test_a_workflow_watches_paths_that_are_there() -> None:
    watched = [name for path in WORKFLOWS for name in (loaded(path)["on"].get("pull_request") or {}).get("paths", [])]
    assert watched
    assert [name for name in watched if not any(ROOT.glob(name))] == []


def test_the_script_of_all_checks_runs_only_targets_of_the_makefile() -> None:
    called = re.findall(r"\bmake ([a-z-]+)", (ROOT / ".ci/run").read_text(encoding="utf-8"))
    assert called
    assert set(called) <= TARGETS


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_uses_only_actions_of_github_at_a_major_version(path: Path) -> None:
    used = [step["uses"] for step in steps(path) if "uses" in step]
    assert [name for name in used if not re.fullmatch(r"actions/[a-z-]+@v\d+", name)] == []


def test_changes_are_tested_on_every_python_that_is_supported() -> None:
    job = loaded(ROOT / ".github/workflows/check.yml")["jobs"]["test"]
    assert tuple(job["strategy"]["matrix"]["python"]) == tested_versions.PYTHONS


def test_what_lands_is_checked_for_style_types_tests_site_and_wheel() -> None:
    called = {
        target for step in steps(ROOT / ".github/workflows/check.yml") for target in targets_of(step.get("run", ""))
    }
    assert called == {"lint", "type", "site", "wheel", "audit", "test", "coverage"}


def test_what_the_suite_takes_in_turns_runs_by_itself() -> None:
    workflow = ROOT / ".github/workflows/deep.yml"
    assert loaded(workflow)["on"]["schedule"]
    assert "make test ARGS=--deep" in [step.get("run") for step in steps(workflow)]


def test_every_target_is_phony_and_has_a_line_of_help() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    helped = re.findall(r"^([a-z-]+):.*## \S", MAKEFILE, re.MULTILINE)
    assert sorted(phony.split()) == sorted(helped) == sorted(TARGETS)


def test_make_clean_and_git_know_what_the_targets_leave() -> None:
    (removed,) = re.findall(r"^\trm -rf (.*)$", MAKEFILE, re.MULTILINE)
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    for name in ("site", "dist", ".coverage", ".coverage.*"):
        assert name in removed.split()
        assert {name, f"{name}/", f"/{name}/"} & set(ignored)


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_asks_at_most_three_things(path: Path) -> None:
    form = loaded(path)
    assert form["name"]
    assert form["description"]
    assert 1 <= len(form["body"]) <= 3
    assert all(part["attributes"]["label"] for part in form["body"])


def test_templates_are_there_and_short() -> None:
    assert [path.stem for path in FORMS] == ["bug", "feature"]
    text = (ROOT / ".github/pull_request_template.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 8
    for command in re.findall(r"`make ([a-z ]+)`", text):
        assert set(command.split()) <= TARGETS
