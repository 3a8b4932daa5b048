"""Models whose forward TRL has replaced by one with a head of its own, which computes log probabilities in chunks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

__all__ = ["finish_whole", "read_by_forward"]

_FUSED = "fused_lm_head"
"""The argument that asks for that head (TRL 1.16)."""


def read_by_forward(model: nn.Module) -> list[str]:
    """Names of head weights that a replaced forward may read outside their module."""
    owners: list[Any] = [
        module for module in model.modules() if "forward" in vars(module) and hasattr(module, "get_output_embeddings")
    ]
    heads = [head for module in owners if (head := module.get_output_embeddings()) is not None]
    head_parameters = {parameter for head in heads for parameter in head.parameters()}
    return [name for name, parameter in model.named_parameters() if parameter in head_parameters]


def finish_whole(call: Mapping[str, Any], whole: Tensor) -> Tensor:
    """An output over whole sequences as a call of that head returns it.

    It returns a number for each label that it has shifted, so none for the last token; for labels that were shifted
    before, one for each.

    Args:
        call: The arguments by their names.
        whole: `[batch, sequence, ...]`, of labels that were shifted before they were split.
    """
    shifted = bool(call.get(_FUSED)) and call.get("shift_labels") is None
    return whole[:, :-1] if shifted else whole
