"""The head and the loss of a few tokens at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from unishard.errors import ContractError
from unishard.logits.one_call import hooked_inside, in_one_call, in_use, without_hooks

Loss = Callable[[Tensor, Tensor], Tensor]


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float(), labels, reduction="sum")


def chunked_loss(
    head: nn.Module, hidden: Tensor, labels: Tensor, loss: Loss = _cross_entropy, *, chunk_tokens: int
) -> Tensor:
    """The sum of the tokens' losses, for your own model, without the logits of all tokens at once.

    Call it in the forward of your model. The head runs over `chunk_tokens` tokens at a time, and once more in backward.
    Its weights are gathered once for all of them, so it is collective where parameters are sharded.

    Args:
        head: Makes logits of hidden states, for each token by itself.
        hidden: `[..., width]`, what the head is called with.
        labels: `[...]`, one for each token; already shifted. By default, -100 counts nothing.
        loss: Makes the sum of losses of `[tokens, vocabulary]` and `[tokens]`; by default, cross entropy in fp32.
            Label smoothing, a z-loss and the like are yours to add. It may return several sums in one tensor.
        chunk_tokens: Tokens at a time.

    Returns:
        What `loss` returned, added up. For the mean, divide it by the number of labels, or pass that to
        `engine.backward` as `num_items`.

    Raises:
        ContractError: `chunk_tokens` is not positive, or `hidden` and `labels` have different numbers of tokens.
    """
    if chunk_tokens < 1:
        raise ContractError(f"chunk_tokens must be 1 or more, got {chunk_tokens}")
    if hidden.shape[:-1] != labels.shape:
        raise ContractError(
            f"chunked_loss: hidden states {[*hidden.shape]} and labels {[*labels.shape]} do not fit; labels need the "
            "shape of the hidden states without the last dimension"
        )
    return in_chunks(head, hidden.flatten(0, -2), labels.flatten(), loss, _sum, chunk_tokens)


def in_chunks(
    head: nn.Module,
    hidden: Tensor,
    labels: Tensor,
    loss: Loss,
    combine: Callable[[list[Tensor]], Tensor],
    chunk_tokens: int,
) -> Tensor:
    """What `combine` makes of the losses of all chunks, in one call of the head.

    Args:
        head: As of `chunked_loss`.
        hidden: `[tokens, width]`.
        labels: `[tokens]`.
        loss: Of the logits and the labels of a chunk.
        combine: Of what `loss` returned for each chunk.
        chunk_tokens: As of `chunked_loss`.
    """
    head = in_use(head)
    inside = hooked_inside(head)
    forward, forwards = head.forward, {part: part.forward for part in inside}

    def of_chunk(rows: Tensor, of_rows: Tensor) -> Tensor:
        with without_hooks(head, forwards):
            logits = forward(rows)
        return loss(logits, of_rows)

    def of_all(hidden: Tensor, *_: Any) -> Tensor:
        chunks = zip(torch.split(hidden, chunk_tokens), torch.split(labels, chunk_tokens), strict=True)
        return combine([checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks])

    return in_one_call([head, *inside], of_all, hidden)


def _sum(losses: list[Tensor]) -> Tensor:
    return torch.stack(losses).sum(0)
