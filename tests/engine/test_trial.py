"""What optimizers are found to need, by stepping copies of them on small tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unishard.distributed.nested_optimizers import completed
from unishard.engine.optim.trial import ask, is_known


class Derived(torch.optim.AdamW):
    """Changes nothing."""


class Trusted(torch.optim.SGD):
    """A trust ratio."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(p.norm() / p.grad.norm())
        super().step()


class Clipped(torch.optim.SGD):
    """The norm of all gradients is at most 1."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        super().step()


class Noisy(torch.optim.SGD):
    """Noise in each element."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=1e-3)


class Counting(torch.optim.SGD):
    """Counts its steps."""

    count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        super().step()


class Around(torch.optim.Optimizer):
    """Holds another one."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.inner = torch.optim.AdamW(params)
        super().__init__(self.inner.param_groups, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


class Bare(torch.optim.Optimizer):
    """Holds another one, and does not call torch's constructor, as timm's Lookahead."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


class Searching(torch.optim.SGD):
    """Needs a closure."""

    def step(self, closure: Any) -> None:  # type: ignore[override]
        super().step(closure)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (Derived, "element-wise"),
        (lambda params: Noisy(params, lr=0.1), "element-wise"),
        (lambda params: torch.optim.SGD(params, lr=0.0, momentum=0.9), "element-wise"),
        (lambda params: Trusted(params, lr=0.1), "by tensor"),
        (lambda params: Trusted(params, lr=0.0), "by tensor"),
        (torch.optim.Adafactor, "by tensor"),
        (lambda params: Counting(params, lr=0.1), "by tensor"),
        (Around, "by tensor"),
        (lambda params: Clipped(params, lr=0.1), "together"),
        (lambda params: Searching(params, lr=0.1), "unknown"),
    ],
    ids=[
        "derived",
        "random",
        "rate 0",
        "trust ratio",
        "trust ratio at rate 0",
        "factored",
        "counts",
        "around another",
        "norm of all",
        "closure",
    ],
)
def test_what_an_update_looks_at(make: Callable[[Any], torch.optim.Optimizer], found: str) -> None:
    parameters = [nn.Parameter(torch.randn(shape)) for shape in ((5, 3), (5,), (3, 5), (2, 3, 4), ())]
    before, random = [each.detach().clone() for each in parameters], torch.get_rng_state()
    optimizer = make(parameters)
    needs = ask(optimizer, parameters, None)
    told = "unknown" if needs.unknown else "by tensor" if needs.by_tensor else "together"
    assert ("element-wise" if needs.element_wise else told) == found
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(*each) for each in zip(parameters, before, strict=True))
    assert not optimizer.state
    assert getattr(optimizer, "count", 0) == 0


def test_only_classes_of_torch_themselves_need_no_trial() -> None:
    parameters = [nn.Parameter(torch.zeros(2))]
    assert is_known(torch.optim.AdamW(parameters))
    assert not is_known(Derived(parameters))
    assert not is_known(torch.optim.Adafactor(parameters))


def test_what_torchs_constructor_makes_is_made_for_optimizers_that_do_not_call_it() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    optimizer = completed(Bare(torch.optim.SGD(parameters, lr=0.5)))
    asked: list[Any] = []
    optimizer.register_state_dict_pre_hook(asked.append)
    optimizer.register_step_post_hook(lambda *_: asked.append("stepped"))
    parameters[0].grad = torch.ones(2)
    optimizer.step()
    assert parameters[0].tolist() == [0.5, 0.5]
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.5
    assert asked == ["stepped", optimizer]
