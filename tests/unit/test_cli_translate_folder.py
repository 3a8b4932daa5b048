from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from running import Terminal, one_line, pasted, plain, run

from unishard.cli.translate_folder import look

DEEPSPEED = (
    '{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": "auto"}, '
    '"steps_per_print": 10}'
)


@pytest.fixture
def project(config: Path) -> Path:
    """A project with two configs, one that is broken, and much else."""
    folder = config.parent / "project"
    files = {
        "conf/ds.json": DEEPSPEED,
        "conf/mine.yaml": "backend: fsdp\nsharding: zero3\nprecision: {compute: bf16, accumulate: bf16}\n",
        "conf/broken.json": DEEPSPEED.replace("}", "", 1),
        "pyproject.toml": "[project]\nname = 'x'\n",
        "package.json": '{"name": "x", "optimizer": 1}',
        "mkdocs.yml": "site_name: x\n",
        "list.json": "[1, 2]",
        "empty.yaml": "",
        "template.yaml": "{{ if x }}: [\n",
        ".git/ds.json": DEEPSPEED,
        "node_modules/x/ds.json": DEEPSPEED,
        "env/pyvenv.cfg": "",
        "env/lib/ds.json": DEEPSPEED,
        "large.json": DEEPSPEED + " " * 2**20,
        "ds.txt": DEEPSPEED,
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_each_config_has_a_line_and_nothing_else_has(project: Path) -> None:
    result = run("translate", "project", "--to", "unishard")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert (lines[0], lines[5]) == ("project/conf/ds.json", "project/conf/mine.yaml")
    assert lines[1] == "  deepspeed: engine deepspeed, strategy shard_grad_op, precision needs input"
    assert (lines[2].startswith("  translates: "), max(map(len, lines)) <= 80) == (True, True)
    assert lines[6] == "  unishard: engine fsdp, strategy full_shard, precision bf16"
    assert re.match("  refused: .*1 unsupported", lines[7])
    assert [" ".join(words) for words in pasted(result.stdout)] == [
        "unishard translate project/conf/ds.json --to unishard -o project/conf/ds.unishard.yaml"
    ]
    told = one_line(result.stdout)
    assert " cannot be read: project/conf/broken.json: 1: is not " in told
    assert " needs input: add --with and the command that trains in quotes, " in told
    assert told.endswith(
        " 10 files: 1 translates to unishard, 1 refused, 1 cannot be read, 7 skipped (no configs, or above 1 MiB)"
    )


def test_the_commands_work(project: Path) -> None:
    (project / "conf/one bit.json").write_text(
        '{"zero_optimization": {"stage": 1}, "optimizer": {"type": "OneBitAdam"}}'
    )
    commands = pasted(run("translate", "project", "--to", "unishard").stdout)
    assert [command[-1] for command in commands] == [
        "project/conf/ds.unishard.yaml",
        "project/conf/one bit.unishard.yaml",
    ]
    for _, *arguments in commands:
        result = run(*arguments)
        assert result.exit_code == 0, result.stderr
        assert Path(arguments[-1]).is_file()


def test_as_json(project: Path) -> None:
    said = json.loads(run("translate", "project", "--to", "deepspeed", "--report", "json").stdout)
    assert said["to"] == "deepspeed"
    assert [(one["path"], one["format"], one["backend"], one["status"]) for one in said["configs"]] == [
        ("project/conf/ds.json", "deepspeed", "deepspeed", 0),
        ("project/conf/mine.yaml", "unishard", "fsdp", 0),
    ]
    assert sum(said["configs"][0]["keys"].values()) >= 4
    assert [one["path"] for one in said["unreadable"]] == ["project/conf/broken.json"]


def test_every_file_is_counted_once(project: Path) -> None:
    strict = "strict: true\nbackend: fsdp\nsharding: zero2\nnative: {deepspeed: {vocabulary_size: 3}}\n"
    (project / "strict.yaml").write_text(strict)
    (project / "secret.json").symlink_to(project / "nowhere.json")
    said = json.loads(run("translate", "project", "--to", "unishard", "--report", "json").stdout)
    counts = said["counts"]
    assert counts == {
        "files": 11,
        "translates": 1,
        "refused": 1,
        "approximate": 1,
        "other_tools": 0,
        "unreadable": 1,
        "skipped": 7,
    }
    assert counts["files"] == sum(counts.values()) - counts["files"]
    assert (len(said["configs"]), len(said["unreadable"]), len(said["skipped"])) == (3, 1, 7)
    there = {
        str(path.relative_to(project.parent))
        for path in project.rglob("*")
        if path.suffix in (".yaml", ".yml", ".json", ".toml")
    }
    there = {path for path in there if not {".git", "node_modules", "env"} & set(path.split("/"))} - {
        "project/secret.json"
    }
    listed = [one["path"] for kind in ("configs", "unreadable", "skipped") for one in said[kind]]
    assert sorted(listed) == sorted(there)
    assert {one["path"]: one["why"] for one in said["skipped"]}["project/large.json"] == "above 1 MiB"
    shown = one_line(run("translate", "project", "--to", "unishard").stdout)
    assert (
        " 11 files: 1 translates to unishard, 1 refused, 1 only approximate, and strict is on, 1 cannot be read, 7 "
        "skipped" in shown
    )


def test_a_file_that_cannot_be_opened_is_counted(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from unishard.formats.advice import surveying

    real = surveying.open_source

    def refuse(path: Path) -> object:
        if path.name == "mine.yaml":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(surveying, "open_source", refuse)
    said = json.loads(run("translate", "project", "--to", "unishard", "--report", "json").stdout)
    assert {"path": "project/conf/mine.yaml", "why": "cannot be opened (Permission denied)"} in said["unreadable"]
    assert said["counts"]["files"] == 10


def test_what_translate_refuses_at_the_end_is_refused(config: Path) -> None:
    Path("p").mkdir()
    Path("p/ds.json").write_text(
        '{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": 2}}'
    )
    translated, (found,) = (
        run("translate", "p/ds.json", "--to", "unishard"),
        json.loads(run("translate", "p", "--to", "unishard", "--report", "json").stdout)["configs"],
    )
    assert translated.exit_code == found["status"]


def test_nothing_is_written(project: Path) -> None:
    before = {path: path.read_bytes() for path in project.parent.rglob("*") if path.is_file()}
    run("translate", "project", "--to", "unishard")
    assert {path: path.read_bytes() for path in project.parent.rglob("*") if path.is_file()} == before


def test_a_project_without_configs(config: Path) -> None:
    said = "0 files: 0 translate to unishard, 0 refused, 0 cannot be read, 0 skipped (no configs, or above 1 MiB)"
    assert one_line(run("translate", ".", "--to", "unishard").stdout) == said


def test_on_a_narrow_terminal(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("sys.stdout", screen)
    look(Path("project"), "unishard", as_json=False)
    lines = [line.rstrip() for line in plain(screen.getvalue()).splitlines()]
    assert "project/conf/ds.json" in lines
    assert "strategy shard_grad_op, precision needs input" in one_line("\n".join(lines))
    assert max(map(len, lines)) <= 60


def test_a_recipe_without_an_engine_is_listed_with_the_reason(project: Path) -> None:
    (project / "sft.yaml").write_text("per_device_train_batch_size: 2\nlearning_rate: 1.0e-4\nbf16: true\n")
    told = one_line(run("translate", "project", "--to", "unishard").stdout)
    assert "project/sft.yaml hf: engine needs input, strategy needs input, precision bf16" in told
    assert "refused: does not say its engine, which its launcher chooses" in told
    said = json.loads(run("translate", "project", "--to", "unishard", "--report", "json").stdout)
    (found,) = [one for one in said["configs"] if one["path"] == "project/sft.yaml"]
    assert (found["engine_open"], found["status"]) == (True, 1)
    assert found["needs_input"][:2] == ["backend", "sharding.strategy"]


def test_configs_of_other_tools_are_listed_and_not_read(project: Path) -> None:
    (project / "neox.yml").write_text(
        "pipe-parallel-size: 1\nmodel-parallel-size: 2\nzero_optimization: {stage: 1}\nnum-layers: 2\n"
    )
    (project / "tulu.yaml").write_text("with_tracking: true\nper_device_train_batch_size: 1\n")
    (project / "trainer.yaml").write_text("defaults: [default]\nstrategy: ddp\naccelerator: gpu\ndevices: 4\n")
    (project / "axo.yaml").write_text("base_model: m\nsequence_len: 8\ndeepspeed: none_such.json\n")
    (project / "config.json").write_text(
        '{"model_type": "gpt_neox", "rotary_pct": 0.25, "hidden_size": 8, "num_attention_heads": 2}'
    )
    shown = one_line(run("translate", "project", "--to", "unishard").stdout)
    assert "project/neox.yml not read: a GPT-NeoX config" in shown
    assert "project/tulu.yaml not read: an open-instruct config; run `unishard init`;" in shown
    assert "project/trainer.yaml not read: a Hydra config" in shown
    assert (
        "project/axo.yaml not read: an axolotl config; translate the DeepSpeed JSON that it names (none_such" in shown
    )
    assert " 15 files: 1 translates to unishard, 1 refused, 4 of other tools, 1 cannot be read, 8 skipped" in shown
    said = json.loads(run("translate", "project", "--to", "unishard", "--report", "json").stdout)
    assert [(one["path"], one["tool"], "`unishard init`" in one["instead"]) for one in said["other_tools"]] == [
        ("project/axo.yaml", "axolotl", True),
        ("project/neox.yml", "GPT-NeoX", True),
        ("project/trainer.yaml", "Hydra", True),
        ("project/tulu.yaml", "open-instruct", True),
    ]
    assert said["counts"]["files"] == sum(said["counts"].values()) - said["counts"]["files"]


def test_deepspeeds_config_in_the_file_of_another_tool_is_read(project: Path) -> None:
    """Inline or named, in a tool's file that is not read and in one that nobody knows."""
    (project / "conf/ppo.yaml").write_text(f"actor_rollout_ref: {{deepspeed_config: {DEEPSPEED}}}\n")
    (project / "mine.yaml").write_text("trainer:\n  deepspeed: conf/ds.json\n")
    told = one_line(run("translate", "project", "--to", "unishard").stdout)
    assert "deepspeed (actor_rollout_ref.deepspeed_config): engine deepspeed, strategy shard_grad_op" in told
    assert "deepspeed (trainer.deepspeed: conf/ds.json): engine deepspeed, strategy shard_grad_op" in told
    commands = [
        command for command in pasted(run("translate", "project", "--to", "unishard").stdout) if "--from" in command
    ]
    assert len(commands) == 2
    for _, *arguments in commands:
        result = run(*arguments)
        assert (result.exit_code, "what the other keys say is not translated" in one_line(result.stderr)) == (0, True)
        assert "strategy: shard_grad_op" in Path(arguments[-1]).read_text()
    assert "(trainer.deepspeed: conf/ds.json) is read with `unishard translate --from deepspeed`" in one_line(
        run("translate", "project/mine.yaml", "--to", "unishard").stderr
    )
