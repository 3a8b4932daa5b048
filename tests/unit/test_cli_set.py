from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML
from running import TINY, run
from schema_strategies import documents

import unishard
from unishard.config.loading.editing import edit
from unishard.config.nested import flat

FILE = """\
# Mine.
backend: fsdp # or the other

sharding: full_shard  # why not

# Half of it.
precision: 'bf16'

training:
  # as many as fit
  micro_batch_size: 4   # four
  seed: 1

optimizer: {name: adamw, lr: 3e-4}
"""


def edited(config: Path, text: str, *changes: str) -> str:
    config.write_bytes(text.encode())
    result = run("set", "c.yaml", *changes)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    return config.read_bytes().decode()


def test_only_the_values_change(config: Path) -> None:
    after = edited(
        config, FILE, "training.micro_batch_size=16", "backend=deepspeed", "optimizer.lr=1e-5", "sharding=zero2"
    )
    changed = [(old, new) for old, new in zip(FILE.splitlines(), after.splitlines(), strict=True) if old != new]
    assert changed == [
        ("backend: fsdp # or the other", "backend: deepspeed # or the other"),
        ("sharding: full_shard  # why not", "sharding: zero2  # why not"),
        ("  micro_batch_size: 4   # four", "  micro_batch_size: 16   # four"),
        ("optimizer: {name: adamw, lr: 3e-4}", "optimizer: {name: adamw, lr: 1e-5}"),
    ]


def test_new_fields_go_where_the_schema_has_them(config: Path) -> None:
    after = edited(
        config, FILE, "training.gradient_clipping=1.0", "strict=true", "optimizer.eps=1e-6", "training.last_window=drop"
    )
    added = [line for line in after.splitlines() if line not in FILE.splitlines()]
    assert added == [
        "  gradient_clipping: 1.0",
        "  last_window: drop",
        "optimizer: {name: adamw, lr: 3e-4, eps: 1e-6}",
        "strict: true",
    ]
    assert "  micro_batch_size: 4   # four\n  gradient_clipping: 1.0\n  last_window: drop\n  seed: 1\n" in after


def test_a_short_form_is_written_out_only_where_it_must_be(config: Path) -> None:
    assert "\nsharding: hybrid_shard  # why not\n" in edited(config, FILE, "sharding.strategy=hybrid_shard")
    after = edited(config, FILE, "sharding.units=[A, B]")
    assert "\nsharding:  # why not\n  strategy: full_shard\n  units: [A, B]\n\n# Half of it.\n" in after
    after = edited(config, FILE, "precision.reduce=bf16")
    assert "\nprecision:\n  compute: 'bf16'\n  reduce: bf16\n\ntraining:\n" in after


def test_a_short_form_for_two_fields(config: Path) -> None:
    assert edited(config, "offload: cpu", "offload.optimizer=none") == "offload:\n  params: cpu\n  optimizer: none"


def test_sections_that_are_not_there_yet(config: Path) -> None:
    assert (
        edited(config, "{}\n", "training.seed=1", "training.last_window=drop")
        == "{training: {seed: 1, last_window: drop}}\n"
    )
    after = edited(config, "# a\nstrict: true\n", "native.deepspeed.aio.block_size=8")
    assert after == "# a\nstrict: true\nnative:\n  deepspeed:\n    aio:\n      block_size: 8\n"


def test_lists_over_several_lines(config: Path) -> None:
    after = edited(
        config, "sharding:\n  units:\n    - A  # one\n    - B\n  # below\nstrict: true\n", "sharding.units=[C]"
    )
    assert after == "sharding:\n  units: [C]\n  # below\nstrict: true\n"


def test_line_ends_and_indentation_stay(config: Path) -> None:
    before = "training:\r\n    seed: 1 # c\r\n\r\nstrict: false\r\n"
    after = edited(config, before, "training.seed=5", "sharding.strategy=zero2", "training.last_window=drop")
    assert after == "sharding:\r\n    strategy: zero2\r\n" + before.replace("1 # c\r\n", "5 # c\r\n").replace(
        "    seed", "    last_window: drop\r\n    seed"
    )


def test_a_placeholder_is_decided_one_at_a_time(config: Path) -> None:
    before = (
        "training:\n  micro_batch_size: ${training.micro_batch_size}  # needs your decision\noptimizer:\n  lr: "
        "${optimizer.lr}\n"
    )
    after = edited(config, before, "training.micro_batch_size=4")
    assert after == before.replace("${training.micro_batch_size}", "4")
    edited(config, after, "optimizer.lr=1e-3")
    assert unishard.load(config).optimizer.lr == 1e-3


def test_a_file_that_has_mistakes_already_is_left_alone(config: Path) -> None:
    config.write_text("lr: 1\n")
    result = run("set", "c.yaml", "strict=true")
    assert result.exit_code == 1
    assert result.stderr.startswith("c.yaml:1: lr: unknown field")
    assert config.read_text() == "lr: 1\n"


@pytest.mark.parametrize(
    ("text", "change", "changed"),
    [
        (
            "training:\n  gradient_clipping:\n  seed: 3\n",
            "training.gradient_clipping=1.5",
            "training:\n  gradient_clipping: 1.5\n  seed: 3\n",
        ),
        (
            "training:\n  gradient_clipping: # none\n",
            "training.gradient_clipping=1.5",
            "training:\n  gradient_clipping: 1.5 # none\n",
        ),
        ("checkpoint:\nstrict: true\n", "checkpoint.dir=a", "checkpoint: a\nstrict: true\n"),
        ("checkpoint:\n  dir:\nstrict: true\n", "checkpoint.dir=a", "checkpoint:\n  dir: a\nstrict: true\n"),
        (
            "training: {gradient_clipping: , seed: 3}\n",
            "training.gradient_clipping=1.5",
            "training: {gradient_clipping: 1.5 , seed: 3}\n",
        ),
    ],
)
def test_a_value_that_is_not_written_is_filled_in(config: Path, text: str, change: str, changed: str) -> None:
    config.write_text(text)
    assert run("set", "c.yaml", change).exit_code == 0
    assert config.read_text() == changed


def test_a_value_that_another_one_refers_to_is_left_alone(config: Path) -> None:
    text = "training:\n  micro_batch_size: &n 4\n  gradient_accumulation_steps: *n\n"
    config.write_text(text)
    result = run("set", "c.yaml", "training.gradient_accumulation_steps=2")
    assert (result.exit_code, config.read_text()) == (1, text)
    assert result.stderr == "c.yaml: cannot be edited in place; edit it by hand\n"


def test_a_file_that_cannot_be_written(config: Path) -> None:
    result = run("set", "nowhere/c.yaml", "strict=true")
    assert result.exit_code == 1
    assert "nowhere/c.yaml: file not found" in result.stderr


def as_yaml(document: dict) -> str:
    out = io.StringIO()
    YAML().dump(document, out)
    return out.getvalue()


@given(document=documents(), other=documents(), write=st.sampled_from([json.dumps, as_yaml]), data=st.data())
def test_the_file_means_what_was_asked(document, other, write, data, tmp_path_factory) -> None:
    """Whatever the file and whichever field: it is refused as `load` refuses it, or the file means the old config with
    the change."""
    file = tmp_path_factory.mktemp("set") / "c.yaml"
    file.write_text(write(document))
    path, value = data.draw(st.sampled_from(list(flat(other))))
    change = f"{path}={json.dumps(value)}"
    try:
        wanted = unishard.load(file, [change])
    except unishard.ConfigError as error:
        with pytest.raises(unishard.ConfigError, match=re.escape(error.problems[0].what)):
            edit(file, [change])
    else:
        file.write_text(edit(file, [change]))
        assert unishard.load(file) == wanted


def test_every_config_that_comes_with_unishard_can_be_edited(config: Path) -> None:
    for source in sorted(Path(TINY).parent.glob("*.yaml")):
        text = source.read_text()
        after = edited(config, text, "training.seed=77", "strict=true")
        assert {line for line in text.splitlines() if "#" in line} <= set(after.splitlines()), (
            "each comment is where it was"
        )
        assert unishard.load(config) == unishard.load(source, ["training.seed=77", "strict=true"])


@pytest.mark.parametrize("command", [("set", "training.seed=1"), ("explain",)])
def test_a_config_of_another_tool_is_named_and_how_to_translate_it(command: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 2}, "train_batch_size": 8}')
    done = run(command[0], str(path), *command[1:])
    assert done.exit_code == 1
    assert "is a config of deepspeed" in done.output
    assert f"unishard translate {path} --to unishard" in done.output
    assert "unknown field" not in done.output


def test_a_file_of_ours_with_mistakes_is_not_taken_for_another_tools(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("optimizer: {nme: adamw}\nscheduler: {type: cosine}\nactivation_checkpointing: full\n")
    assert "unknown field" in run("explain", str(path)).output
