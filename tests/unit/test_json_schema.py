"""An editor that follows our JSON Schema underlines what `unishard.load` refuses, and nothing that it takes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from ruamel.yaml import YAML
from schema_strategies import documents
from typer.testing import CliRunner

import unishard
from unishard.cli import app
from unishard.tools.json_schema import json_schema

SCHEMA = json_schema()
CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))
TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "null": (type(None),),
}
ABOUT = {"title", "description", "default", "$defs", "$schema", "$comment"}


def accepts(schema: Any, value: Any) -> bool:
    """Whether a JSON Schema takes a value. Knows the keywords that ours uses, and fails on any other."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        return accepts(SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")], value)
    return all(_holds(key, rule, schema, value) for key, rule in schema.items() if key not in ABOUT)


def _holds(key: str, rule: Any, schema: dict[str, Any], value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    match key:
        case "type":
            return isinstance(value, TYPES[rule]) and not (isinstance(value, bool) and rule in ("integer", "number"))
        case "anyOf":
            return any(accepts(option, value) for option in rule)
        case "enum":
            return value in rule
        case "const":
            return value == rule
        case "pattern":
            return not isinstance(value, str) or re.search(rule, value) is not None
        case "minimum":
            return not number or value >= rule
        case "maximum":
            return not number or value <= rule
        case "exclusiveMinimum":
            return not number or value > rule
        case "exclusiveMaximum":
            return not number or value < rule
        case "items":
            return not isinstance(value, list) or all(accepts(rule, item) for item in value)
        case "prefixItems":
            return not isinstance(value, list) or all(
                accepts(one, item) for one, item in zip(rule, value, strict=False)
            )
        case "minItems":
            return not isinstance(value, list) or len(value) >= rule
        case "maxItems":
            return not isinstance(value, list) or len(value) <= rule
        case "properties":
            return not isinstance(value, dict) or all(
                accepts(rule[name], item) for name, item in value.items() if name in rule
            )
        case "additionalProperties":
            known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
            return not isinstance(value, dict) or all(
                accepts(rule, item)
                for name, item in value.items()
                if name not in known and not any(re.search(one, name) for one in patterns)
            )
        case "patternProperties":
            return rule == {"^x-": {}}
    raise AssertionError(f"the schema uses {key!r}, which this test does not know")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_takes_our_configs(path: Path) -> None:
    assert accepts(SCHEMA, YAML(typ="safe", pure=True).load(path.read_text()))


@given(document=documents())
def test_takes_every_valid_config(document: dict[str, Any]) -> None:
    unishard.load(document)
    assert accepts(SCHEMA, document)


@pytest.mark.parametrize(
    "document",
    [
        {"sharding": "full_shard"},
        {"sharding": "FULL_SHARD"},
        {"sharding": "ddp"},
        {"sharding": {"strategy": "ZERO3"}},
        {"precision": "BF16"},
        {"precision": {"compute": "bfloat16"}},
        {"precision": "bf16-mixed"},
        {"offload": "cpu"},
        {"optimizer": "AdamW"},
        {"scheduler": "constant"},
        {"training": {"global_batch_size": None}},
        {"checkpoint": "runs/a"},
        {"checkpoint": {"dir": "runs/a", "on_signal": ["TERM", "sigusr1", "SIGHUP"]}},
        {"native": {"deepspeed": {"anything": [1]}}},
        {"backend": "DeepSpeed"},
        {"x-mine": {"lr": 1}},
    ],
    ids=str,
)
def test_takes_short_forms_and_spellings(document: dict[str, Any]) -> None:
    unishard.load(document)
    assert accepts(SCHEMA, document)


@pytest.mark.parametrize(
    "document",
    [
        {"shardin": {}},
        {"sharding": "fullshard3"},
        {"sharding": 1},
        {"sharding": {"stratgy": "full_shard"}},
        {"training": 3},
        {"training": {"micro_batch_size": 0}},
        {"training": {"micro_batch_size": "4"}},
        {"optimizer": {"betas": [0.9, 1]}},
        {"optimizer": {"betas": [0.9]}},
        {"offload": "gpu"},
        {"checkpoint": None},
        {"checkpoint": 3},
        {"checkpoint": {"dir": "runs/a", "on_signal": ["SIGKILL"]}},
        {"native": {"deepspeed": 3}},
    ],
    ids=str,
)
def test_refuses_what_load_refuses(document: dict[str, Any]) -> None:
    with pytest.raises(unishard.ConfigError):
        unishard.load(document)
    assert not accepts(SCHEMA, document)


def test_a_backend_is_one_that_is_installed() -> None:
    assert SCHEMA["properties"]["backend"]["anyOf"][0] == {"enum": list(unishard.available())}
    assert not accepts(SCHEMA, {"backend": "horovod"}), "load takes it, prepare does not"


def test_command() -> None:
    assert json.loads(CliRunner().invoke(app, ["schema"]).stdout) == SCHEMA


def test_a_file_and_how_to_attach_it(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    result = CliRunner().invoke(app, ["schema", "-o", str(path)])
    assert (result.exit_code, json.loads(path.read_text())) == (0, SCHEMA)
    assert result.stdout.startswith(f"{path}: written. Attach it:\n")
    for said in (
        f"# yaml-language-server: $schema={path}",
        f'"yaml.schemas": {{"{path}": ["configs/*.yaml"]}}',
        "JSON Schema Mappings",
    ):
        assert said in result.stdout
    assert "PyCharm" in SCHEMA["$comment"]
    assert "VS Code, PyCharm" in " ".join(CliRunner().invoke(app, ["schema", "--help"]).stdout.split())
