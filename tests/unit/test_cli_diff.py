from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer
from running import Terminal, one_line, plain, run

from unishard import formats
from unishard.cli.diff import diff
from unishard.config.loading import Origin, Origins
from unishard.contract.entries import Entry, KeyEffect, Undecided
from unishard.formats.files.source import Source
from unishard.formats.reading.document import ReadDocument, assemble
from unishard.formats.report.comparing import compare, uncompared


def reading(*entries: Entry) -> ReadDocument:
    """What a file of another tool says."""
    return assemble("other", Source("o.json", {}, Origins(Origin("o.json"))), entries)


def says(field: str, value: object, *, assumed: bool = False) -> Entry:
    written = "auto" if isinstance(value, Undecided) else value
    return Entry((f"their_{field.rpartition('.')[2]}",), written, KeyEffect(fields={field: value}), assumed)


@pytest.mark.parametrize(("columns", "drawn"), [(40, False), (120, True)])
def test_on_a_terminal(config: Path, monkeypatch: pytest.MonkeyPatch, columns: int, drawn: bool) -> None:
    config.write_text("training: {seed: 3}\n")
    Path("d.yaml").write_text("training: {seed: 4}\n")
    screen = Terminal()
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout", screen)
    with pytest.raises(typer.Exit):
        diff(Path("c.yaml"), Path("d.yaml"))
    lines = [line.rstrip() for line in plain(screen.getvalue()).splitlines()]
    assert any("│" in line for line in lines) is drawn
    assert (
        lines == ["training.seed", "  A  3  (training.seed, line 1)", "  B  4  (training.seed, line 1)"]
    ) is not drawn


def test_what_a_tool_assumes_counts_as_said() -> None:
    one = reading(says("training.gradient_clipping", 1.0, assumed=True))
    other = reading(says("training.gradient_clipping", None))
    (difference,) = compare(one, other)
    assert (difference.field, difference.before.value, difference.after.value) == (
        "training.gradient_clipping",
        1.0,
        None,
    )
    assert difference.before.origin == "other assumes their_gradient_clipping"


def test_what_nobody_says_is_the_default() -> None:
    silent = reading(says("sharding.strategy", "full_shard"))
    assert compare(silent, formats.read({"sharding": "full_shard", "optimizer": {"lr": 1e-3}})) == ()
    (difference,) = compare(silent, formats.read({"optimizer": {"lr": 1e-4}}))
    assert (difference.field, difference.before.value, difference.before.origin, difference.after.value) == (
        "optimizer.lr",
        1e-3,
        "not said",
        1e-4,
    )


def test_what_the_script_decides_on_both_sides_is_the_same() -> None:
    field = "training.micro_batch_size"
    sides = [reading(says(field, Undecided(who))) for who in ("the TrainingArguments", "the script")]
    assert compare(*sides) == ()
    (difference,) = compare(sides[0], reading(says(field, 4)))
    assert (difference.before.said, difference.before.origin, difference.after.value) == (
        False,
        "the TrainingArguments",
        4,
    )


def test_other_numbers_of_ranks_are_another_training() -> None:
    from unishard import Topology

    one = reading(says("training.micro_batch_size", 4))
    two, four = (one._replace(topology=Topology(ranks, ranks)) for ranks in (2, 4))
    assert [(at.field, at.before.value, at.after.value) for at in compare(two, four)] == [("ranks", 2, 4)]
    assert compare(one, four) == (), "the launcher says it where the file does not"


def test_a_difference_is_found_in_both_directions() -> None:
    one, other = reading(says("training.seed", 1)), reading(says("training.seed", 2), says("precision.compute", "bf16"))
    forth, back = compare(one, other), compare(other, one)
    assert [(at.field, at.before, at.after) for at in forth] == [(at.field, at.after, at.before) for at in back]
    assert {at.field for at in forth} == {"training.seed", "precision.compute"}


ZERO = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
PURE = {"enabled": True, "bf16_master_weights_and_grads": True}
RUN = {"output_dir": "o", "learning_rate": 1e-4, "num_train_epochs": 1}
STEPS = {"output_dir": "o", "learning_rate": 1e-4, "max_steps": 100}


@pytest.mark.parametrize(
    ("tool", "one", "other", "keys"),
    [
        ("deepspeed", ZERO, {**ZERO, "hybrid_engine": {"enabled": True}}, ["hybrid_engine"]),
        (
            "deepspeed",
            {**ZERO, "bf16": {"enabled": True}},
            {**ZERO, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
            ["torch_autocast.enabled"],
        ),
        (
            "deepspeed",
            {**ZERO, "bf16": {**PURE, "bf16_optimizer_states": True}},
            {**ZERO, "bf16": {**PURE, "bf16_optimizer_states": False}},
            ["bf16.bf16_master_weights_and_grads"],
        ),
        ("hf", RUN, {**RUN, "num_train_epochs": 30}, ["num_train_epochs", "num_train_epochs"]),
        ("hf", STEPS, {**STEPS, "label_smoothing_factor": 0.1}, ["label_smoothing_factor"]),
        ("hf", STEPS, {**STEPS, "optim": "adafactor"}, ["optim"]),
        ("hf", {**STEPS, "packing": True}, {**STEPS, "packing": False}, ["packing", "packing"]),
        ("unishard", {"x-data": {"path": "a"}}, {"x-data": {"path": "b"}}, ["x-data", "x-data"]),
    ],
)
def test_what_no_field_holds_is_not_the_same_training(
    tmp_path: Path, tool: str, one: dict[str, object], other: dict[str, object], keys: list[str]
) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, document in zip(files, (one, other), strict=True):
        file.write_text(json.dumps(document))
    told = ["--from-a", tool, "--from-b", tool]
    result = run("diff", *map(str, files), *told)
    assert result.exit_code == 1
    assert "same training" not in result.stdout
    found = re.findall(r"not compared: \S+: (\S+) = ", one_line(result.stderr))
    assert found == keys
    for file in files:
        result = run("diff", str(file), str(file), *told)
        assert (result.exit_code, result.stdout) == (0, "same training\n"), "every key has the same value"


def test_what_is_refused_is_equal_to_itself_inside_the_file_of_another_tool() -> None:
    refused = {**ZERO, "bf16": {"enabled": True}, "hybrid_engine": {"enabled": True}}
    other = {**STEPS, "per_device_train_batch_size": 1, "bf16": True, "deepspeed": refused}
    inside, alone = formats.read(other, "hf"), formats.read(refused, "deepspeed")
    assert "hybrid_engine" not in {one.entry.path[-1] for one in uncompared(inside, alone)}


def test_a_part_of_the_updates_that_is_spelled_out_counts() -> None:
    parts = [formats.read({**RUN, "warmup_ratio": part}, "hf") for part in (0.1, 0.2)]
    assert [difference.field for difference in compare(*parts)] == ["scheduler.warmup_steps"]
