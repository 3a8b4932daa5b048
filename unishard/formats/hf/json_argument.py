"""An argument that takes JSON, or the name of a file that holds it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from unishard.errors import ConfigError
from unishard.formats.files.source import Source, open_named


def mapping_in(value: Any) -> Any:
    """The mapping of an argument that Trainer also takes as JSON; any other value as it is."""
    if isinstance(value, str) and value.startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def opened(text: str, source: Source) -> Mapping[str, Any] | str:
    """What JSON in a text says, or the file of this name holds; or what is wrong with it."""
    try:
        if text.strip().startswith("{"):
            parsed: Mapping[str, Any] = json.loads(text)
            return parsed if isinstance(parsed, dict) else "is no mapping; write {...}, or name a file"
        named = open_named(text, source.folder)
    except ConfigError as error:
        return str(error)
    except (ValueError, RecursionError) as error:
        return f"is not JSON ({error}); fix it, or name a file"
    if named:
        return named.data
    return f"{text} was not found here or in the working directory; add it, or inline its content"
