"""What the shell offers for backends, formats and `FIELD=VALUE`.

The completion itself is typer's: `--install-completion`.
"""

from __future__ import annotations

from textwrap import shorten

import typer


def installed_backends() -> list[str]:
    """The installed backends; none if two packages offer the same name, which a command that needs one reports."""
    from unishard.contract import registry
    from unishard.errors import BackendError

    try:
        return list(registry.available())
    except BackendError:
        return []


def backends(ctx: typer.Context, incomplete: str) -> list[str]:
    """The installed backends; after `--set FIELD=` in bash, the field's values."""
    path = _cut_off(ctx)
    return [word for word in (_words(path) if path else installed_backends()) if word.startswith(incomplete.lower())]


def backend_lists(incomplete: str) -> list[str]:
    """The installed backends, after those already in a list with commas."""
    return _after_commas(installed_backends(), incomplete)


def strategy_lists(incomplete: str) -> list[str]:
    """The strategies, after those already in a list with commas."""
    return _after_commas(_words("sharding.strategy"), incomplete)


def _after_commas(words: list[str], incomplete: str) -> list[str]:
    before, comma, start = incomplete.rpartition(",")
    used = before.split(",")
    return [f"{before}{comma}{word}" for word in words if word.startswith(start) and word not in used]


def devices(incomplete: str) -> list[str]:
    """The devices of `--device`."""
    from unishard.tools.plan.devices import DEVICES

    return [name for name in DEVICES if name.startswith(incomplete)]


def formats(incomplete: str) -> list[str]:
    """The formats of `--from`."""
    from unishard.formats.catalog import NAMES

    return [name for name in NAMES if name.startswith(incomplete)]


def written_formats(incomplete: str) -> list[str]:
    """The formats of `--to`."""
    from unishard.formats.catalog import writable

    return [name for name in writable() if name.startswith(incomplete)]


def changes(ctx: typer.Context, incomplete: str) -> list[str | tuple[str, str]]:
    """Fields that begin like this, with a `=`; of a single field, its values."""
    from unishard.config import Config, leaves

    if path := _cut_off(ctx):
        return [word for word in _words(path) if word.startswith(incomplete)]
    path, equals, start = incomplete.partition("=")
    known = dict(leaves(Config))
    fields = [field for field in known if (field == path if equals else field.startswith(path))]
    if len(fields) != 1:
        return [(f"{field}=", _first_sentence(field)) for field in fields]
    (field,) = fields
    return [f"{field}={word}" for word in _words(field) if word.startswith(start)] or ([] if equals else [f"{field}="])


def _cut_off(ctx: typer.Context) -> str | None:
    """The field whose value is being typed, where the shell cuts words at `=`, as bash does: it hands over `FIELD`,
    then the value.
    """
    from unishard.config import Config, leaves

    typed = [str(change) for change in ctx.params.get("set_") or () if change != "="]
    return typed[-1] if typed and typed[-1] in dict(leaves(Config)) else None


def _words(path: str) -> list[str]:
    """The values that a field offers: its choices, or else its default."""
    from unishard.config import Config, leaves, value_at
    from unishard.config.describe import bare, choices

    if path == "backend":
        return installed_backends()
    kind = dict(leaves(Config))[path].annotation
    default = value_at(Config(), path)
    if isinstance(default, bool):
        return ["true", "false"]
    text = bare(default)
    return choices(kind) or ([text] if text.isprintable() and not set(text) & set(" []{}") else [])


def _first_sentence(path: str) -> str:
    from unishard.config import Config, value_at

    section, _, name = path.rpartition(".")
    owner = value_at(Config(), section) if section else Config()
    text = owner.descriptions()[name]
    return shorten(text.partition(". ")[0].partition(": ")[0].replace("`", ""), 70, placeholder=" ...").rstrip(".")
