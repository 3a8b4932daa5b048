"""Names that an engine does not have: those of the config, and what copies or compiles it would look for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from unishard.config import Config
from unishard.config.hints import BY_HABIT, MOVED
from unishard.config.loading.validation import paths_of
from unishard.errors import ContractError

_COMPILED = "_torchdynamo_orig_callable"
"""What torch.compile looks for in its argument (torch 2.13, _dynamo/eval_frame.py, innermost_fn)."""


class OtherNames:
    """Refuses to set a field of the config on the engine, to copy it, and `torch.compile(engine)`.

    Without it: the field would do nothing, and a copy and the compiler take the engine's own state apart.
    """

    if not TYPE_CHECKING:  # for type checkers every name would be there

        def __setattr__(self, name: str, value: Any) -> None:
            if not name.startswith("_") and not hasattr(type(self), name):
                fields = [path for path in paths_of(Config) if path.rpartition(".")[2] == name]
                if fields:
                    raise AttributeError(
                        f"engine.{name} = ... would do nothing: 'Engine' has no attribute {name!r}; set "
                        f"{' or '.join(fields)} in the config",
                        name=name,
                        obj=self,
                    )
            object.__setattr__(self, name, value)

        def __getattr__(self, name: str) -> Any:
            if name == _COMPILED:
                raise ContractError(
                    "torch.compile(engine) would compile the engine's own checks; set `compile` in the config, such "
                    "as compile: per_block, or compile the model before unishard.prepare"
                )
            if hasattr(type(self), name):  # a property that has raised AttributeError, whose own text is wanted
                return object.__getattribute__(self, name)
            said = MOVED.get(name) or BY_HABIT.get(name)
            hint = f"; {said}" if said else ""
            raise AttributeError(f"'Engine' object has no attribute {name!r}{hint}", name=name, obj=self)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ContractError(
            "an engine cannot be copied or pickled; average its weights with engine.weights.average(decay), write them "
            "with engine.export(folder), or read one with engine.weights.read(name)"
        )
