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

REFUSED = "sharding: full_shard\noffload:\n  params: nvme\n  nvme_path: files\n"  # PyTorch has no offload to files
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


def test_what_needs_attention_comes_first(config: Path) -> None:
    config.write_text(
        ROUGH
        + "training: {micro_batch_size: '${training.micro_batch_size}', seed: 3}\noffload: {params: nvme, nvme_path: "
        "files}\n"
    )
    said = run("translate", "c.yaml", "--to", "unishard").stderr
    lines = said.splitlines()
    assert [line for line in lines if line.endswith(":") and " = " not in line][:3] == [
        "unsupported:",
        "needs input:",
        "approximate:",
    ]
    assert [line.strip().partition(":")[0] for line in lines if re.match(r"  \S+:\d+ = ", line)] == [
        "offload.params",
        "offload.nvme_path",
        "training.micro_batch_size",
        "native.deepspeed.vocabulary_size",
    ]
    counts = "2 of 6 keys carried over; 1 approximate; 2 unsupported; 1 needs input (--report full lists all)"
    assert f" unishard -> unishard: {counts}" in one_line(said)


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


def test_report_as_markdown(config: Path) -> None:
    config.write_text(ROUGH + "sharding: {units: ['A|B']}\n")
    lines = run("translate", "c.yaml", "--to", "unishard", "--report", "markdown").stderr.splitlines()
    assert lines[0].startswith("**c.yaml**: unishard → unishard (")
    assert lines[2:4] == ["| line | key = value | fit | becomes | note |", "|---|---|---|---|---|"]
    assert "| 4 | `sharding.units = [A\\|B]` | exact | `sharding.units` |  |" in lines
    assert any(line.startswith("| 3 | `native.deepspeed.vocabulary_size = 3` | **approximate** |") for line in lines)


def test_no_report() -> None:
    assert run("translate", TINY, "--to", "unishard", "--report", "none").stderr == ""


def test_approximate_is_reported_and_under_strict_refused_with_2(config: Path) -> None:
    config.write_text(ROUGH)
    assert run("translate", "c.yaml", "--to", "unishard").exit_code == 0
    strict = run("translate", "c.yaml", "--to", "unishard", "--strict", "--report", "none", "-o", "new.yaml")
    assert (strict.exit_code, strict.stdout) == (2, "")
    assert strict.stderr.startswith("c.yaml:3: native.deepspeed.vocabulary_size: only deepspeed has this setting")
    assert not Path("new.yaml").exists()
    told = run("translate", "c.yaml", "--to", "unishard", "--strict")
    assert "nothing written: 1 only approximate, and strict is on;" in one_line(told.stderr)
    assert pasted(told.stderr) == [["unishard", "translate", "c.yaml", "--to", "unishard"]]


def test_strict_in_the_config_counts_too(config: Path) -> None:
    config.write_text(ROUGH + "strict: true\n")
    refused = run("translate", "c.yaml", "--to", "unishard")
    assert refused.exit_code == 2
    ((_, *arguments),) = pasted(refused.stderr)
    assert run(*arguments).exit_code == 0


def test_what_cannot_be_had_is_refused_with_1_at_its_line(config: Path) -> None:
    config.write_text(REFUSED)
    result = run("translate", "c.yaml", "--to", "unishard", "-o", "new.yaml")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "  offload.params:3 = nvme\n  offload.nvme_path:4 = files\n    PyTorch" in result.stderr
    assert "\nnothing written: 2 refused (no equivalent); " in result.stderr
    assert not Path("new.yaml").exists()
    quiet = run("translate", "c.yaml", "--to", "unishard", "--report", "none")
    assert quiet.stderr.startswith("c.yaml:3: offload.params: PyTorch")


@pytest.mark.parametrize("report", ["text", "full", "none"])
def test_a_refusal_ends_with_a_command_that_works(config: Path, report: str) -> None:
    Path("a file.json").write_text(
        '{"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.1}}, "tensor_parallel": {"autotp_size": 2},'
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
    assert (made.training.seed, made.offload.params, made.optimizer.name) == (3, "cpu", "adamw")
    assert [one["key"] for one in json.loads(again.stderr)["dropped"]] == [
        "tensor_parallel.autotp_size",
        "zero_optimization.stage3_[x]",
    ]


def test_all_that_is_not_supported_is_dropped_and_listed(config: Path) -> None:
    config.write_text(REFUSED)
    result = run("translate", "c.yaml", "--to", "unishard", "--drop-unsupported")
    assert result.exit_code == 0
    assert unishard.load(write("new.yaml", result.stdout)).offload.params == "none"
    lines = result.stderr.splitlines()
    assert lines[lines.index("dropped:") :][1:4] == [
        "  offload.params:3 = nvme",
        "    changes the training: offload.params is 'none' instead of 'nvme'",
        "  offload.nvme_path:4 = files",
    ]


def test_a_key_to_drop_that_is_not_there(config: Path) -> None:
    config.write_text(REFUSED)
    result = run("translate", "c.yaml", "--to", "unishard", "--drop", "offload.param")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("c.yaml: --drop offload.param: matches no key")


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


def write(name: str, text: str) -> str:
    Path(name).write_text(text)
    return name


def test_what_contradicts_the_ranks_is_refused(config: Path) -> None:
    config.write_text("training:\n  global_batch_size: 6\n")
    for ranks in ((), ("--world-size", "6"), ("--world-size", "6", "--gpus-per-node", "2")):
        assert run("translate", "c.yaml", "--to", "unishard", *ranks).exit_code == 0
    result = run("translate", "c.yaml", "--to", "unishard", "--report", "none", "--world-size", "4")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("c.yaml:2: training.global_batch_size: is 6, but ")


def test_nodes_that_are_not_equal_are_a_usage_error() -> None:
    result = run("translate", TINY, "--to", "unishard", "--world-size", "6", "--gpus-per-node", "4")
    assert result.exit_code == 2
    assert "6 ranks do not divide into nodes of 4; give a --world-size that is a multiple of 4" in result.stderr


def test_what_is_undecided_is_named_with_how_to_decide_it(config: Path) -> None:
    config.write_text(OPEN)
    result = run("translate", "c.yaml", "--to", "unishard")
    assert result.exit_code == 0
    assert "micro_batch_size: ${training.micro_batch_size}  # needs your decision" in result.stdout
    assert "\nneeds input: --set training.micro_batch_size=VALUE\n" in result.stderr
    decided = run("translate", "c.yaml", "--to", "unishard", "--set", "training.micro_batch_size=4")
    assert "  micro_batch_size: 4\n" in decided.stdout
    assert "decide" not in decided.stderr


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


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty, and a config is a mapping of keys to values; name another file"),
        (b"title: x\n", "matches no known format (its keys: title); name one with `unishard translate --from`"),
    ],
)
def test_what_is_no_config_is_one_message(config: Path, content: bytes, said: str) -> None:
    config.write_bytes(content)
    result = run("translate", "c.yaml", "--to", "unishard")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("c.yaml")
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


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
