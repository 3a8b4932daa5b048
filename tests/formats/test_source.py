from __future__ import annotations

import math
import time
from enum import Enum
from pathlib import Path

import pytest

import unishard
from unishard import formats
from unishard.errors import ConfigError
from unishard.formats.files.source import Source, open_source


def opened(folder: Path, text: str | bytes, name: str = "config.json") -> Source:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return open_source(path)


def test_a_number_with_a_leading_zero_is_octal_where_the_tool_reads_yaml_1_1(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("per_device_train_batch_size: 010\nlearning_rate: 1e-4\noutput_dir: o\n")
    assert formats.read(path).config.training.micro_batch_size == 8
    path.write_text("backend: fsdp\ntraining: {seed: 010}\n")
    assert formats.read(path).config.training.seed == unishard.load(path).training.seed == 10


LENIENT = """\
// for eight GPUs
{
  "train_batch_size": 64,  # in all
  /* where
     it lives */
  "path": "s3://bucket/x#y /* no comment */",
\t"zero_optimization": {"stage": 2, "list": [1, 2, ],},
  "nothing": null, "on": true, "small": -1e-5, "odd": NaN, "escaped": "a\\/b\\u00e4\\n",
}
"""


def test_json_with_comments_and_trailing_commas_means_what_it_says(tmp_path: Path) -> None:
    source = opened(tmp_path, LENIENT)
    assert math.isnan(dict(source.data).pop("odd"))
    assert {key: value for key, value in source.data.items() if key != "odd"} == {
        "train_batch_size": 64,
        "path": "s3://bucket/x#y /* no comment */",
        "zero_optimization": {"stage": 2, "list": [1, 2]},
        "nothing": None,
        "on": True,
        "small": -1e-5,
        "escaped": "a/bä\n",
    }
    assert source.origins.of(("zero_optimization", "stage")).line == 7
    assert source.origins.of(("small",)).line == 8


def test_the_warning_names_what_strict_readers_refuse_and_who_they_are(tmp_path: Path) -> None:
    (warning,) = opened(tmp_path, LENIENT).warnings
    assert "has a comment (line 1) and a trailing comma (line 7); transformers" in warning
    assert "Accelerate" in warning
    assert "DeepSpeed 0.19.8 takes it: hjson" in warning
    assert opened(tmp_path, '{"a": [1, {"b": "//"}], "c": 1.5E+3}').warnings == ()


def test_who_refuses_comments_and_who_does_not() -> None:
    """The warning's claim, held to the readers themselves."""
    import json

    import hjson

    text = '{"a": 1, // one\n "b": [2, ], }'
    assert hjson.loads(text) == {"a": 1, "b": [2]}
    with pytest.raises(ValueError, match="property name"):
        json.loads(text)


def test_what_is_nearly_json_is_read_as_yaml_with_a_warning(tmp_path: Path) -> None:
    source = opened(tmp_path, "{'a': True, b: x, // c\n 'd': 1}")
    assert source.data == {"a": True, "b": "x", "d": 1}
    assert ":1: is not JSON (a key in double quotes is needed here" in source.warnings[0]
    flow = opened(tmp_path, "{a: b}", "config.yaml")
    assert (flow.data, flow.warnings) == ({"a": "b"}, ())


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('{"a": 1,\n "b": 2 "c": 3}', ":2: is not JSON: a comma or '}' is missing before this; write it"),
        ('{\n"a": [1, 2', ":2: is not JSON: the bracket opened on line 2 is never closed; write ']' at its end"),
        ('{"a" 1}', ":1: is not JSON: a colon is missing after 'a'; write one"),
        (
            '{"a": 1}\n{"b": 2}',
            ":2: is not JSON: something follows the closing bracket; remove it, or keep one document in the file",
        ),
        (
            '{"a": "C:\\dir"}',
            ":1: is not JSON: unreadable text (Invalid \\escape); close the quotes, and write backslashes twice",
        ),
        ('{"a":\n True, "b" 1}', ":2: is not JSON: no value begins with 'True, \"b\" 1}'; write true"),
        ('{\n"a": {"b": 1,\n"b": 2}}', ":3: a.b: is written twice, first on line 2; keep one of the two"),
        ('{"a": ' + "9" * 500 + "}", ":1: a: has more than 400 digits; write a number that a setting can have"),
        ('{"a": "\\ud800"}', ":1: a: has a lone surrogate (half a character); rewrite the text"),
        ('{"a":' * 200, ":1: a: is nested more than 100 levels deep, which no config is; name another file"),
        ("[1, 2]", "is a list, and a config is a mapping of keys to values; name another file"),
        ("3", "is a single value, and a config is a mapping of keys to values; name another file"),
        ("", "is empty, and a config is a mapping of keys to values; name another file"),
        ("{% if x %}", "is a Jinja template ({% if x %}); render it, and translate the result"),
        ("a: [1", "is not YAML: "),
        (b"\x00\xff", "is not UTF-8 text (byte 0xff at offset 1); name a YAML file saved as UTF-8"),
        (b"a" * 2**21, "is larger than 1048576 bytes; name a config file"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_one_line_with_its_place(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        opened(tmp_path, text)
    (problem,) = caught.value.problems
    assert str(tmp_path) in str(caught.value)
    assert what in str(caught.value), problem


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[" * 3000, "nests more than 100 brackets"),
        ("k:\n" * 20000, "has more than 10000 lines"),
        (
            "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 20)),
            "after expanding its aliases",
        ),
        ("a: &a [*a]\n", "refers to itself"),
        ("a: 0x" + "f" * 1000, "has more than 400 digits"),
        ("a: !!python/object:os.system x", "has the YAML tag"),
        ("---\na: 1\n---\nb: 2\n", "keep one document in the file"),
    ],
    ids=lambda value: value[:12],
)
def test_yaml_that_no_config_is(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        opened(tmp_path, text, "config.yaml")


def test_of_a_yaml_key_that_is_written_twice_the_last_counts_as_in_the_tools_that_read_it(tmp_path: Path) -> None:
    source = opened(tmp_path, "a: 1\nb: {c: 1, d: 2}\na: 3\nb: {c: 4}\n", "config.yaml")
    assert source.data == {"a": 3, "b": {"c": 4}}
    assert source.origins.of("a").line == 3
    assert [str(repeat).partition("config.yaml:")[2] for repeat in source.repeats] == [
        "3: a: is a duplicate of line 1; remove one of the two",
        "4: b: is a duplicate of line 2; remove one of the two",
    ]
    assert "take the last" in source.warnings[0]


def test_unishards_own_file_may_not_say_a_key_twice(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("backend: fsdp\nbackend: deepspeed\n")
    with pytest.raises(ConfigError, match="2: backend: is a duplicate of line 1"):
        formats.read(path, "unishard")


def test_yaml_of_other_tools_may_merge_and_hold_variables(tmp_path: Path) -> None:
    text = "base: &base {lr: 1e-5, x: 1}\nrun:\n  <<: *base\n  x: 2\nwho: ${oc.env:USER}\nflag: no\nday: 2026-01-01\n"
    source = opened(tmp_path, text, "config.yaml")
    assert source.data == {
        "base": {"lr": 1e-5, "x": 1},
        "run": {"lr": 1e-5, "x": 2},
        "who": "${oc.env:USER}",
        "flag": "no",
        "day": "2026-01-01",
    }
    assert source.origins.of(("run", "x")).line == 4


def test_toml(tmp_path: Path) -> None:
    source = opened(tmp_path, "[training]\nsteps = 10\nday = 2026-01-01\n", "config.toml")
    assert source.data == {"training": {"steps": 10, "day": "2026-01-01"}}
    with pytest.raises(ConfigError, match=r"is not TOML: .*; fix the file"):
        opened(tmp_path, "x", "config.toml")
    with pytest.raises(ConfigError, match="is not TOML"):
        opened(tmp_path, "a = " + "9" * 5000, "config.toml")


def test_a_file_that_is_not_there_names_one_that_is(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"file not found; did you mean .*ds_config\.json"):
        open_source(tmp_path / "ds_confg.json")
    with pytest.raises(ConfigError, match="is a directory"):
        open_source(tmp_path)


class Interval(Enum):
    STEPS = "steps"


@pytest.mark.parametrize("name", ["a", '"a b"', "'a'", "a ", "\u00e9"])
@pytest.mark.parametrize("around", ["{}b = 1", "[{}b]", "a = {{ {}b = 1 }}"])
def test_a_key_of_very_many_names_is_refused_at_once(tmp_path: Path, name: str, around: str) -> None:
    start = time.process_time()
    with pytest.raises(ConfigError, match="has a key of more than 100 names"):
        opened(tmp_path, around.format(f"{name}." * 20000), "config.toml")
    assert time.process_time() - start < 0.5


def test_a_mapping_becomes_plain_values() -> None:
    given = {"a": (1, 2), 3: Interval.STEPS, "p": Path("x/y"), None: {"b": None}}
    source = open_source(given)
    assert source.data == {"a": [1, 2], "3": "steps", "p": str(Path("x/y")), "None": {"b": None}}
    assert open_source(source) is source
    with pytest.raises(ConfigError, match="1: is there twice, as a number and as text"):
        open_source({1: 2, "1": 3})
    loop: dict[str, object] = {}
    loop["loop"] = loop
    with pytest.raises(ConfigError, match="loop: is nested more than 100 levels deep"):
        open_source(loop)


def test_an_anchor_may_be_given_anew(tmp_path: Path) -> None:
    assert opened(tmp_path, "a: &x 1\nb: &x 2\nc: *x\n", "config.yaml").data == {"a": 1, "b": 2, "c": 2}


def test_json_without_its_first_bracket_is_said_to_be_no_json(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not JSON: a config begins with"):
        opened(tmp_path, '"a": 1,\n"b": 2}')


def test_json_in_a_yaml_file_is_read_as_yaml_readers_do(tmp_path: Path) -> None:
    text = '{\n"zero_optimization": {"stage": 2,\n"stage": 3}\n}\n'
    source = opened(tmp_path, text, "ds.yaml")
    assert source.data == {"zero_optimization": {"stage": 3}}
    assert "is a duplicate of line 2" in str(source.warnings)
    with pytest.raises(ConfigError, match="is written twice"):
        opened(tmp_path, text, "ds.json")
