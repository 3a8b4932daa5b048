"""`unishard schema`: print the config's JSON Schema, for editors."""

from __future__ import annotations

import json

from unishard.cli.arguments import Output
from unishard.cli.output import save
from unishard.cli.wrapping import echo, emit


def schema(output: Output = None) -> None:
    """Print the config's JSON Schema, for editors.

    With it VS Code, PyCharm and other editors complete, explain and check the fields of a config. To attach it, write
    it to a file with
    -o, which says what to add where. It knows the backends that are installed.

    Example: unishard schema -o unishard.schema.json
    """
    from unishard.tools.json_schema import ATTACH, json_schema

    text = json.dumps(json_schema(), indent=2)
    if output is None:
        emit(text)
        return
    save(output, text + "\n")
    echo(f"{output}: written. Attach it:\n{ATTACH.replace('unishard.schema.json', str(output)).rstrip()}")
