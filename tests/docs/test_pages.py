"""What README, CONTRIBUTING and the guide show is run: code on 1 and 2 ranks, commands with the output that stands
below them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
from fences import LOOPS, PAGES, ROOT, Block, blocks
from forking import in_a_fork
from played import run_command, run_readme, run_script, run_source
from transcripts import EXIT, commands, shows

import unishard
from unishard.config.sharding import Strategy
from unishard.testing import run_ranks

TUTORIAL = "docs/writing-a-backend.md"  # one module in several blocks: test_tutorial.py
FIRST = ("README.md", "docs/loop.md")
"""What a newcomer runs on one rank; on two, README is run below on both engines."""
LANGUAGES = {"python", "yaml", "toml", "bash", "console", "text"}


@pytest.fixture
def folder(tmp_path):
    """An empty folder that holds what the pages name: the examples and their configs."""
    for name in ("configs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def test_every_block_says_what_it_is():
    assert {str(block): block.language for block in blocks() if block.language not in LANGUAGES} == {}


def test_no_line_is_cut():
    wide = [f"{block}: {line}" for block in blocks() for line in block.text.splitlines() if len(line) > 88]
    readme = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert wide + [f"README.md: {line}" for line in readme if len(line) > 88] == []


@pytest.fixture(scope="session")
def checkpoints_of(tmp_path_factory):
    """The checkpoints that the Python blocks of a page leave in `runs`, made on 2 ranks; the folder that `runs` is
    in."""

    @cache
    def made(page):
        made_in = tmp_path_factory.mktemp("runs")
        (made_in / "configs").symlink_to(ROOT / "configs")
        for block in blocks("python"):
            if block.page == page and "runs/" in block.text:
                run_ranks(2, run_source, block.text, str(made_in))
        return made_in / "runs"

    return made


READ_AGAIN = {block.page for block in blocks("bash", "console") if "runs/" in block.text}
"""Whose commands need what their Python blocks save: all of them run in one folder, once."""
ON_TWO = {*READ_AGAIN, "docs/data.md", "docs/evaluation.md", "docs/sequence.md", "docs/sharding.md"} - {*FIRST}
"""Pages about what ranks do together; the code of the others runs on one, and with `--deep` on two as well."""
RUNS = [
    pytest.param(
        block, world, id=f"{block}-{world}", marks=[pytest.mark.deep] * ((world == 2) is not (block.page in ON_TWO))
    )
    for block in blocks("python")
    if block.page not in (TUTORIAL, *LOOPS)
    for world in (1, 2)
]


@pytest.mark.ranks
@pytest.mark.parametrize(("block", "world"), RUNS)
def test_python_runs(block: Block, world, folder, checkpoints_of):
    if world == 2 and "runs/" in block.text and block.page in READ_AGAIN:
        assert checkpoints_of(block.page).is_dir()
    else:
        run_ranks(world, run_source, block.text, str(folder))


@pytest.mark.ranks
def test_readme_trains_the_same_on_both_engines_when_one_word_changes(tmp_path):
    (block,) = [block for block in blocks("python") if block.page == "README.md"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    fsdp, deepspeed = (
        run_ranks(2, run_readme, block.text, str(tmp_path), backend) for backend in ("fsdp", "deepspeed")
    )
    losses, other_losses = fsdp[0][1], deepspeed[0][1]
    assert losses == sorted(losses, reverse=True)
    shown = re.findall(r"^epoch \d: loss (\S+) +epoch \d: loss (\S+)$", readme, re.MULTILINE)
    assert [float(one) for one, _ in shown] == pytest.approx(losses, abs=1.1e-4)
    assert [float(other) for _, other in shown] == pytest.approx(other_losses, abs=1.1e-4)
    assert other_losses == pytest.approx(losses, abs=1.1e-4)  # printed with 4 digits
    assert len(losses) == 3
    for (one, _, norm), (other, _, other_norm) in zip(fsdp, deepspeed, strict=True):
        assert (one, other) == ("unishard_fsdp", "unishard_deepspeed")
        assert other_norm == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("block", [block for block in blocks("yaml") if block.page != TUTORIAL], ids=str)
@pytest.mark.parametrize("backend", sorted(unishard.available()))
def test_yaml_loads_and_translates(block: Block, backend, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(block.text, encoding="utf-8")
    translation = unishard.translate(unishard.load(path), backend=backend)
    translation.check(strict=False)


TORCHRUN = "torchrun --standalone --nproc-per-node 2 "
ELSEWHERE = (
    "unishard compare ",
    "unishard launch configs",
    f"{TORCHRUN}examples/finetune_t5_lora.py ",
)
"""What runs a training that has tests of its own: test_compare.py, test_launching.py, test_parity_differences.py and
test_t5_example.py."""
COMMANDS = [
    pytest.param(
        block,
        command,
        shown,
        id=f"{block}:{command.partition('#')[0].strip()}",
        marks=[*[pytest.mark.ranks] * ("runs/" in command), *[pytest.mark.deep] * command.startswith(ELSEWHERE)],
    )
    for block in blocks("bash", "console")
    if block.page != TUTORIAL
    for command, shown in commands(block.text, block.language)
]


def make_target(command, folder):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = [word for word in shlex.split(command, comments=True)[1:] if "=" not in word]
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"the Makefile has no target {target!r}"


def pip_install(command, folder):
    extras = {
        extra
        for word in shlex.split(command, comments=True)
        if (match := re.search(r"\[(.*)\]", word))
        for extra in match[1].split(",")
    }
    offered = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert extras <= offered.keys()


def pre_commit_install(command, folder):
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    (folder / ".pre-commit-config.yaml").symlink_to(ROOT / ".pre-commit-config.yaml")
    assert "pre-commit installed" in output(command.removeprefix(".venv/bin/"), folder)


def fine_tune(command, folder):
    """Two updates on forked ranks, which need not import everything: test_t5_example.py trains it to the end, on both
    engines."""
    script, *arguments = shlex.split(command.removeprefix(TORCHRUN), comments=True)
    return "".join(run_ranks(2, run_script, [script, *arguments, "--steps", "2"], str(folder)))


def compare(command, folder):
    """On one rank each: test_compare.py measures two."""
    return printed_by(command.replace("--processes-per-node 2", "--processes-per-node 1"), folder)


def run(command, folder):
    """Of unishard alone, in a process that has imported torch, as have the ranks it starts; what a shell must read, in
    a shell."""
    shell = set("&|<>;$*").intersection(command.partition("#")[0])
    return output(command, folder) if shell or not command.startswith("unishard ") else printed_by(command, folder)


def printed_by(command, folder):
    """`output` of a command of unishard."""
    said = EXIT.search(command)
    code = in_a_fork(run_command, shlex.split(command, comments=True), str(folder))
    printed = (folder / "printed").read_text(encoding="utf-8")
    (folder / "printed").unlink()
    assert code == (int(said[1]) if said else 0), printed
    return printed


RUNNERS = {
    "make ": make_target,
    f"{TORCHRUN}examples/finetune_t5_lora.py ": fine_tune,
    "unishard compare ": compare,
    "pip install ": pip_install,
    ".venv/bin/pre-commit install": pre_commit_install,
}


def output(command, folder):
    """What a command prints, stderr included. It must succeed, or exit as its comment says."""
    programs = Path(sys.executable).parent
    environ = os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "COLUMNS": "140",
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
    }
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    said = EXIT.search(command)
    assert done.returncode == (int(said[1]) if said else 0), done.stdout
    return done.stdout


@pytest.mark.parametrize(("block", "command", "shown"), COMMANDS)
def test_commands_run_and_print_what_is_shown(block, command, shown, folder, checkpoints_of):
    if "runs/" in command:
        shutil.copytree(checkpoints_of(block.page), folder / "runs")
    runner = next((runner for prefix, runner in RUNNERS.items() if command.startswith(prefix)), run)
    printed = runner(command, folder) or ""
    if shown:
        assert shows(printed, shown), f"{command} prints\n{printed}"


@pytest.mark.parametrize(
    ("printed", "shown", "same"),
    [
        ("a\nb\n", ["a", "b"], True),
        ("a\nb\nc\n", ["a", "...", "c"], True),
        ("took 3.1 s\n", ["took ... s"], True),
        ("a    b\n", ["a b"], True),
        ("a\n\nb\n", ["a", "b"], False),
        ("a\nb\n", ["a"], False),
        ("a\nb\n", ["b", "..."], False),
    ],
)
def test_abridged_output_is_compared_line_by_line(printed, shown, same):
    assert shows(printed, shown) is same


LINK = re.compile(r"\[[^\]]+\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    missing = [
        target for target in LINK.findall(page.read_text(encoding="utf-8")) if not (page.parent / target).exists()
    ]
    assert missing == []


@pytest.mark.parametrize("strategy", get_args(get_args(Strategy)[0]))
def test_the_table_of_strategies_says_what_the_rules_say(strategy):
    (row,) = re.findall(rf"^\| `{strategy}` \|.*$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    fsdp, deepspeed = (cell.strip() for cell in row.split("|")[3:5])
    cfg = unishard.Config.model_validate({"sharding": strategy})
    verdicts = [unishard.translate(cfg, backend=name).report.lines[1] for name in ("fsdp", "deepspeed")]
    assert [line.path for line in verdicts] == ["sharding.strategy"] * 2
    assert [fsdp, deepspeed] == [line.fit for line in verdicts]


def test_readme_is_short():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if not line.startswith("<!--")]) < 175


def test_every_room_of_the_core_is_described():
    described = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = [path for path in (ROOT / "unishard").iterdir() if not path.name.startswith(("_", "."))]
    assert rooms
    names = {
        f"`unishard/{path.name}{'/' if path.is_dir() else ''}`"
        for path in rooms
        if path.is_dir() or path.suffix == ".py"
    }
    assert {name for name in names if name not in described} == set()
    tour = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert {name for name in names if name.endswith("/`") and name not in tour} == set()


def test_every_file_that_uses_the_environment_is_named():
    described = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"^\*\*No setting is an environment variable.*?(?=^\*\*)", described, re.M | re.S)
    files = [path for room in ("unishard", "backends") for path in (ROOT / room).rglob("*.py")]
    users = [
        path.relative_to(ROOT)
        for path in files
        if re.search(r"\bos\.(environ|getenv)\b", path.read_text(encoding="utf-8"))
    ]
    assert users
    assert [str(path) for path in users if f"`{path}`" not in section and f"`{path.parent}/`" not in section] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_that_is_named_exists(page):
    named = re.findall(
        r"`((?:unishard|backends|configs|dev|examples|benchmarks|tests|unishard_fsdp|unishard_deepspeed)/[\w./-]*)`",
        page.read_text(),
    )
    roots = [ROOT, ROOT / "backends"]
    assert [name for name in named if not any((root / name).exists() for root in roots)] == []


@pytest.mark.parametrize("heading", ["DeepSpeed", "PyTorch"])
def test_remedies_stand_where_the_page_says(heading):
    (section,) = re.findall(
        rf"^## {heading}.*?(?=^## |\Z)", (ROOT / "docs" / "engines.md").read_text(encoding="utf-8"), re.M | re.S
    )
    folder = ROOT / re.findall(r"`(backends/\w+)/`", section)[0]
    places = [re.findall(r"`([^`]+)`", row.rsplit("|", 2)[1]) for row in section.splitlines() if row.startswith("| **")]
    assert places
    for place in places:
        files = [name for name in place if name.endswith(".py")]
        text = "".join(
            (ROOT / name if name.startswith("unishard/") else folder / name).read_text(encoding="utf-8")
            for name in files
        )
        assert text
        assert [name for name in place if name not in files and not re.search(rf"(def|class) {name}\(", text)] == []
