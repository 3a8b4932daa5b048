"""What a person gets to read when a config file is wrong: every message, word for word."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Timer

import pytest

import unishard
from unishard import Config, ConfigError
from unishard.config.loading import document
from unishard.errors import Problem

BAD: list[tuple[str, str, list[str]]] = [
    (
        "empty",
        "",
        [
            "c.yaml: is empty; write at least 'backend: fsdp'",
        ],
    ),
    (
        "comments only",
        "# nothing yet\n",
        [
            "c.yaml: is empty; write at least 'backend: fsdp'",
        ],
    ),
    (
        "a list",
        "- fsdp\n",
        [
            "c.yaml:1: contains a list; write 'field: value' lines, such as 'backend: fsdp'",
        ],
    ),
    (
        "a scalar",
        "fsdp\n",
        [
            "c.yaml:1: contains a single value; write 'field: value' lines, such as 'backend: fsdp'",
        ],
    ),
    (
        "unclosed bracket",
        "backend: fsdp\nsharding:\n  units: [A\n",
        [
            "c.yaml:3: is not YAML: while parsing a flow sequence: expected ',' or ']', but got '<stream end>'; close "
            "the bracket that is opened here",
        ],
    ),
    (
        "unclosed quote",
        "backend: 'fsdp\n",
        [
            "c.yaml:1: is not YAML: while scanning a quoted scalar: found unexpected end of stream; close the quote "
            "that is opened here",
        ],
    ),
    (
        "colon in value",
        "backend: fsdp: x\n",
        [
            "c.yaml:1: is not YAML: mapping values are not allowed here; put the value in quotes, or check the "
            "indentation",
        ],
    ),
    (
        "tab",
        "training:\n\tseed: 1\n",
        [
            "c.yaml:2: is not YAML: while scanning for the next token: found character '\\t' that cannot start any "
            "token; indent with spaces, not with tabs",
        ],
    ),
    (
        "bad indentation",
        "training:\n    seed: 1\n  micro_batch_size: 2\n",
        [
            "c.yaml:3: is not YAML: while parsing a block mapping: expected <block end>, but found '<block mapping "
            "start>'; check the indentation",
        ],
    ),
    (
        "undefined alias",
        "backend: *name\n",
        [
            "c.yaml:1: is not YAML: found undefined alias 'name'; define it with & first, or put the value in quotes",
        ],
    ),
    (
        "two documents",
        "backend: fsdp\n---\nbackend: deepspeed\n",
        [
            "c.yaml:2: is not YAML: expected a single document in the stream, but found another document; keep one "
            "document in the file",
        ],
    ),
    (
        "control character",
        "backend: \u0001\n",
        [
            "c.yaml:1: contains the control character #x0001; remove it, or name a YAML file",
        ],
    ),
    (
        "too deep",
        "[" * 3000,
        [
            "c.yaml: is nested too deeply; the schema has two levels",
        ],
    ),
    (
        "duplicate keys",
        "backend: fsdp\ntraining:\n  seed: 1\n  seed: 2\nbackend: deepspeed\n",
        [
            "c.yaml:4: training.seed: is a duplicate of line 3; remove one of the two",
            "c.yaml:5: backend: is a duplicate of line 1; remove one of the two",
        ],
    ),
    (
        "merge key",
        "training:\n  <<: {seed: 1}\n",
        [
            "c.yaml:2: training.<<: merge keys are not part of YAML 1.2; write out the fields",
        ],
    ),
    (
        "key is a list",
        "? [1, 2]\n: 3\n",
        [
            "c.yaml:1: has a key that is not a string; write 'field: value' lines",
        ],
    ),
    (
        "number as key",
        "1: 2\n",
        [
            "c.yaml:1: 1: unknown field; known here: backend, sharding, precision, offload, activation_checkpointing, "
            "training, optimizer, scheduler, communication, compile, checkpoint, logging, profile, launch, strict, "
            "native",
        ],
    ),
    (
        "tag",
        "backend: !engine fsdp\n",
        [
            "c.yaml:1: backend: has the YAML tag !engine, which is not supported; remove it",
        ],
    ),
    (
        "refers to itself",
        "sharding:\n  units: &u [*u]\n",
        [
            "c.yaml:2: sharding.units[0]: refers to itself; write the value",
        ],
    ),
    (
        "variable",
        "optimizer:\n  lr: ${LR}\n",
        [
            "c.yaml:2: optimizer.lr: contains ${LR}, but environment variables are not expanded; write the value, or "
            "set it with an override",
        ],
    ),
    (
        "variable deep in native",
        "native:\n  deepspeed:\n    dump: ['${HOME}/x']\n",
        [
            "c.yaml:3: native.deepspeed.dump[0]: contains ${HOME}, but environment variables are not expanded; write "
            "the value, or set it with an override",
        ],
    ),
    (
        "not finite",
        "optimizer: {lr: .inf, eps: .nan}\n",
        [
            "c.yaml:1: optimizer.lr: is inf; write a finite number",
            "c.yaml:1: optimizer.eps: is nan; write a finite number",
        ],
    ),
    (
        "too many digits",
        "training:\n  seed: " + "9" * 5000,
        [
            "c.yaml:2: training.seed: cannot be read as a number: '9999999999999999999999999999999999999999'; write "
            "digits",
        ],
    ),
    (
        "unknown field, near",
        "sharding:\n  stratgy: full_shard\n",
        [
            "c.yaml:2: sharding.stratgy: unknown field; did you mean 'strategy'?",
        ],
    ),
    (
        "unknown field, of another section",
        "lr: 1e-3\n",
        [
            "c.yaml:1: lr: unknown field; did you mean 'optimizer.lr'?",
        ],
    ),
    (
        "unknown field, of two sections",
        "name: adamw\n",
        [
            "c.yaml:1: name: unknown field; did you mean 'optimizer.name' or 'scheduler.name'?",
        ],
    ),
    (
        "unknown field, near one of another section",
        "training:\n  weight_decy: 0.1\n",
        [
            "c.yaml:2: training.weight_decy: unknown field; did you mean 'optimizer.weight_decay'?",
        ],
    ),
    (
        "unknown field, from another tool",
        "zero_optimization:\n  stage: 3\n",
        [
            "c.yaml:1: zero_optimization: unknown field; did you mean 'sharding.strategy'?",
        ],
    ),
    (
        "unknown field, far",
        "training:\n  quux: 3\n",
        [
            "c.yaml:2: training.quux: unknown field; known here: micro_batch_size, gradient_accumulation_steps, "
            "global_batch_size, gradient_clipping, nonfinite, last_window, buffers, seed",
        ],
    ),
    (
        "empty section",
        "sharding:\ntraining:\n",
        [
            "c.yaml:1: sharding: is empty; write fields below it (strategy, group_size, reshard_after_forward, units, "
            "min_unit_params, conditional_modules) or remove it",
            "c.yaml:2: training: is empty; write fields below it (micro_batch_size, gradient_accumulation_steps, "
            "global_batch_size, gradient_clipping, nonfinite, last_window, buffers, seed) or remove it",
        ],
    ),
    (
        "value for a section",
        "training: 3\n",
        [
            "c.yaml:1: training: must be a section of fields (micro_batch_size, gradient_accumulation_steps, "
            "global_batch_size, gradient_clipping, nonfinite, last_window, buffers, seed), got 3",
        ],
    ),
    (
        "text for a whole number",
        "training:\n  micro_batch_size: '4'\n",
        [
            "c.yaml:2: training.micro_batch_size: must be a whole number of at least 1, got '4' (text); write 4 "
            "without quotes",
        ],
    ),
    (
        "text for a number",
        "optimizer:\n  lr: '1e-5'\n",
        [
            "c.yaml:2: optimizer.lr: must be a number of at least 0, got '1e-5' (text); write 1e-5 without quotes",
        ],
    ),
    (
        "fraction for a whole number",
        "training:\n  micro_batch_size: 4.0\n",
        [
            "c.yaml:2: training.micro_batch_size: must be a whole number of at least 1, got 4.0; write 4",
        ],
    ),
    (
        "true for a whole number",
        "training:\n  micro_batch_size: true\n",
        [
            "c.yaml:2: training.micro_batch_size: must be a whole number of at least 1, got true",
        ],
    ),
    (
        "yes for true",
        "strict: yes\n",
        [
            "c.yaml:1: strict: must be true or false, got 'yes' (text); write true",
        ],
    ),
    (
        "no for false",
        "strict: no\n",
        [
            "c.yaml:1: strict: must be true or false, got 'no' (text); write false",
        ],
    ),
    (
        "none for null",
        "training:\n  gradient_clipping: none\n",
        [
            "c.yaml:2: training.gradient_clipping: must be a number above 0, or null, got 'none' (text); write null",
        ],
    ),
    (
        "null for none",
        "offload:\n  params:\n",
        [
            "c.yaml:2: offload.params: must be one of none, cpu, nvme, got null; write none",
        ],
    ),
    (
        "null without a meaning",
        "training:\n  seed: null\n",
        [
            "c.yaml:2: training.seed: must be a whole number of at least 0 and below 4294967296, got null; write a "
            "value or remove the line",
        ],
    ),
    (
        "out of range",
        "training:\n  micro_batch_size: 0\n  seed: 4294967296\n  gradient_clipping: -1\n",
        [
            "c.yaml:2: training.micro_batch_size: must be a whole number of at least 1, got 0",
            "c.yaml:3: training.seed: must be a whole number of at least 0 and below 4294967296, got 4294967296",
            "c.yaml:4: training.gradient_clipping: must be a number above 0, or null, got -1",
        ],
    ),
    (
        "misspelt word",
        "scheduler: cosin\n",
        [
            "c.yaml:1: scheduler.name: must be one of constant, linear, cosine, inverse_sqrt, got 'cosin'; did you "
            "mean 'cosine'?",
        ],
    ),
    (
        "unknown word",
        "offload: disk\n",
        [
            "c.yaml:1: offload.params: must be one of none, cpu, nvme, got 'disk'",
            "c.yaml:1: offload.optimizer: must be one of none, cpu, nvme, got 'disk'",
        ],
    ),
    (
        "name for a list",
        "sharding:\n  units: LlamaDecoderLayer\n",
        [
            "c.yaml:2: sharding.units: must be auto or a list of names, got 'LlamaDecoderLayer'; write "
            "[LlamaDecoderLayer]",
        ],
    ),
    (
        "number in a list of names",
        "sharding:\n  units: [A, 3]\n",
        [
            "c.yaml:2: sharding.units: must be auto or a list of names, got [A, 3] (a list)",
        ],
    ),
    (
        "one beta",
        "optimizer:\n  betas: [0.9]\n",
        [
            "c.yaml:2: optimizer.betas: must be a list of 2 numbers of at least 0 and below 1, got [0.9] (a list)",
        ],
    ),
    (
        "beta of 1",
        "optimizer:\n  betas: [0.9, 1.0]\n",
        [
            "c.yaml:2: optimizer.betas: must be a list of 2 numbers of at least 0 and below 1, got [0.9, 1.0] (a list)",
        ],
    ),
    (
        "mapping for text",
        "backend: {name: fsdp}\n",
        [
            "c.yaml:1: backend: must be text, got {name: fsdp} (a mapping)",
        ],
    ),
    (
        "number as strategy",
        "sharding: 1\n",
        [
            "c.yaml:1: sharding.strategy: a number is ambiguous (1 is FULL_SHARD in Accelerate and ZeRO-1 in "
            "DeepSpeed), got 1; write the name, such as full_shard or zero3",
        ],
    ),
    (
        "value for native",
        "native:\n  deepspeed: 3\n",
        [
            "c.yaml:1: native: must be a mapping of names to mappings, got {deepspeed: 3} (a mapping)",
        ],
    ),
    (
        "units of no_shard",
        "sharding:\n  strategy: no_shard\n  units: [A]\n",
        [
            "c.yaml:3: sharding.units: is unused with strategy no_shard, which gathers nothing; remove it or choose "
            "full_shard",
        ],
    ),
    (
        "no total_steps",
        "backend: fsdp\nscheduler: linear\n",
        [
            "c.yaml:2: scheduler.total_steps: is required by a linear schedule; write the number of updates",
        ],
    ),
    (
        "betas of sgd",
        "optimizer:\n  name: sgd\n  betas: [0.9, 0.99]\n  eps: 1e-6\n",
        [
            "c.yaml:3: optimizer.betas: belongs to adamw, adam and lion, not to sgd; remove it or set optimizer.name "
            "to adamw",
            "c.yaml:4: optimizer.eps: belongs to adamw, adam and adagrad, not to sgd; remove it or set optimizer.name "
            "to adamw",
        ],
    ),
    (
        "offload of no_shard",
        "offload: cpu\nsharding: ddp\n",
        [
            "c.yaml:1: offload.optimizer: cpu needs a sharded optimizer; choose shard_optimizer, shard_grad_op or "
            "full_shard",
            "c.yaml:1: offload.params: cpu needs sharded parameters, not no_shard; set sharding.strategy to full_shard",
        ],
    ),
    (
        "fp32 reduced in bf16",
        "precision:\n  compute: fp32\n  reduce: bf16\n",
        [
            "c.yaml:3: precision.reduce: bf16 would round the fp32 gradients; write fp32, or set precision.compute to "
            "bf16",
        ],
    ),
    (
        "many at once, by line",
        "lr: 1\ntraining:\n  seed: -1\n  sed: 3\nsharding:\n  strategy: full\n  strategy: zero3\noptimizer:\n  eps: "
        "${E}\nstrict: maybe\n",
        [
            "c.yaml:1: lr: unknown field; did you mean 'optimizer.lr'?",
            "c.yaml:3: training.seed: must be a whole number of at least 0 and below 4294967296, got -1",
            "c.yaml:4: training.sed: unknown field; did you mean 'seed'?",
            "c.yaml:7: sharding.strategy: is a duplicate of line 6; remove one of the two",
            "c.yaml:9: optimizer.eps: contains ${E}, but environment variables are not expanded; write the value, or "
            "set it with an override",
            "c.yaml:10: strict: must be true or false, got 'maybe' (text)",
        ],
    ),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("text", "messages"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_message(folder: Path, text: str, messages: list[str]) -> None:
    (folder / "c.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        unishard.load("c.yaml")
    assert str(caught.value).splitlines() == messages
    assert [str(problem) for problem in caught.value.problems] == messages
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
    monkeypatch.setattr(document, "_MOST_WRITTEN", 500)  # of 25,000, for which this test would take seconds
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
