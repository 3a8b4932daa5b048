"""Put a model in training mode before it is trained."""

from __future__ import annotations

import logging

from torch import nn

_logger = logging.getLogger("unishard")


def put_in_training_mode(model: nn.Module, rank: int) -> None:
    """Call `model.train()`, and log on rank 0 what was in evaluation mode.

    `from_pretrained` returns a model in evaluation mode, and adapters that are added to it afterwards leave its
    dropouts there, while the model itself is in training mode again: the first `eval()` and `train()` would then change
    the training.
    """
    modules = [*model.named_modules()]
    evaluating = [name for name, module in modules if not module.training]
    was_training = model.training
    model.train()
    if rank or not evaluating:
        return
    kind = type(model).__name__
    if not was_training:
        _logger.info("%s was in evaluation mode; prepare has put it in training mode", kind)
        return
    _logger.warning(
        "%d of %d modules of %s were in evaluation mode, such as %s; prepare has put them in training mode; call "
        ".eval() on a part after prepare to keep it in evaluation mode, such as a frozen BatchNorm",
        len(evaluating),
        len(modules),
        kind,
        evaluating[0],
    )
