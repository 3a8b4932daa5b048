"""An engine's own arguments, which a training script without unishard hands to it and the files of other tools wrap.

They are found by the entry point `unishard.arguments`, under the name of the backend, which trains without them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from unishard.config import Config
from unishard.config.topology import Topology
from unishard.contract.entries import Entry, Key
from unishard.contract.render import RenderedDocument
from unishard.contract.rules import Rule


class EngineArguments(Protocol):
    """Reads and writes an engine's own arguments, which a training script without unishard hands to it and the files of
    other tools wrap. Stateless; importing it needs neither torch nor the engine.

    Found by the entry point `unishard.arguments`, under the name of the backend, which trains without them.
    """

    @property
    def keys(self) -> Mapping[str, Key]:
        """The arguments, dotted, and what each says in the config's words."""
        ...

    @property
    def rules(self) -> Mapping[str, Rule]:
        """How a training script without unishard hands each field to the engine: one row for each leaf of `Config`, in
        its order.
        """
        ...

    def read(
        self, native: Mapping[str, Any], *, defaults: Mapping[str, Any] | None = None, topology: Topology | None = None
    ) -> list[Entry]:
        """What arguments say, one entry for each; the inverse of `write`. Pure.

        Args:
            native: What a training script without unishard hands to the engine, as nested mappings.
            defaults: What a tool around the engine assumes where `native` is silent, by dotted key; the engine's own
                defaults count for the rest.
            topology: The ranks, where they are known.
        """
        ...

    def write(self, cfg: Config, topology: Topology, undecided: Collection[str] = frozenset()) -> RenderedDocument:
        """What a training script without unishard hands to the engine for the same training. Pure.

        Args:
            cfg: What to run; `native.<name>` is merged last.
            topology: The ranks.
            undecided: Fields that the training script decides; their value in `cfg` only fills their place.
        """
        ...
