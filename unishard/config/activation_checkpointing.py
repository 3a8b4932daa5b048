"""Which activations are recomputed in backward instead of kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from unishard.config.spellings import Spellings, lower

Word = Annotated[Literal["none", "full", "selective"], Spellings()]

ActivationCheckpointing = Annotated[Word | list[str], BeforeValidator(lower)]
