"""Optimizers as users write them, that look at more than an element, hold others, or have modes."""

from __future__ import annotations

from collections import OrderedDict, defaultdict

import torch


class Lamb(torch.optim.Optimizer):
    """A trust ratio for each tensor; averages of the gradient and of its square, which count steps in a number."""

    def __init__(self, params, lr=0.02, weight_decay=0.01):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(p), square=torch.zeros_like(p))
                state["step"] += 1
                state["mean"].lerp_(p.grad, 0.1)
                state["square"].lerp_(p.grad.square(), 0.01)
                scale = (1 - 0.99 ** state["step"]) ** 0.5
                update = state["mean"] * scale / (state["square"].sqrt() + 1e-6) + group["weight_decay"] * p
                ratio = p.norm() / update.norm()
                p.sub_(update * torch.where(ratio > 0, ratio, 1.0), alpha=group["lr"])


class Tracing(Lamb):
    """Keeps what no checkpoint has."""

    def step(self, closure=None):
        super().step(closure)
        for state in self.state.values():
            state["trace"] = object()


class Centralized(torch.optim.SGD):
    """Gradients minus their mean over all dimensions but the first, in a subclass of a class of torch."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.dim() > 1:
                    p.grad.sub_(p.grad.mean(dim=tuple(range(1, p.grad.dim())), keepdim=True))
        return super().step(closure)


class Normalized(torch.optim.SGD):
    """Gradients by the norm of all of them."""

    @torch.no_grad()
    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([each.norm() for each in gradients]).norm()
        for each in gradients:
            each.div_(norm)
        return super().step(closure)


class Counting(torch.optim.SGD):
    """Element-wise, with a rate that its own count of steps decides."""

    count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.div_(self.count)
        return super().step(closure)


class Lookahead(torch.optim.Optimizer):
    """Around another one: every second step, weights are averaged with slow copies, made when it is constructed."""

    def __init__(self, inner, k=2, alpha=0.5):
        self.inner, self.k, self.alpha, self.count = inner, k, alpha, 0
        # As timm's, without torch's constructor.
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self.param_groups, self.defaults, self.state = inner.param_groups, inner.defaults, defaultdict(dict)
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.count += 1
        if self.count % self.k == 0:
            for group, copies in zip(self.param_groups, self.slow, strict=True):
                for p, slow in zip(group["params"], copies, strict=True):
                    slow.lerp_(p, self.alpha)
                    p.copy_(slow)


class Both(torch.optim.Optimizer):
    """Muon for matrices beside AdamW, each with groups of its own."""

    def __init__(self, params, lr=0.02):
        params = list(params)
        self.matrices = torch.optim.Adafactor([p for p in params if p.dim() == 2], lr=lr)
        self.others = torch.optim.AdamW([p for p in params if p.dim() != 2], lr=0.003)
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        self.matrices.step()
        self.others.step()


class ScheduleFree(torch.optim.Optimizer):
    """SGD without a schedule (Defazio et al. 2024): it trains where gradients are taken, and is evaluated elsewhere."""

    def __init__(self, params, lr=0.5, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    @torch.no_grad()
    def eval(self):
        self._turn(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def train(self):
        self._turn(True, lambda beta: 1 - beta)

    def _turn(self, training, weight):
        for group in self.param_groups:
            if group["train_mode"] != training:
                group["train_mode"] = training
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight(group["beta"]))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("optimizer was not in train mode")
            group["k"] += 1
            average = 1 / group["k"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, average)
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - average) - 1))
                z.sub_(p.grad, alpha=group["lr"])


def in_groups(params):
    """Matrices, and the rest with another rate."""
    params = list(params)
    return [{"params": [p for p in params if p.dim() > 1]}, {"params": [p for p in params if p.dim() <= 1], "lr": 0.01}]


MAKES = {
    "lamb": lambda params: Lamb(in_groups(params)),
    "centralized": lambda params: Centralized(params, lr=0.1, momentum=0.9),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.02),
    "counting": lambda params: Counting(in_groups(params), lr=0.1),
    "lookahead": lambda params: Lookahead(torch.optim.AdamW(in_groups(params), lr=0.02)),
    "both": Both,
    "schedule_free": ScheduleFree,
}
