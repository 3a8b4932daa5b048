"""What a guard is that looks at forwards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch.utils.hooks import RemovableHandle


class ForwardGuard(ABC):
    """Looks at the forwards that `Sampling` chooses."""

    hooks: Sequence[RemovableHandle] = ()
    """Those that stay registered from one forward to the next."""

    @abstractmethod
    def forward(self) -> AbstractContextManager[None]:
        """The block that runs such a forward."""

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self.hooks:
            hook.remove()
