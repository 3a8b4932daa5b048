"""Tells of trainable parameters that training does not use, which ZeRO updates all the same."""

from __future__ import annotations

import warnings
from functools import partial

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

__all__ = ["FirstWindow"]


class FirstWindow:
    """Watches which parameters get a gradient in the first accumulation window; after it, it costs nothing."""

    def __init__(self, module: nn.Module) -> None:
        trainable = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        self._without = dict.fromkeys(trainable)
        self._hooks: list[RemovableHandle] = [
            parameter.register_hook(partial(self._seen, name))  # type: ignore[no-untyped-call]
            for name, parameter in trainable.items()
        ]

    def _seen(self, name: str, gradient: Tensor) -> None:
        self._without.pop(name, None)

    def end(self) -> None:
        """Warn of the parameters that this rank has not used. Safe to call again."""
        if not self._hooks:
            return
        self.remove()
        if self._without:
            shown = ", ".join(list(self._without)[:3])
            warnings.warn(
                f"{len(self._without)} trainable parameters got no gradient in the first update ({shown}); DeepSpeed takes that as zero, "
                "so weight decay and moments still move them, unlike in plain torch and FSDP2; freeze them with requires_grad_(False)",
                UserWarning,
                stacklevel=2,
            )

    def remove(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
