"""`unishard schema`: print the config's JSON Schema, for editors."""

from __future__ import annotations

import json

import typer

__all__ = ["schema"]


def schema() -> None:
    """Print the config's JSON Schema, for editors."""
    from unishard.reference.json_schema import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))
