"""Attention of transformers' models, by the interface where they look their attention up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import getclosurevars, signature
from typing import Any

from torch import Tensor, nn

from unishard.errors import ModelError
from unishard.sequence import context
from unishard.sequence.attention import split_attention
from unishard.sequence.context import KeyRule, SplitBatch
from unishard.sequence.hybrid_functions import mixes_by_functions, use_split_functions
from unishard.sequence.replaced_attention import require_plain_scores
from unishard.sequence.tiles import Scores

NAME = "unishard_sequence"
"""What a prepared model's `attn_implementation` is called."""


_EVERY_KEY = KeyRule(causal=False)


@dataclass(frozen=True, slots=True)
class Mask:
    """What stands in the place of a mask: the rule that makes it, and the micro-batch."""

    split: SplitBatch
    rule: KeyRule | Tensor

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the model computes with its mask ({name}), which is a rule under parallel.sequence")

    def __getitem__(self, place: object) -> Any:
        raise ModelError(
            "the model computes with parts of its mask, as attention does whose indexer chooses positions, which "
            "parallel.sequence does not support; remove parallel.sequence"
        )


def is_transformers(model: nn.Module) -> bool:
    """Whether a model is one of transformers', or a wrapper such as PEFT's around one."""
    return any(hasattr(module, "set_attn_implementation") for module in model.modules())


def use_split_attention(model: nn.Module) -> Callable[[], None]:
    """Let the models of transformers in `model` use split attention, and split recurrences and convolutions.

    Returns:
        What gives them back what they had.

    Raises:
        ModelError: One of them computes attention by its own code.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    for module in models:
        if not (module.is_backend_compatible() or mixes_by_functions(module)):  # those do not say it
            raise _not_by_interface(module)
    before = [module.config._attn_implementation for module in models]
    for module in models:
        module.set_attn_implementation(NAME)

    restore_functions = use_split_functions(model)

    def restore() -> None:
        restore_functions()
        for module, implementation in zip(models, before, strict=True):  # those inside come later
            module.set_attn_implementation(implementation)

    for module in models:
        if module.config._attn_implementation != NAME:  # transformers has only warned
            restore()
            raise _not_by_interface(module)
    return restore


def _not_by_interface(module: nn.Module) -> ModelError:
    return ModelError(
        f"{type(module).__name__} does not compute all attention by transformers' AttentionInterface, so "
        "parallel.sequence cannot split it; remove parallel.sequence"
    )


def _mask(*args: Any, mask_function: Callable[..., Any], **kwargs: Any) -> Mask:
    """What the models get when they ask for a mask."""
    split = context.current
    if split is None:
        raise ModelError("the model was called without its engine; call engine(...) in place of the model")
    rule, packed = rule_of(mask_function)
    if split.proving and not packed:  # a proof packs documents
        split.joined.add(rule)
    return Mask(split, rule)


def rule_of(mask_function: Callable[..., Any]) -> tuple[KeyRule, bool]:
    """The rule of a mask function of transformers (5.23, masking_utils.py), and whether it keeps documents apart.

    Raises:
        ModelError: It is one of the model's own.
    """
    name = mask_function.__qualname__.partition(".")[0]
    own = getclosurevars(mask_function).nonlocals
    match name:
        case "causal_mask_function":
            return KeyRule(causal=True), False
        case "bidirectional_mask_function":
            return _EVERY_KEY, False
        case "packed_sequence_mask_function":
            return _EVERY_KEY, True
        case "sliding_window_overlay":
            return replace(_EVERY_KEY, window=own["sliding_window"]), False
        case "sliding_window_bidirectional_overlay":
            return replace(_EVERY_KEY, window=own["sliding_window"] + 1), False
        case "chunked_overlay":
            return replace(_EVERY_KEY, chunk=own["chunk_size"]), False
        case "remap_positions_for_packed_sequence":
            return rule_of(own["mask_function"])
        case "and_masks":
            parts = [rule_of(part) for part in own["mask_functions"]]
            rules = [rule for rule, _ in parts]
            rule = KeyRule(
                causal=any(each.causal for each in rules),
                window=next((each.window for each in rules if each.window is not None), None),
                chunk=next((each.chunk for each in rules if each.chunk is not None), None),
            )
            return rule, any(packed for _, packed in parts)
    raise ModelError(
        f"the model has an attention mask by {name}, which parallel.sequence does not support; remove parallel.sequence"
    )


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers' interface."""
    mask, split = attention_mask, context.current
    if split is not None and _is_of_whole_samples(mask, split):
        mask = Mask(split, mask)
    if not isinstance(mask, Mask):
        raise ModelError(
            f"{type(module).__name__} has a mask of its own, which parallel.sequence does not support; remove "
            "parallel.sequence"
        )
    require_plain_scores(module, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = Scores(scale, dropout, kwargs.get("softcap"), kwargs.get("s_aux"))
    output = split_attention(query, key, value, mask.split, mask.rule, scores)
    return output.transpose(1, 2).contiguous(), None


def _is_of_whole_samples(mask: Any, split: SplitBatch) -> bool:
    """Whether a mask is that of the batch, and not one that a module has made of its part."""
    if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[1] != 1:
        return False
    return split.proving or mask.shape[-1] == split.length  # a proof takes some positions


def counts_positions_itself(model: nn.Module) -> bool:
    """Whether a model makes positions of its tokens, as RoBERTa, whose positions begin behind the padding token's."""
    return any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules())


def shifts_labels(model: nn.Module) -> bool:
    """Whether the loss of a model of transformers is of the next token, unlike that of a masked language model."""
    from transformers import PreTrainedModel

    models: list[Any] = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    losses = [module.loss_function for module in models if getattr(module, "loss_type", None) is not None]
    return not losses or "shift_labels" in signature(losses[0]).parameters
