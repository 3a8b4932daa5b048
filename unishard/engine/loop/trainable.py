"""Which parameters can train: those that were trainable in `prepare`; `set_trainable` freezes and unfreezes them."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from unishard.contract.kit.empty_parameters import is_empty
from unishard.distributed import agreement
from unishard.engine.guards.late_unfreezing import never_trained
from unishard.errors import ContractError


class Trainable:
    """The parameters that can train: those that were trainable in `prepare` have a master weight on every engine."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.prepared = {name for name, parameter in self._named().items() if parameter.requires_grad}
        """Every name of the parameters that can train."""

    def choose(self, names: str | Iterable[str], trainable: bool) -> list[str]:
        """Resolve `names` to all names of the matching parameters. Collective.

        Args:
            names: As in `Weights.set_trainable`.
            trainable: Whether they are to be trainable.

        Raises:
            ContractError: A name matches nothing, a parameter was frozen in `prepare`, or no trainable one would be
                left.
            RankMismatchError: The ranks pass different names.
        """
        wanted = [names] if isinstance(names, str) else list(names)
        agreement.agree({"names": wanted, "trainable": trainable}, "calls of set_trainable")
        named = self._named()
        meant = {named[found] for name in wanted for found in self._matches(name, named)}
        chosen = [name for name, parameter in named.items() if parameter in meant and not is_empty(parameter)]
        frozen = [name for name in chosen if name not in self.prepared]
        if trainable and frozen:
            raise never_trained(frozen[0])
        if not trainable and not any(parameter.requires_grad for parameter in named.values() if parameter not in meant):
            raise ContractError(
                f"set_trainable({names!r}, False) would leave no trainable parameter; keep at least one trainable"
            )
        return chosen

    def _named(self) -> dict[str, nn.Parameter]:
        return dict(self._module.named_parameters(remove_duplicate=False))

    def _matches(self, name: str, named: dict[str, nn.Parameter]) -> list[str]:
        matches = [each for each in named if each == name or each.startswith(f"{name}.") or fnmatchcase(each, name)]
        if not matches:
            near = get_close_matches(name, [*named, *(each for each, _ in self._module.named_modules() if each)], 3)
            hint = f"did you mean {' or '.join(near)}?" if near else "engine.module.named_parameters() lists the names"
            raise ContractError(f"set_trainable: no parameter or module is called {name!r}; {hint}")
        return matches
