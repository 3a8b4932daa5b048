"""`make versions`: what it asks pip for, how it copes with sets that fail, and that docs/versions.md is what was
run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib

import pytest
from ruamel.yaml import YAML

from dev.versions import framework_versions, frameworks, make_versions, running_pieces
from dev.versions import page as version_page
from dev.versions.environments import environment, interpreter
from dev.versions.sets import PIECES, ROOT, SETS, VersionSet, floors
from unishard.contract import registry, tested_versions

RESULTS = version_page.read(ROOT / "docs/versions")
FRAMEWORKS = frameworks.read(ROOT / "docs/versions")
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
DONE = {"versions": {}, "pieces": {}, "wrong": "", "date": "2026-01-01"}
SET = VersionSet("x", PYTHON, ("torch==2.11.*",), ("doctor", "cells"))


def test_the_page_is_made_of_the_results():
    expected = version_page.page(RESULTS, FRAMEWORKS)
    assert (ROOT / "docs/versions.md").read_text(encoding="utf-8") == expected, "run `make versions`"


def test_every_framework_was_run_on_its_floor():
    """Of those that constraints.txt pins, the whole suite runs with the pinned one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = set(re.findall(r"^(\w+==\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
    floors = set()
    for extra in ("accelerate", "trainer", "lightning", "ray"):
        for text in project["optional-dependencies"][extra]:
            if floor := re.fullmatch(r"(\w+)(?:\[\w+\])?>=([\d.]+)", text):
                floors.add(f"{floor[1]}=={'.'.join([*floor[2].split('.'), '0'][:3])}")
    assert set(frameworks.VERSIONS) == floors - pins
    right = {f"{row['framework']}=={row['version']}" for row in FRAMEWORKS if not row["wrong"] and row["passed"]}
    assert len(right) == len(FRAMEWORKS)
    page = (ROOT / "docs/versions.md").read_text(encoding="utf-8")
    for missing in floors - pins - right:
        assert f"Not run yet: {missing}; " in page


@pytest.mark.parametrize(
    ("last", "passed", "wrong"),
    [
        ("46 passed in 9.1s", 46, ""),
        ("1 failed, 2 passed in 1s", 2, "1 failed, 2 passed in 1s"),
        ("3 passed, 3 skipped in 1s", 3, "3 passed, 3 skipped in 1s"),
        ("", 0, "no result"),
    ],
)
def test_what_pytest_says_is_counted(last, passed, wrong):
    assert framework_versions.counts(f"...\n{last}\n" if last else "") == {"passed": passed, "wrong": wrong}


def test_every_set_that_was_run_was_right():
    sets = {each.name: each for each in SETS}
    assert [result["name"] for result in RESULTS if result["wrong"]] == []
    for result in RESULTS:
        each = sets[result["name"]]
        assert make_versions.misfits(each, result["versions"]) == ""
        assert tuple(result["pieces"]) == each.pieces


def test_the_page_says_what_was_not_run():
    missing = [each.name for each in SETS][1:]
    assert f"{', '.join(missing)}: run `make versions ONLY={','.join(missing)}`." in version_page.page(
        [{**DONE, "name": SETS[0].name}]
    )
    assert "Not run yet" not in version_page.page([{**DONE, "name": each.name} for each in SETS])


def test_every_version_that_a_backend_calls_tested_was_run():
    """By `make versions`, or by the whole suite, which runs on what constraints.txt pins."""
    pins = dict(re.findall(r"^(\w+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
    for package, versions in tested_versions.tested(map(registry.get, registry.available())).items():
        run = [pins[package], *(result["versions"].get(package) or "" for result in RESULTS)]
        assert [
            version for version in versions if not any(tested_versions.is_tested(each, [version]) for each in run)
        ] == [], package
    pythons = {".".join(result["versions"]["python"].split(".")[:2]) for result in RESULTS if result["versions"]}
    assert pythons | {"3.11"} == set(tested_versions.PYTHONS)


def test_the_workflow_runs_every_set_on_its_python():
    jobs = YAML(typ="safe").load(ROOT / ".github/workflows/versions.yml")["jobs"]
    rows = jobs["versions"]["strategy"]["matrix"]["include"]
    assert [(row["set"], row["python"]) for row in rows] == [(each.name, each.python) for each in SETS]


def test_the_floors_are_every_dependency_at_its_oldest():
    found = floors()
    assert all(re.fullmatch(r"[\w.-]+==[\d.]+", pin) for pin in found)
    assert {pin.partition("==")[0] for pin in found} >= {
        "pydantic",
        "rich",
        "torch",
        "deepspeed",
        "transformers",
        "matplotlib",
    }
    assert len(found) == len({pin.partition("==")[0] for pin in found})


@pytest.mark.parametrize(
    ("pin", "installed", "fits"),
    [
        ("torch==2.11.*", "2.11.0+cpu", True),
        ("torch==2.11.*", "2.1.1", False),
        ("torch==2.11.*", None, False),
        ("torch==2.11", "2.11.0", True),
        ("torch==2.11.0", "2.11.0+cu130", True),
        ("torch==2.11", "2.11.1", False),
    ],
)
def test_an_environment_that_does_not_hold_the_set_is_not_measured(pin, installed, fits):
    said = make_versions.misfits(VersionSet("x", PYTHON, (pin,)), {"python": f"{PYTHON}.7", "torch": installed})
    assert (said == "") is fits
    assert fits or said.startswith(f"torch {pin.removeprefix('torch==')} is asked for, ")


@pytest.fixture
def installed(monkeypatch):
    """Every piece runs and is right, but those named in the dict that this returns."""
    answers = {}
    versions = {"python": f"{PYTHON}.1", "torch": "2.11.0"}

    def answer(name, python):
        found = {"versions": dict(versions), "probes": {}} if name == "doctor" else {}
        return {"seconds": 1, "wrong": "", "found": found} | answers.get(name, {})

    monkeypatch.setattr(make_versions, "run_piece", answer)
    return answers


def test_a_piece_that_breaks_leaves_the_others_alone(installed, tmp_path):
    installed["doctor"] = {"wrong": "no output", "found": None}
    cell = {"precision": "fp32", "strategy": "full_shard", "losses": 1e-7, "norms": 2e-7, "wrong": ""}
    cells = {
        "mlp-a": cell,
        "mlp-b": cell | {"losses": 3e-7},
        "lora-mlp-c": cell,
        "mlp-d": cell | {"precision": "bf16", "wrong": "x | y"},
    }
    installed["cells"] = {"found": {"fsdp": cells}}
    result = make_versions.measure(SET, tmp_path)
    assert result["wrong"] == "doctor: no output; cells: 1 of 4 wrong"
    text = version_page.page([result])
    assert (
        "| x | 2: 3e-07 / 2e-07 | **0 of 1**: 1e-07 / 2e-07 | not run | not run | 1 | not run | not run | not run |  |"
        in text
    )
    assert "| x | doctor | no output |" in text
    assert "| x | cells: fsdp mlp-d | x \\| y |" in text


def test_results_are_written_as_they_come_and_the_worst_decides_the_exit_status(installed, tmp_path, monkeypatch):
    sets = [
        VersionSet(name, python, pieces=("doctor",)) for name, python in (("a", PYTHON), ("b", "3.99"), ("c", PYTHON))
    ]
    for module in (make_versions, version_page):
        monkeypatch.setattr(module, "SETS", sets)
    seen = []

    def built(version_set, existing, keep):
        seen.append(sorted(path.name for path in tmp_path.rglob("*.json")))
        return environment(version_set, tmp_path if version_set.name != "b" else None, keep)

    monkeypatch.setattr(make_versions, "environment", built)
    assert make_versions.main(["--out", str(tmp_path)]) == 1
    assert seen == [[], ["a.json"], ["a.json", "b.json"]]
    results = [json.loads((tmp_path / "versions" / f"{name}.json").read_text()) for name in "abc"]
    assert [result["wrong"] for result in results] == [
        "",
        "not installable: python3.99 was not found; install it, or put it on PATH",
        "",
    ]
    text = (tmp_path / "versions.md").read_text()
    assert "| b | not installable |" in text
    assert "| b | installation | python3.99 was not found" in text
    assert make_versions.main(["--out", str(tmp_path), "--only", "a,c"]) == 0


def test_the_command_line_names_what_there_is():
    for arguments, said in ((["--only", "nothing"], "there are torch-2.11"), (["--venv", "x"], "name its version set")):
        done = subprocess.run(
            [sys.executable, "-m", "dev.versions.make_versions", *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr


def test_a_piece_that_leaves_nothing_says_how_it_ended(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("import sys\nprint('WARNING: x')\nsys.exit('it broke')\n")
    monkeypatch.setattr(running_pieces, "PIECES", tmp_path)
    monkeypatch.setitem(running_pieces._SECONDS, "broken", 60)
    assert running_pieces.run_piece("broken", interpreter(PYTHON))["wrong"] == "it broke"


def test_every_piece_is_known():
    scripts = {path.stem for path in running_pieces.PIECES.glob("*.py")}
    assert {*scripts, *running_pieces._RUNS} == set(running_pieces._SECONDS)
    assert {name for each in SETS for name in each.pieces} == set(running_pieces._SECONDS)
    assert set(PIECES) <= set(running_pieces._SECONDS)


def test_the_cells_span_every_strategy_model_precision_and_area():
    from dev.versions.pieces import cells
    from unishard.testing.cells import STRATEGIES
    from unishard.testing.features import AREAS, area_of

    chosen = cells.spanning()
    plain = {(cell.model, cell.strategy, cell.precision) for cell in chosen if cell.feature == "plain"}
    assert plain == {
        (model, strategy, precision)
        for model in ("mlp", "llama")
        for strategy in STRATEGIES
        for precision in ("fp32", "bf16")
    }
    assert {area_of(cell.feature) for cell in chosen} == set(AREAS)
    assert {cell.strategy for cell in chosen} == {*STRATEGIES, "hybrid_shard", "hybrid_shard_grad_op"}
    (cell, *_) = chosen
    assert cells.judge("fsdp", cell, "Traceback\n  x\nValueError: bad\n", None)["wrong"] == "ValueError: bad"
    assert cells.judge("fsdp", cell, cells.Refusal("no"), None)["wrong"] == "no"
    curve = cells.conformance.Curve((1.0,), (1.0,), (0.1,))
    assert cells.judge("fsdp", cell, curve, curve)["wrong"] == ""
    assert cells.judge("fsdp", cell, curve._replace(losses=(1.1,)), curve)["wrong"].startswith(
        "first losses 1.0e-01, at most "
    )
