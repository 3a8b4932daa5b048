"""The JSON Schema of the config, for editors."""

from __future__ import annotations

from typing import Any

from unishard.config import Config, Section

__all__ = ["json_schema"]


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a config file, including shorthands such as `sharding: full_shard`."""
    schema = Config.model_json_schema()
    definitions = schema["$defs"]
    for name, field in Config.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section) and kind.shorthand:
            whole = schema["properties"][name]
            short = [definitions[kind.__name__]["properties"][inner] for inner in kind.shorthand]
            bare = {key: value for key, value in short[0].items() if key not in ("default", "description", "title")}
            if {"type": "null"} in bare.get("anyOf", ()):  # a section cannot be null, whatever its field can
                bare["anyOf"] = [kind for kind in bare["anyOf"] if kind != {"type": "null"}]
            schema["properties"][name] = {
                **{key: value for key, value in whole.items() if key != "$ref"},
                "anyOf": [{"$ref": whole["$ref"]}, bare],
            }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
