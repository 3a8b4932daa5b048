"""Names that an engine does not have: those of its model, of other tools and of the config."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

from unishard.config import Config
from unishard.config.hints import METHODS
from unishard.config.loading.validation import paths_of
from unishard.errors import ContractError

_COMPILED = "_torchdynamo_orig_callable"
"""What torch.compile looks for in its argument (torch 2.13, _dynamo/eval_frame.py, innermost_fn)."""


class OtherNames:
    """Says what to write in place of a name that is read or set, of a copy, and of `torch.compile(engine)`."""

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """The user's model."""

    if not TYPE_CHECKING:  # for type checkers every name would be there

        def __setattr__(self, name: str, value: Any) -> None:
            if not name.startswith("_") and not hasattr(type(self), name):
                fields = [path for path in paths_of(Config) if path.rpartition(".")[2] == name]
                if hint := f"set {' or '.join(fields)} in the config" if fields else METHODS.get(name, ""):
                    what = f"engine.{name} = ... would do nothing: 'Engine' has no attribute {name!r}; {hint}"
                    raise AttributeError(what, name=name, obj=self)
            object.__setattr__(self, name, value)

        def __getattr__(self, name: str) -> Any:
            if name == _COMPILED:
                raise ContractError(
                    "torch.compile(engine) would compile the engine's own checks; set `compile` in the config, such "
                    "as compile: per_block, or compile the model before unishard.prepare"
                )
            if hasattr(type(self), name):  # a property that has raised AttributeError, whose own text is wanted
                return object.__getattribute__(self, name)
            hint = METHODS.get(name, "")
            if not hint and not name.startswith("_") and hasattr(self.module, name):
                hint = f"it is one of the model: engine.module.{name}"
            what = f"'Engine' object has no attribute {name!r}{hint and f'; {hint}'}"
            raise AttributeError(what, name=name, obj=self)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ContractError(
            "an engine cannot be copied or pickled; average its weights with engine.weights.average(decay), write them "
            "with engine.export(folder), or read one with engine.weights.read(name)"
        )
