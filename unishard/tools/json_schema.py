"""The JSON Schema of the config, for editors."""

from __future__ import annotations

from typing import Any

from unishard.config import Config, Section
from unishard.config.spellings import in_any_case
from unishard.contract import registry

ATTACH = """\
In a config, with any editor that has the YAML language server (VS Code with the extension "YAML" by Red Hat, Neovim, Helix, Zed), as the
first line: # yaml-language-server: $schema=unishard.schema.json
For all configs of a project, in VS Code, in .vscode/settings.json: "yaml.schemas": {"unishard.schema.json": ["configs/*.yaml"]}
In PyCharm: Settings > Languages & Frameworks > Schemas and DTDs > JSON Schema Mappings: add unishard.schema.json for configs/*.yaml
"""
"""How to attach the schema in editors."""


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
    backends = list(registry.available())
    schema["properties"]["backend"] |= {
        "anyOf": [{"enum": backends}, {"type": "string", "pattern": in_any_case(backends)}]
    }
    schema["patternProperties"] = {"^x-": {}}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$comment": ATTACH, **schema}
