"""Make a prepared module refuse what plain torch loops do to it and what would act differently on each engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import nn

from unishard.engine.guards.inference_mode import as_no_grad_in_forward
from unishard.errors import ContractError

_CASTS = ("to", "half", "float", "double", "bfloat16", "type", "cuda", "cpu")
"""Methods that a module and a tensor both have, and that change dtype or device."""


class GuardedModule:
    """Refuses to read or replace weights past the engine, and to cast, move or zero them.

    Without it: `state_dict` and `deepcopy` give shards or nothing, `load_state_dict`, `to` and `half` reach some of the
    weights or none, and `zero_grad` inside a window drops gradients, on one engine or on both, in silence.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        dtypes: set[torch.dtype],
        devices: set[torch.device],
        full: bool,
        class_name: str,
        trains: bool,
        require_no_gradients: Callable[[str], None],
        generate: Callable[..., Any] | None,
    ) -> None:
        """From now on refuse.

        Args:
            module: A prepared model.
            dtypes: Those to which a cast is allowed, as the weights have them.
            devices: Those to which a move is allowed.
            full: Whether the module's own parameters are its weights, in full.
            class_name: The model's class before it was sharded.
            trains: Whether the engine has an optimizer.
            require_no_gradients: Raises if the engine holds gradients that the named call would drop.
            generate: What the module's `generate` is to be until the engine is closed; None for its own.
        """
        self._module = module
        self._name = class_name
        self._dtypes, self._devices = dtypes, devices
        methods: dict[str, Callable[..., Any]] = {
            name: self._unless_nothing_changes(name) for name in (*_CASTS, "to_empty")
        }
        methods["zero_grad"] = lambda set_to_none=True: require_no_gradients("model.zero_grad()")
        self._while_open = methods if trains or not full else {}
        if generate is not None:
            self._while_open["generate"] = generate
        self._hooks = as_no_grad_in_forward(module)
        self._for_good: dict[str, Callable[..., Any]] = {}
        if trains or not full:
            self._for_good = {"__deepcopy__": self._copy if full else self._refuse_copy}
        self._lifted = False
        if not full:
            parts: list[Any] = [*module.modules()]  # torch has no types for these methods
            for part in filter(
                _has_state, parts
            ):  # models may share others: transformers has one `nn.ReLU` for all models of GPT-1
                part.register_state_dict_pre_hook(self._before_state_dict)
                part.register_load_state_dict_pre_hook(self._before_load_state_dict)
        vars(module).update(self._while_open | self._for_good)

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """A block in which the module refuses nothing."""
        own = vars(self._module)
        removed = {name: own.pop(name) for name in (*self._while_open, *self._for_good) if name in own}
        self._lifted = True
        try:
            yield
        finally:
            self._lifted = False
            own.update(removed)

    def close(self) -> None:
        """Refuse only what stays wrong: the weights stay sharded."""
        for hook in self._hooks:
            hook.remove()
        for name in self._while_open:
            vars(self._module).pop(name, None)
        self._while_open = {}

    def _unless_nothing_changes(self, name: str) -> Callable[..., nn.Module]:
        """A method that returns the module if it would change neither dtype nor device on any engine."""

        def call(*args: Any, **kwargs: Any) -> nn.Module:
            if name == "to_empty" or any(_changes(each, name, args, kwargs) for each in self._examples()):
                raise ContractError(
                    f"model.{name}() would change the dtype or the device of a prepared {self._name}, which engines "
                    "ignore or break on; remove the call: the engine has put the model on engine.device, and its "
                    "dtypes are those of `precision` in the config"
                )
            return self._module

        return call

    def _examples(self) -> Iterator[torch.Tensor]:
        """An empty tensor of each dtype and device that some engine holds the model in."""
        buffers = {buffer.dtype for buffer in self._module.buffers() if buffer.is_floating_point()}
        for dtype in self._dtypes | buffers:
            for device in self._devices:
                yield torch.empty(0, dtype=dtype, device=device)

    def _copy(self, memo: dict[int, Any]) -> nn.Module:
        with self.lifted():
            return copy.deepcopy(self._module, memo)

    def _refuse_copy(self, memo: dict[int, Any]) -> NoReturn:
        raise ContractError(
            f"a prepared {self._name} cannot be copied: this rank holds only shards or rounded copies of its weights; "
            "read them with "
            "engine.weights.read(name), average them with engine.weights.average(decay), or write them with "
            "engine.export(folder)"
        )

    def _before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not self._lifted:
            raise ContractError(
                f"state_dict() was called on a prepared {self._name}, of whose weights this rank holds only shards or "
                "rounded copies; write a checkpoint with engine.save(folder), write the weights in Hugging Face's "
                "layout with engine.export(folder), or read them with engine.weights.state_dict()"
            )

    def _before_load_state_dict(self, module: nn.Module, *state: Any) -> None:
        if not self._lifted:
            raise ContractError(
                f"load_state_dict() was called on a prepared {self._name}, and would not reach the engine's shards; "
                "load the weights before unishard.prepare, or load a checkpoint with engine.load(folder), or replace "
                "them with engine.weights.load(weights), some of them, as of an adapter, with strict=False"
            )


def _has_state(module: nn.Module) -> bool:
    return next(chain(module.parameters(), module.buffers()), None) is not None


def _changes(example: torch.Tensor, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    cast: torch.Tensor = getattr(example, name)(*args, **kwargs)
    return cast.dtype != example.dtype or cast.device != example.device
