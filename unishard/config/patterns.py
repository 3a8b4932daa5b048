"""Regular expressions that match names of parameters."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from unishard.config.describe import shown


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except (re.error, OverflowError, RecursionError) as error:
        raise PydanticCustomError(
            "pattern",
            "contains {value}, which is not a regular expression ({error}); write a substring of a parameter's name",
            {"value": shown(value), "error": str(error)},
        ) from None
    if not value:
        raise PydanticCustomError(
            "pattern", "contains an empty pattern, which matches everything; write a substring of a parameter's name"
        )
    return value


Pattern = Annotated[str, AfterValidator(_pattern)]
