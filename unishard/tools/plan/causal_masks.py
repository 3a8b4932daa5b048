"""Lets a model without data do without causal masks where it does with data. Imports torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from unishard.errors import ModelError
from unishard.sequence.transformers_models import rule_of


@contextmanager
def of_single_documents() -> Iterator[None]:
    """A block in which transformers' models take samples for one document each.

    They look at the values of positions for documents that are packed, and need no mask where there are none. Where
    positions have no values, they make one of the square of the tokens (transformers 5.23, masking_utils.py,
    find_packed_sequence_indices).
    """
    if "transformers" not in sys.modules:
        yield
        return
    from transformers import AttentionMaskInterface

    own = AttentionMaskInterface()["sdpa"]

    def mask(*args: Any, mask_function: Callable[..., Any], **kwargs: Any) -> Any:
        if _keeps_documents_apart(mask_function):
            kwargs["allow_is_causal_skip"] = True
        return own(*args, mask_function=mask_function, **kwargs)

    AttentionMaskInterface.register("sdpa", mask)
    try:
        yield
    finally:
        AttentionMaskInterface.register("sdpa", own)


def _keeps_documents_apart(mask_function: Callable[..., Any]) -> bool:
    """Whether a mask does that, and otherwise only what a kernel does without one."""
    try:
        return rule_of(mask_function)[1]
    except ModelError:  # a rule of the model's own
        return False
