"""Writes documents as YAML and JSON. `source` reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from io import StringIO
from typing import Any

from ruamel.yaml import YAML


def yaml_text(document: Any, *, old: bool = False, width: int = 140) -> str:
    """The YAML of a document.

    Args:
        document: Nested mappings, with ruamel's comments or without.
        old: Whether its tool reads YAML 1.1, as PyYAML does, where a bare `no` is false and `1e-5` is text.
        width: Columns after which text is folded.
    """
    yaml = YAML()
    yaml.width = width
    if old:
        yaml.version = (1, 1)
        yaml.representer.ignore_aliases = lambda data: True
    if not document:
        return "{}\n"
    out = StringIO()
    yaml.dump(document, out)
    return out.getvalue().partition("---\n")[2] if old else out.getvalue()


def inline_yaml(value: Any) -> str:
    """The YAML of a value, behind a key on one line."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = True
    yaml.width = 2**16
    out = StringIO()
    yaml.dump({"value": value}, out)
    return out.getvalue().strip().removeprefix("{value: ").removesuffix("}")


def json_text(document: Mapping[str, Any]) -> str:
    """The JSON of a document, indented."""
    return json.dumps(document, indent=2) + "\n"
