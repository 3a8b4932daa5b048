from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from running import TINY, Terminal, plain, run

import unishard
from unishard.cli.explain import explain
from unishard.config import leaves
from unishard.engine.resolve import resolve
from unishard.testing.models import mlp


def explained(monkeypatch: pytest.MonkeyPatch, columns: int) -> str:
    screen = Terminal()
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", screen)
        explain(Path(TINY), set_=["sharding=zero2"], every=True)
    return plain(screen.getvalue())


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_explain_on_a_narrow_terminal_is_one_block_for_each_field(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    shown = explained(monkeypatch, columns)
    lines = [line.rstrip() for line in shown.splitlines()]
    assert [line.split(" = ")[0] for line in lines if not line.startswith((" ", "("))] == [
        path for path, _ in leaves(unishard.Config)
    ]
    at = lines.index("sharding.strategy = shard_grad_op  (override)")
    assert lines[at + 1] == "  deepspeed  equivalent: zero_optimization.stage = 2"
    assert lines[at + 2].startswith("             stage 2; gradients travel"), "the note of what is not exact"
    assert any(line.startswith("  fsdp       exact: ") for line in lines[at:])
    assert max(map(len, lines)) <= columns
    assert "zero_optimization.reduce_bucket_size" in shown.split(), "no word is torn apart"
    assert "│" not in shown


def test_explain_on_a_wide_terminal_is_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "│ sharding.strategy " in explained(monkeypatch, 200)


def test_in_a_pipe_it_is_one_block_for_each_field_in_short_lines(config: Path) -> None:
    config.write_text("training: {seed: 1}\n")
    for options in ((), ("--all",)):
        lines = run("explain", "c.yaml", *options).stdout.splitlines()
        assert "training.seed = 1  (c.yaml:1)" in lines
        assert max(map(len, lines)) <= 120
        assert ("strict = false  (default)" in lines) is bool(options)


def test_one_backend_alone_is_one_line() -> None:
    shown = run("explain", TINY, "deepspeed").stdout
    assert set(re.findall(r"^  (\w+)", shown, re.MULTILINE)) == {"deepspeed"}


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
def test_native_prints_what_prepare_hands_to_the_engine(backend: str) -> None:
    result = run("explain", TINY, backend, "--native", "--world-size", "8", "--gpus-per-node", "4")
    topology = unishard.Topology(world_size=8, local_world_size=4)
    assert (result.exit_code, result.stderr) == (0, "")
    assert (
        json.loads(result.stdout) == unishard.translate(unishard.load(TINY), backend=backend, topology=topology).native
    )


@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
def test_native_of_a_model_is_all_that_prepare_hands_to_the_engine(backend: str, strategy: str, config: Path) -> None:
    config.write_text(f"backend: {backend}\nsharding: {strategy}\ntraining: {{gradient_clipping: 1.0}}\n")
    printed = run("explain", "c.yaml", "--native", "--model", "unishard.testing.models:mlp", "--world-size", "2")
    plan = resolve(mlp(), unishard.load("c.yaml"), unishard.Topology(world_size=2, local_world_size=2))
    assert plan.engine is not None
    assert json.loads(printed.stdout) == plan.engine.native
    if backend == "deepspeed":
        names = ["inp", "blocks.0", "blocks.1", "blocks.2", "head"] if strategy == "full_shard" else []
        assert plan.engine.native["zero_optimization"]["leaf_module"]["names"] == names
        assert plan.engine.native["gradient_clipping"] == (1.0 if names else 0.0)


def partly_frozen() -> torch.nn.Module:
    """A model whose second block does not train."""
    model = mlp()
    model.blocks[1].requires_grad_(False)
    return model


MUON = """
optimizer:
  name: muon
  lr: 0.02
  adamw_lr: 3e-4
  weight_decay: 0.1
  no_decay: [norm]
  groups: [{params: [head], lr: 1e-5}]
"""


def test_of_a_model_it_says_how_each_parameter_is_updated(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    config.write_text(MUON)
    result = run("explain", "c.yaml", "--model", "test_cli_explain:partly_frozen")
    header, *rows = (re.split(r"  +", line) for line in result.stdout.partition("\n\n")[2].splitlines())
    assert header == ["parameters", "shape", "number", "updated by", "lr", "weight decay"]
    shown = {name: rest for name, *rest in rows}
    assert shown["blocks.0,2.up.weight"] == ["37 x 23", "2", "muon", "0.02", "0.1"]
    assert shown["blocks.1.up.weight"] == ["37 x 23", "1", "frozen"]
    assert shown["blocks.0,2.norm.weight"] == ["23", "2", "adamw", "0.0003", "0.0"]
    assert shown["head.weight"] == ["11 x 23", "1", "adamw", "1e-05", "0.1"]
    assert sum(int(row[2]) for row in rows) == len([*mlp().parameters()])


def test_of_a_model_patterns_that_do_not_fit_are_refused_at_their_line(config: Path) -> None:
    config.write_text("optimizer:\n  name: muon\n  matrices: [attention]\n")
    result = run("explain", "c.yaml", "--model", "unishard.testing.models:mlp")
    assert result.exit_code == 1
    assert result.stderr.startswith("c.yaml:3: optimizer.matrices: 'attention' matches no parameter")


def test_native_takes_the_backend_of_the_config() -> None:
    as_written, changed = (
        run("explain", TINY, "--native"),
        run("explain", TINY, "--native", "--set", "backend=deepspeed"),
    )
    assert "data_parallel" in json.loads(as_written.stdout)
    assert json.loads(changed.stdout)["zero_optimization"]["stage"] == 3


def test_the_ranks_are_those_of_the_config_unless_an_option_says_others(config: Path) -> None:
    config.write_text("launch: {nodes: 2, processes_per_node: 4}\ntraining: {micro_batch_size: 3}\n")
    native = run("explain", "c.yaml", "deepspeed", "--native")
    assert json.loads(native.stdout)["train_batch_size"] == 24
    assert native.stderr == "note: for 8 ranks (2 nodes), as launch says\n"
    assert "computed for 8 ranks" in run("explain", "c.yaml").stdout
    given = run("explain", "c.yaml", "deepspeed", "--native", "--world-size", "2")
    assert (json.loads(given.stdout)["train_batch_size"], given.stderr) == (6, "")
    config.write_text("sharding: full_shard\n")
    assert run("explain", "c.yaml", "--all").stderr == "note: for 1 rank; add --world-size N for more\n"


def test_it_shows_the_defaults_that_these_give_another_meaning(config: Path) -> None:
    def follows(text: str, *backend: str) -> set[str]:
        config.write_text(text)
        shown = run("explain", "c.yaml", *backend, "--world-size", "8").stdout
        return set(re.findall(r"^(\S+) = .*  \((?:default|computed for 8 ranks)\)$", shown, re.MULTILINE))

    assert follows("{}") == {"training.global_batch_size"}
    assert follows("compile: per_block\n") >= {"compile.backend"}
    assert "sharding.group_size" in follows("sharding: hybrid_shard\n")
    of_each = [follows("sharding: ddp\n", backend) for backend in ("deepspeed", "fsdp")]
    assert ["communication.overlap" in one for one in of_each] == [True, False]


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
def test_what_is_off_does_not_read_as_if_it_were_on(config: Path, backend: str) -> None:
    config.write_text(
        "sharding: ddp\nactivation_checkpointing: none\ncheckpoint: {keep_last: null}\ncommunication: {desync_check: "
        "false}\n"
    )
    shown = run("explain", "c.yaml", backend, "--all").stdout
    lines = dict(re.findall(r"^(\S+) = .*\n  \w+ +(.*)$", shown, re.MULTILINE))
    for path in (
        "activation_checkpointing",
        "compile.mode",
        "checkpoint.dir",
        "optimizer.amsgrad",
        "optimizer.groups",
        "strict",
    ):
        assert lines[path] == "off", path
    assert lines["compile.backend"] == "unused: nothing is compiled"
    assert lines["offload.pin_memory"] == "unused: nothing is offloaded"
    assert lines["sharding.group_size"] == "unused: the strategy has no groups"
    assert lines["communication.desync_timeout"] == "unused: desync_check is off"
    assert lines["training.global_batch_size"] not in ("off", "unused")
    notes = [line for line in shown.splitlines() if line.startswith("    ")]
    assert not any("prefetch" in line for line in notes), "nothing is said of a setting that is not there"
    assert "group_size" in run("explain", "c.yaml", backend, "--set", "sharding=hybrid_shard").stdout
