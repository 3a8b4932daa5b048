from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import unishard
from unishard.cli import app
from unishard.cli.explain import explain
from unishard.config import leaves

ROOT = Path(__file__).resolve().parents[2]
TINY = str(ROOT / "configs" / "llama_tiny.yaml")
REFUSED = "offload:\n  params: nvme\n  nvme_path: files\n"  # PyTorch has no offload to files
ROUGH = "backend: deepspeed\nnative:\n  deepspeed: {vocabulary_size: 3}\n"  # a setting that only DeepSpeed has


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, prog_name="unishard")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "c.yaml"


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
def test_translate_prints_the_native_config_alone_on_stdout(backend: str) -> None:
    result = run("translate", TINY, "--to", backend, "--world-size", "8")
    topology = unishard.Topology(world_size=8, local_world_size=8)
    assert result.exit_code == 0
    assert json.loads(result.stdout) == unishard.translate(unishard.load(TINY), backend=backend, topology=topology).native


def test_the_full_report_has_a_line_for_every_field() -> None:
    result = run("translate", TINY, "--to", "deepspeed", "--report", "full")
    header, *lines, counts = result.stderr.splitlines()
    assert header.split() == ["field", "value", "fit", "deepspeed", "note"]
    assert [line.split()[0] for line in lines] == [path for path, _ in leaves(unishard.Config)]
    assert lines[1].split()[:3] == ["sharding.strategy", "full_shard", "exact"]
    assert counts.startswith("deepspeed: ")


def test_the_report_shows_what_is_not_exact_and_counts_the_rest() -> None:
    result = run("translate", TINY, "--to", "deepspeed", "--set", "sharding=zero2")
    report = unishard.translate(unishard.load(TINY, ["sharding=zero2"]), backend="deepspeed").report
    _, *lines, counts = result.stderr.splitlines()
    assert [line.split()[0] for line in lines] == [line.path for line in report if line.fit is not unishard.Fit.EXACT]
    assert sum(int(number) for number in re.findall(r"\d+", counts)) == len(list(report))


def test_translate_takes_the_backend_of_the_config() -> None:
    as_written, changed = run("translate", TINY), run("translate", TINY, "--set", "backend=deepspeed")
    assert "data_parallel" in json.loads(as_written.stdout)
    assert json.loads(changed.stdout)["zero_optimization"]["stage"] == 3


def test_report_as_json() -> None:
    result = run("translate", TINY, "--report", "json")
    lines = json.loads(result.stderr)
    assert lines[0] == {
        "path": "backend",
        "value": "fsdp",
        "fit": "exact",
        "native": lines[0]["native"],
        "note": lines[0]["note"],
    }
    assert len(lines) > 20


def test_no_report() -> None:
    assert run("translate", TINY, "--report", "none").stderr == ""


def test_output_file_is_whole_or_absent(config: Path) -> None:
    result = run("translate", TINY, "-o", "native.json")
    assert (result.exit_code, result.stdout) == (0, "")
    assert json.loads(Path("native.json").read_text())["data_parallel"] == "fully_shard"
    result = run("translate", TINY, "-o", "nowhere/native.json", "--report", "none")
    assert (result.exit_code, result.stderr) == (
        1,
        "nowhere/native.json: cannot be written (No such file or directory); name a file in a folder that exists and is writable\n",
    )
    assert [path.name for path in config.parent.iterdir()] == ["native.json"], "no draft is left behind"


def test_output_that_is_a_folder(config: Path) -> None:
    Path("folder").mkdir()
    result = run("translate", TINY, "-o", "folder", "--report", "none")
    assert result.exit_code == 1
    assert result.stderr.startswith("folder: cannot be written (")
    assert [path.name for path in config.parent.iterdir()] == ["folder"]


def test_output_through_a_link_keeps_the_link(config: Path) -> None:
    Path("inner").mkdir()
    Path("inner/old.json").write_text("old")
    Path("inner/old.json").chmod(0o640)
    Path("old.json").symlink_to("inner/old.json")
    Path("new.json").symlink_to("inner/new.json")
    for name in ("old.json", "new.json"):
        assert run("translate", TINY, "--report", "none", "-o", name).exit_code == 0
        assert Path(name).is_symlink()
        assert json.loads(Path("inner", name).read_text())["data_parallel"] == "fully_shard"
    assert Path("inner/old.json").stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in Path("inner").iterdir()) == ["new.json", "old.json"]


def test_output_through_links_in_a_circle(config: Path) -> None:
    Path("a").symlink_to("b")
    Path("b").symlink_to("a")
    result = run("translate", TINY, "--report", "none", "-o", "a")
    assert result.exit_code == 1
    assert result.stderr.startswith("a: cannot be written (")
    assert Path("a").is_symlink()


def test_output_to_a_pipe_is_written_and_leaves_it_a_pipe(config: Path) -> None:
    os.mkfifo("pipe")
    reader = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)  # so that opening it for writing does not wait
    try:
        result = run("translate", TINY, "--report", "none", "-o", "pipe")
        text = os.read(reader, 2**16)
    finally:
        os.close(reader)
    assert result.exit_code == 0
    assert json.loads(text)["data_parallel"] == "fully_shard"
    assert Path("pipe").is_fifo()


def test_approximate_is_reported_and_under_strict_refused_with_2(config: Path) -> None:
    config.write_text(ROUGH)
    relaxed = run("translate", "c.yaml")
    assert relaxed.exit_code == 0
    assert "approximate" in relaxed.stderr
    strict = run("translate", "c.yaml", "--strict", "--report", "none", "-o", "native.json")
    assert (strict.exit_code, strict.stdout) == (2, "")
    assert strict.stderr.startswith("c.yaml:3: native.deepspeed.vocabulary_size: 3 is only approximate on deepspeed, and strict is true: ")
    assert not Path("native.json").exists()


def test_strict_in_the_config_counts_too(config: Path) -> None:
    config.write_text(ROUGH + "strict: true\n")
    assert run("translate", "c.yaml").exit_code == 2


def test_strict_with_an_exact_config() -> None:
    assert run("translate", TINY, "--strict").exit_code == 0


def test_unsupported_is_refused_with_1_at_its_line(config: Path) -> None:
    config.write_text(REFUSED)
    result = run("translate", "c.yaml", "--report", "none")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("c.yaml:2: offload.params: 'nvme' is not supported by fsdp: ")


def test_native_key_that_a_field_decides_is_refused_at_its_line(config: Path) -> None:
    config.write_text("native:\n  deepspeed:\n    zero_optimization:\n      stage: 2\n")
    result = run("translate", "c.yaml", "--to", "deepspeed")
    assert result.exit_code == 1
    assert result.stderr.startswith("c.yaml:4: native.deepspeed.zero_optimization.stage: ")


def test_batch_sizes_that_contradict_the_ranks(config: Path) -> None:
    config.write_text("training:\n  global_batch_size: 6\n")
    assert run("translate", "c.yaml", "--world-size", "6").exit_code == 0
    for command in (("translate", "--report", "none"), ("explain",)):
        result = run(*command, "c.yaml", "--world-size", "4")
        assert result.exit_code == 1
        assert result.stderr.startswith("c.yaml:2: training.global_batch_size: is 6, but ")


def test_bad_config_prints_all_problems_and_no_traceback(config: Path) -> None:
    config.write_text("lr: 1\nstrict: maybe\n")
    for command in ("translate", "explain"):
        result = run(command, "c.yaml", "--set", "training.seed=-1")
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.splitlines() == [
            "c.yaml:1: lr: unknown field; did you mean 'optimizer.lr'?",
            "c.yaml:2: strict: must be true or false, got 'maybe' (text)",
            "override: training.seed: must be a whole number of at least 0 and below 4294967296, got -1",
        ]


def test_unknown_backend() -> None:
    result = run("translate", TINY, "--to", "horovod")
    assert (result.exit_code, result.stderr) == (1, "no backend named 'horovod'; installed: deepspeed, fsdp\n")


def test_usage_errors_are_short() -> None:
    for arguments in (["translate"], ["translate", TINY, "--world-size", "0"], ["translte", TINY], ["translate", TINY, "--report", "xml"]):
        result = run(*arguments)
        assert result.exit_code == 2
        assert len(result.stderr.splitlines()) <= 5
        assert "Traceback" not in result.stderr


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("unishard.loading.read", broken)
    assert isinstance(run("translate", TINY).exception, KeyError)


def test_version() -> None:
    assert run("--version").stdout == f"unishard {unishard.__version__}\n"


def test_backends() -> None:
    header, *lines = run("backends").stdout.splitlines()
    assert header.split() == ["backend", "brought", "by", "engine", "to", "install"]
    assert [line.split()[0] for line in lines] == ["deepspeed", "fsdp"]
    assert all(" ready" in line for line in lines)


def test_backends_that_miss_their_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unishard.registry.find_spec", lambda name: None)
    lines = run("backends").stdout.splitlines()[1:]
    assert lines[0].endswith("missing  pip install 'unishard[torch,deepspeed]'")
    assert lines[1].endswith("missing  pip install 'unishard[torch]'")


def test_docs_check_and_write(config: Path) -> None:
    stale = run("docs", "--check")
    assert stale.exit_code == 1
    assert stale.stderr.splitlines() == [
        "MAPPING.md: is stale; run `unishard docs` and commit it",
        "docs/schema.md: is stale; run `unishard docs` and commit it",
    ]
    assert list(config.parent.iterdir()) == [], "--check writes nothing"
    assert run("docs").stdout == "MAPPING.md: written\ndocs/schema.md: written\n"
    assert run("docs", "--check").exit_code == 0
    assert run("docs").stdout == "up to date\n"


def test_docs_with_a_page_that_is_not_text(config: Path) -> None:
    Path("MAPPING.md").write_bytes(b"\xff\xfe")
    result = run("docs", "--check")
    assert result.exit_code == 1
    assert "MAPPING.md: is stale; run `unishard docs` and commit it" in result.stderr.splitlines()


def test_what_the_operating_system_refuses_is_one_message(config: Path) -> None:
    Path("file").touch()
    result = run("docs", "--root", "file")
    assert (result.exit_code, result.stderr) == (1, "file: cannot be used (File exists); name another file or folder\n")


def test_an_error_of_the_operating_system_that_is_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr("unishard.loading.read", broken)
    assert isinstance(run("translate", TINY).exception, OSError)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def explained(monkeypatch: pytest.MonkeyPatch, columns: int) -> str:
    screen = Terminal()
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", screen)
        explain(Path(TINY), ["sharding=zero2"])
    return plain(screen.getvalue())


def plain(shown: str) -> str:
    return re.sub(r"\x1b\[\d*m", "", shown)


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_explain_on_a_narrow_terminal_is_one_block_for_each_field(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    shown = explained(monkeypatch, columns)
    lines = [line.rstrip() for line in shown.splitlines()]
    assert [line.split(" = ")[0] for line in lines if not line.startswith((" ", "("))] == [path for path, _ in leaves(unishard.Config)]
    at = lines.index("sharding.strategy = shard_grad_op  (override)")
    assert lines[at + 1] == "  deepspeed  equivalent: zero_optimization.stage = 2"
    assert lines[at + 2].startswith("             stage 2; gradients travel"), "the note of what is not exact"
    assert any(line.startswith("  fsdp       exact: ") for line in lines[at:])
    assert max(map(len, lines)) <= columns
    assert "zero_optimization.stage3_prefetch_bucket_size" in shown.split(), "no word is torn apart"
    assert "│" not in shown


def test_explain_on_a_wide_terminal_is_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "│ sharding.strategy " in explained(monkeypatch, 140)


def test_the_report_on_a_narrow_terminal_is_one_block_for_each_field(monkeypatch: pytest.MonkeyPatch, config: Path) -> None:
    from unishard.cli.translate import translate

    for columns, drawn in ((80, False), (140, True)):
        screen = Terminal()
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")
        with monkeypatch.context() as patch:
            patch.setattr("sys.stderr", screen)
            translate(Path(TINY), to="deepspeed", set_=["sharding=zero2"], output=Path("native.json"))
        shown = [line.rstrip() for line in plain(screen.getvalue()).splitlines()]
        assert ("sharding.strategy = shard_grad_op" in shown) is not drawn
        assert ("  deepspeed  equivalent: zero_optimization.stage" in shown) is not drawn
        assert any("│" in line for line in shown) is drawn


def test_a_terminal_gets_a_drawn_table() -> None:
    from unishard.cli.table import show

    rows = [("training.seed", "3"), ("sharding.units", "[not markup]")]
    screen, pipe = Terminal(), io.StringIO()
    show(("field", "value"), rows, screen)
    show(("field", "value"), rows, pipe)
    assert "┃" in screen.getvalue()
    assert "[not markup]" in screen.getvalue()
    assert pipe.getvalue() == "field           value\ntraining.seed   3\nsharding.units  [not markup]\n"


@pytest.mark.parametrize("command", [["-m", "unishard"], ["-c", "from unishard.cli import main; main()"]])
def test_as_a_process(command: list[str], config: Path) -> None:
    config.write_text("lr: 1\n")
    result = subprocess.run(
        [sys.executable, *command, "translate", "c.yaml"], capture_output=True, text=True, timeout=60, check=False, cwd=config.parent
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "c.yaml:1: lr: unknown field; did you mean 'optimizer.lr'?\n"


def test_a_reader_that_goes_away_is_no_error(config: Path) -> None:
    process = subprocess.run(
        f"'{sys.executable}' -m unishard schema | head -c 10",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ},
    )
    assert process.stderr == ""


@pytest.mark.parametrize("command", ["--version", "backends", f"explain '{TINY}'", f"translate '{TINY}' --report none"])
def test_output_that_nobody_reads_is_quiet(command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = subprocess.run(
            f"'{sys.executable}' -m unishard {command}",
            shell=True,
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writer)
    assert (result.returncode, result.stderr) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is always full")
@pytest.mark.parametrize("command", ["--version", "backends", f"explain '{TINY}'", f"translate '{TINY}' --report none"])
def test_output_that_does_not_fit_is_one_message(command: str) -> None:
    result = subprocess.run(
        f"'{sys.executable}' -m unishard {command} > /dev/full", shell=True, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert result.returncode == 1
    assert result.stderr == "the output cannot be written (No space left on device); make room, or write it somewhere else\n"


def test_backend_that_cannot_be_imported_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    from unishard import registry

    points = {"broken": EntryPoint("broken", "no_such_module:backend", registry.GROUP), **registry.available()}
    monkeypatch.setattr(registry, "available", lambda: points)
    lines = run("backends").stdout.splitlines()[1:]
    assert "its translator cannot be imported: No module named 'no_such_module'" in lines[0]
    assert [line.split()[0] for line in lines] == ["broken", "deepspeed", "fsdp"]


def test_demo_is_called_with_what_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    import unishard.demo

    calls: list[dict[str, object]] = []
    monkeypatch.setattr(unishard.demo, "run_demo", lambda **arguments: calls.append(arguments))
    assert run("demo", "--out", "there", "--world-size", "3", "--steps", "5").exit_code == 0
    assert calls == [{"out": Path("there"), "world_size": 3, "steps": 5}]


def test_demo_that_fails_has_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    import unishard.demo

    def fail(**_: object) -> None:
        raise unishard.BackendError("the demo needs torch")

    monkeypatch.setattr(unishard.demo, "run_demo", fail)
    result = run("demo")
    assert (result.exit_code, result.stderr) == (1, "the demo needs torch\n")


def test_demo_into_what_is_no_folder(config: Path) -> None:
    Path("file").touch()
    Path("folder/fsdp.json").mkdir(parents=True)
    for out, where in (("file", "file: cannot be used (File exists)"), ("folder", "folder/fsdp.json: cannot be used (Is a directory)")):
        result = run("demo", "--out", out)
        assert (result.exit_code, result.stderr) == (1, f"{where}; name another file or folder\n")
