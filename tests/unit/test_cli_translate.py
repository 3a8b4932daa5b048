from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from running import TINY, Terminal, one_line, pasted, plain, run

import unishard
from unishard.config import leaves

ROUGH = "backend: fsdp\nnative:\n  deepspeed: {vocabulary_size: 3}\n"  # a setting that only DeepSpeed has
OPEN = "backend: fsdp\ntraining:\n  micro_batch_size: ${training.micro_batch_size}\n"


def test_output_file_is_whole_or_absent(config: Path) -> None:
    result = run("translate", TINY, "--to", "unishard", "-o", "new.yaml")
    assert (result.exit_code, result.stdout) == (0, "")
    assert unishard.load("new.yaml") == unishard.load(TINY)
    result = run("translate", TINY, "--to", "unishard", "-o", "nowhere/new.yaml", "--report", "none")
    assert (result.exit_code, result.stderr) == (
        1,
        "nowhere/new.yaml: cannot be written (No such file or directory); name a file in an existing, writable "
        "directory\n",
    )
    assert [path.name for path in config.parent.iterdir()] == ["new.yaml"], "no draft is left behind"


def test_output_that_is_a_folder(config: Path) -> None:
    Path("folder").mkdir()
    result = run("translate", TINY, "--to", "unishard", "-o", "folder", "--report", "none")
    assert result.exit_code == 1
    assert result.stderr.startswith("folder: cannot be written (")
    assert [path.name for path in config.parent.iterdir()] == ["folder"]


def test_output_through_a_link_keeps_the_link(config: Path) -> None:
    Path("inner").mkdir()
    Path("inner/old.yaml").write_text("old")
    Path("inner/old.yaml").chmod(0o640)
    Path("old.yaml").symlink_to("inner/old.yaml")
    Path("new.yaml").symlink_to("inner/new.yaml")
    for name in ("old.yaml", "new.yaml"):
        assert run("translate", TINY, "--to", "unishard", "--report", "none", "-o", name).exit_code == 0
        assert Path(name).is_symlink()
        assert unishard.load(Path("inner", name)) == unishard.load(TINY)
    assert Path("inner/old.yaml").stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in Path("inner").iterdir()) == ["new.yaml", "old.yaml"]


def test_output_through_links_in_a_circle(config: Path) -> None:
    Path("a").symlink_to("b")
    Path("b").symlink_to("a")
    result = run("translate", TINY, "--to", "unishard", "--report", "none", "-o", "a")
    assert result.exit_code == 1
    assert result.stderr.startswith("a: cannot be written (")
    assert Path("a").is_symlink()


def test_output_to_a_pipe_is_written_and_leaves_it_a_pipe(config: Path) -> None:
    os.mkfifo("pipe")
    reader = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)  # so that opening it for writing does not wait
    try:
        result = run("translate", TINY, "--to", "unishard", "--report", "none", "-o", "pipe")
        text = os.read(reader, 2**16)
    finally:
        os.close(reader)
    assert result.exit_code == 0
    assert b"full_shard" in text
    assert Path("pipe").is_fifo()


def test_the_document_goes_to_stdout_and_the_report_to_stderr() -> None:
    result = run("translate", TINY, "--to", "unishard")
    assert result.exit_code == 0
    assert result.stdout.startswith("backend: fsdp\n")
    *_, sentence = result.stderr.splitlines()
    assert re.fullmatch(r"unishard -> unishard: (\d+) of \1 keys carried over \(--report full lists all\)", sentence)
    full = run("translate", TINY, "--to", "unishard", "--report", "full").stderr.splitlines()
    assert (full[0], "  backend:2 = fsdp -> backend" in full[full.index("exact:") :]) == (TINY, True)


def test_what_the_document_leaves_out_is_shown_on_demand() -> None:
    shown = [
        run("translate", TINY, "--to", "unishard", "--report", form).stderr.splitlines()[:-1]
        for form in ("text", "full")
    ]
    keys = [[re.split("[: ]", line.strip())[0] for line in lines if " = " in line] for lines in shown]
    assert "optimizer.eps" not in keys[0]
    assert set(keys[0]) < set(keys[1])
    assert {"optimizer.eps", "training.nonfinite", "compile.mode", "strict"} <= set(keys[1])


def test_report_as_json(config: Path) -> None:
    config.write_text(ROUGH)
    report = json.loads(run("translate", "c.yaml", "--to", "unishard", "--report", "json").stderr)
    assert (report["file"], report["from"], report["to"], report["backend"]) == (
        "c.yaml",
        "unishard",
        "unishard",
        "fsdp",
    )
    assert report["summary"]["approximate"] == 1
    assert sum(report["summary"].values()) == len(report["items"]) == len(list(leaves(unishard.Config)))
    assert report["items"][1] == {
        "key": "native.deepspeed.vocabulary_size",
        "value": 3,
        "fit": "approximate",
        "becomes": "",
        "note": "only deepspeed has this setting, so another engine trains without it",
        "line": 3,
        "assumed": False,
    }


def test_no_report() -> None:
    assert run("translate", TINY, "--to", "unishard", "--report", "none").stderr == ""


def test_strict_in_the_config_counts_too(config: Path) -> None:
    config.write_text(ROUGH + "strict: true\n")
    refused = run("translate", "c.yaml", "--to", "unishard")
    assert refused.exit_code == 2
    ((_, *arguments),) = pasted(refused.stderr)
    assert run(*arguments).exit_code == 0


@pytest.mark.parametrize("report", ["text", "full", "none"])
def test_a_refusal_ends_with_a_command_that_works(config: Path, report: str) -> None:
    Path("a file.json").write_text(
        '{"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.1}}, "data_efficiency": {"enabled": true},'
        ' "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/disk"}, "stage3_[x]": '
        "1}}"
    )
    options = (
        "--set",
        "backend=fsdp",
        "--set",
        "training.seed=3",
        "--world-size",
        "8",
        "--gpus-per-node",
        "4",
        "-o",
        "new.yaml",
    )
    result = run("translate", "a file.json", "--to", "unishard", "--from", "deepspeed", *options, "--report", report)
    assert result.exit_code == 1
    assert "\nthis works:\n  unishard translate 'a file.json' " in result.stderr
    ((program, *arguments),) = pasted(result.stderr)
    assert program == "unishard"
    again = run(*arguments, "--report", "json")
    assert again.exit_code == 0, again.stderr
    made = unishard.load("new.yaml")
    assert (made.training.seed, made.offload.params, made.optimizer.name) == (3, "nvme", "adamw")
    assert [one["key"] for one in json.loads(again.stderr)["dropped"]] == [
        "data_efficiency.enabled",
        "zero_optimization.stage3_[x]",
    ]


def test_verified_with_the_tool_that_reads_it(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from unishard.formats.verify import comparing
    from unishard.formats.verify.settings import Effective

    right = run("translate", TINY, "--to", "unishard", "--verify", "--report", "none", "-o", "right.yaml")
    assert (right.exit_code, Path("right.yaml").exists()) == (0, True)
    assert right.stderr.splitlines()[0].split() == ["sharding.strategy", "full_shard"]
    assert right.stderr.splitlines()[-1].endswith("0 differ, 0 of these unreported")
    monkeypatch.setattr(comparing, "read_settings", lambda outcome: Effective({"optimizer.lr": 7.0}, "DeepSpeed 1"))
    wrong = run("translate", TINY, "--to", "unishard", "--verify", "--report", "none", "-o", "wrong.yaml")
    assert (wrong.exit_code, Path("wrong.yaml").exists()) == (2, False)
    assert re.search(r"optimizer\.lr source \S+, written \S+, in effect 7\.0: NOT REPORTED", one_line(wrong.stderr))
    assert max(map(len, (right.stderr + wrong.stderr).splitlines())) <= 80
    monkeypatch.setattr(
        comparing, "read_settings", lambda outcome: Effective({}, "X", missing="X is not installed; pip install x")
    )
    absent = run("translate", TINY, "--to", "unishard", "--verify", "--report", "none")
    assert (absent.exit_code, absent.stderr.splitlines()[-1]) == (0, "not verified: X is not installed; pip install x")


@pytest.mark.parametrize(
    "prepare",
    [
        lambda path: unishard.load(path),
        lambda path: unishard.load({"training": {"micro_batch_size": "${training.micro_batch_size}"}}),
    ],
)
def test_what_is_undecided_cannot_be_loaded_until_it_is_decided(config: Path, prepare) -> None:
    config.write_text(OPEN)
    with pytest.raises(
        unishard.ConfigError,
        match=r"micro_batch_size: needs a value: .*write the value, or set it with the override "
        r"training\.micro_batch_size=\.\.\.",
    ):
        prepare(config)
    assert unishard.load(config, ["training.micro_batch_size=4"]).training.micro_batch_size == 4


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> list[str]:
    from unishard.cli.report import ReportForm, write_report
    from unishard.formats import translate

    screen = Terminal()
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    write_report(translate("c.yaml", "unishard"), ReportForm.TEXT, screen)
    return screen.getvalue().splitlines()


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_the_report_fits_the_terminal_with_each_note_below_its_key(
    config: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    config.write_text(ROUGH)
    colored = on_a_terminal(monkeypatch, columns)
    shown = [plain(line).rstrip() for line in colored]
    assert shown[:3] == ["c.yaml", "approximate:", "  native.deepspeed.vocabulary_size:3 = 3"]
    assert shown[3].startswith("    only deepspeed has this setting")
    assert max(map(len, shown)) <= min(columns, 80)
    assert "\x1b[33m" in colored[1], "what is approximate stands out"


def test_it_costs_little(config: Path) -> None:
    """Of 0.35 s of CPU time, on a machine that may be busy: what it imports is what it costs."""
    code = "import sys; from unishard.cli import main\ntry: main()\nfinally: print(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code, "translate", TINY, "--to", "unishard", "--report", "none"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    loaded = set(done.stderr.split())
    assert loaded & {"torch", "numpy", "deepspeed", "accelerate", "transformers", "rich.table", "rich.console"} == set()
