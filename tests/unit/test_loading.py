"""What a person gets to read when a config file is wrong: every message, word for word."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
from ruamel.yaml import YAML

import unishard
from unishard import Config, ConfigError
from unishard.config.loading import launched, yaml_file
from unishard.errors import Problem, UnusedFieldWarning

BAD: list[dict[str, Any]] = YAML(typ="safe", pure=True).load(Path(__file__).with_name("bad_configs.yaml"))
BAD += [
    {"text": "[" * 3000, "messages": ["c.yaml: is nested too deeply; the schema has two levels"]},
    {
        "text": "training:\n  seed: " + "9" * 5000,
        "messages": [f"c.yaml:2: training.seed: cannot be read as a number: '{'9' * 40}'; write digits"],
    },
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.get("case", case["messages"][0])[:80])
def test_message(folder: Path, case: dict[str, Any]) -> None:
    (folder / "c.yaml").write_text(case.get("text", ""))
    with pytest.raises(ConfigError) as caught:
        unishard.load({}, [case["override"]]) if "override" in case else unishard.load("c.yaml")
    assert str(caught.value).splitlines() == case["messages"]
    assert [str(problem) for problem in caught.value.problems] == case["messages"]
    assert caught.value.__suppress_context__ or caught.value.__context__ is None, "a library's own error would be shown"


def message(source: object, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        unishard.load(source, overrides)  # type: ignore[arg-type]
    return str(caught.value)


def test_missing_file_names_a_near_one(folder: Path) -> None:
    (folder / "tiny.yaml").write_text("backend: fsdp")
    assert message("tiny.yml") == "tiny.yml: file not found; did you mean 'tiny.yaml'?"
    assert message("nowhere/x.yaml") == "nowhere/x.yaml: file not found; name a YAML file"


def test_directory(folder: Path) -> None:
    assert message(folder) == f"{folder}: is a directory; name a YAML file in it"


def test_binary_file(folder: Path) -> None:
    (folder / "c.yaml").write_bytes(b"\x7fELF\xff\x00")
    assert message("c.yaml") == "c.yaml: is not UTF-8 text (byte 0xff at offset 4); name a YAML file saved as UTF-8"
    (folder / "c.yaml").write_bytes("backend: fsdp".encode("utf-16"))
    assert message("c.yaml") == "c.yaml: is not UTF-8 text (byte 0xff at offset 0); name a YAML file saved as UTF-8"


def test_file_without_end() -> None:
    assert message("/dev/zero") == "/dev/zero: is larger than 1048576 bytes; name a config file"


def test_nul_in_the_name() -> None:
    assert "is not a path (embedded null byte); name a YAML file" in message("a\0b")


def test_neither_a_path_nor_a_mapping() -> None:
    accepted = "load expects the path of a YAML file or a mapping such as {'backend': 'fsdp'}"
    assert message(["backend"]) == f"{accepted}, got [backend] (list)"
    assert message(None).startswith(
        "load() without a path reads the config that `unishard launch` was given, but this script was started"
    )
    assert message(3) == f"{accepted}, got 3 (int)"


def test_a_number_is_suggested_only_as_yaml_reads_it() -> None:
    whole = "training.micro_batch_size: must be a whole number of at least 1, got"
    assert message({"training": {"micro_batch_size": "\u0663"}}) == f"{whole} '\u0663' (text); write 3"  # an Arabic 3
    assert message({"training": {"micro_batch_size": "0o17"}}) == f"{whole} '0o17' (text)"
    learning_rate = "optimizer.lr: must be a number of at least 0, got"
    assert message({"optimizer": {"lr": "\u0661e-5"}}) == f"{learning_rate} '\u0661e-5' (text); write 1e-05"
    assert message({"optimizer": {"lr": "inf"}}) == f"{learning_rate} 'inf' (text)"
    assert unishard.load({}, ["optimizer.lr=1e-05"]).optimizer.lr == 1e-5


def test_mapping_has_no_lines() -> None:
    assert message({"training": {"seed": -1}, "sharding": {3: 4}}).splitlines() == [
        "sharding: has the key 3, which is not a string; write the name of a field",
        "training.seed: must be a whole number of at least 0 and below 4294967296, got -1",
    ]


def test_mapping_is_left_alone() -> None:
    source = {"sharding": "full_shard", "native": {"deepspeed": {"a": [1]}}}
    unishard.load(source, ["sharding.units=[A]", "native.deepspeed.b=2"])
    assert source == {"sharding": "full_shard", "native": {"deepspeed": {"a": [1]}}}


def test_yaml_1_2(folder: Path) -> None:
    (folder / "c.yaml").write_text(
        "\ufeffbackend: NO\noptimizer: {lr: 1e-5, weight_decay: 0}\nnative: {x: {on: off, date: 2024-01-31, octal: "
        "0o17, when: 12:30}}\n",
        encoding="utf-8",
    )
    cfg = unishard.load(folder / "c.yaml")
    assert cfg.backend == "no"
    assert (cfg.optimizer.lr, cfg.optimizer.weight_decay) == (1e-5, 0.0)
    assert cfg.native == {"x": {"on": "off", "date": "2024-01-31", "octal": 15, "when": "12:30"}}


def test_anchors_are_values(folder: Path) -> None:
    (folder / "c.yaml").write_text("training: {micro_batch_size: &n 4, gradient_accumulation_steps: *n}\n")
    training = unishard.load("c.yaml").training
    assert (training.micro_batch_size, training.gradient_accumulation_steps) == (4, 4)


def test_json_is_yaml(folder: Path) -> None:
    cfg = Config.model_validate({"optimizer": {"lr": 1e-8, "betas": [0.5, 0.75]}, "sharding": {"units": ["A"]}})
    (folder / "c.json").write_text(cfg.model_dump_json(exclude_unset=True))
    assert unishard.load("c.json") == cfg


def test_a_list_where_a_short_form_is_meant() -> None:
    with pytest.raises(ConfigError, match=r"sharding\.strategy: must be one of .*, got \[\] \(a list\)"):
        unishard.load({"sharding": []})


def test_a_pipe_is_read_and_an_empty_one_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "c.yaml"
    os.mkfifo(pipe)
    with pytest.raises(
        ConfigError, match=r"c\.yaml: is an empty pipe; name a YAML file, or start the writer of the pipe first"
    ):
        unishard.load(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(pipe, os.O_WRONLY)
    os.close(reader)
    later = Timer(0.2, lambda: (os.write(writer, b"backend: deepspeed"), os.close(writer)))
    later.start()
    assert unishard.load(pipe).backend == "deepspeed", "as with a shell's <(command)"
    later.join()


@pytest.mark.parametrize("pattern", ["(", "a{99999999999999999999}", "(" * 5000 + ")" * 5000], ids=len)
def test_a_pattern_that_python_cannot_compile_is_one_short_error(pattern: str) -> None:
    with pytest.raises(
        ConfigError, match=r"optimizer\.no_decay: contains .*, which is not a regular expression"
    ) as error:
        unishard.load({"optimizer": {"no_decay": [pattern]}})
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    "seed", [10**5000, -(10**5000), [10**5000], {10**5000: 1}], ids=lambda seed: type(seed).__name__
)
def test_a_number_that_python_does_not_write_is_one_short_error(seed: object) -> None:
    with pytest.raises(ConfigError, match=r"training\.seed: .*0x") as error:
        unishard.load({"training": {"seed": seed}})
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("backend: fsdp\nx: " + "[" * 5000, "c.yaml: is nested too deeply; the schema has two levels"),
        (
            "".join(f"k{index}: {index}\n" for index in range(11_000)),
            "c.yaml: has more than 10000 lines, which no config has",
        ),
        ("x-own: [" + "1," * 600 + "1]", "c.yaml: has more than 500 keys and values, which no config has"),
        (
            "x-own: {" + ",".join(f"k{index}: {index}" for index in range(300)) + "}",
            "has more than 500 keys and values",
        ),
    ],
    ids=["deep", "long", "a list", "a mapping"],
)
def test_a_file_that_would_be_read_for_minutes_is_one_short_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str
) -> None:
    monkeypatch.setattr(yaml_file, "_MOST_WRITTEN", 500)  # of 25,000, for which this test would take seconds
    (folder / "c.yaml").write_text(text)
    assert says in message("c.yaml")


def test_a_message_lists_a_hundred_problems_and_keeps_both_ends_of_a_long_value(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("".join(f"k{number}: 1\n" for number in range(130)))
    with pytest.raises(ConfigError) as many:
        unishard.load(path)
    lines = str(many.value).splitlines()
    assert len(many.value.problems) == 130
    assert (len(lines), lines[-1]) == (101, "... and 30 problems more")
    problem = Problem("backend", f"no backend named {'x' * 100_000}; write fsdp")
    assert len(str(ConfigError([problem]))) < 3000
    assert str(ConfigError([problem])).startswith("backend: no backend named xx")
    assert str(ConfigError([problem])).endswith("xx; write fsdp")


# -- the config that `unishard launch` was given ---------------------------------------------------


@pytest.mark.parametrize(
    ("given", "changes", "reads", "said"),
    [
        ("seed: 1", [], None, ""),
        ("seed: 1", ["training.seed=3"], None, ""),
        ("seed: 1", [], "given.yaml", ""),
        ("seed: 1", ["launch.nodes=1"], "given.yaml", ""),
        ("seed: 1", ["training.seed=3"], "given.yaml", "given.yaml and --set training.seed=3"),
        ("seed: 1", [], "other.yaml", "given.yaml, and this script trains without it"),
        ("", [], "other.yaml", ""),
        ("seed: 1", [3], "other.yaml", ""),  # who reads it is told that these are no overrides
    ],
)
def test_a_script_that_does_not_read_the_config_of_the_launcher_is_told(
    tmp_path, monkeypatch, given, changes, reads, said
):
    monkeypatch.chdir(tmp_path)
    Path("given.yaml").write_text("launch: {nodes: 1}\n" + (f"training: {{{given}}}\n" if given else ""))
    Path("other.yaml").write_text("training: {seed: 2}\n")
    for name, value in launched.variables(str(tmp_path / "given.yaml"), changes).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launched, "_used", False)
    monkeypatch.setattr(launched, "_read", set())
    unishard.load(reads)
    assert said in launched.unused()
    assert bool(said) == bool(launched.unused())


def test_null_drops_a_section(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("backend: fsdp\nlogging: {to: [jsonl], dir: logs}\ncheckpoint: {dir: x}\n")
    cfg = unishard.load(file, overrides=["logging=null", "profile=null"])
    assert (cfg.logging.to, cfg.checkpoint.dir) == ([], "x")
    assert unishard.load(file, overrides=["logging=null", "logging.to=[progress]"]).logging.dir is None


FULL = """backend: fsdp
logging: {to: [jsonl], dir: logs, every_steps: 5}
scheduler: {name: cosine, total_steps: 100, warmup_steps: 3}
optimizer: {name: adamw, lr: 0.1, betas: [0.9, 0.9]}
checkpoint: {dir: x, every_steps: 4, keep_last: 2, keep_best: 1}
"""


@pytest.mark.parametrize(
    ("change", "unused"),
    [
        ("logging.to=[]", "logging.every_steps"),
        ("scheduler.name=constant", "scheduler.total_steps"),
        ("optimizer.name=sgd", "optimizer.betas"),
        ("checkpoint.dir=null", "checkpoint.every_steps"),
        ("checkpoint.keep_last=null", "checkpoint.keep_best"),
    ],
)
def test_what_an_override_leaves_without_a_use_is_a_note(change: str, unused: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(FULL)
    with pytest.warns(UnusedFieldWarning) as notes:
        unishard.load(file, overrides=[change])
    assert any(f": {unused} is left out: " in str(note.message) for note in notes)
    with pytest.raises(ConfigError, match=unused):
        unishard.load(file, overrides=[change, f"{unused}=[0.9, 0.8]" if "betas" in unused else f"{unused}=7"])
    file.write_text(FULL + "training: {gradient_clipping: -1}\n")
    with pytest.raises(ConfigError, match="gradient_clipping"):
        unishard.load(file, overrides=[change])
