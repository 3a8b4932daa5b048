"""The reference for training: plain torch, one process, one device, the full global batch.

Shares no training code with unishard.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unishard.config import Config, Optimizer, Precision, Scheduler
from unishard.contract.backend import OptimizerFactory
from unishard.distributed.dtypes import DTYPES

Batch = Mapping[str, Tensor]
Edit = Callable[[int, nn.Module], None]
"""Modifies a model in place. Called with the number of the optimizer step, from 0, and the model."""


class Summed(NamedTuple):
    """A loss that is a sum over items, and the number of items."""

    loss: Callable[[nn.Module, Batch], Tensor]
    """The loss of the model on a micro-batch: a scalar."""
    count: Callable[[Batch], int]


class Curve(NamedTuple):
    """The results of a run, one entry for each optimizer step that was not skipped."""

    losses: tuple[float, ...]
    """Mean loss over the step's micro-batches and ranks."""
    norms: tuple[float, ...]
    """Global L2 norm of the averaged gradients before clipping."""
    lrs: tuple[float, ...]
    """Learning rate of the step."""


def train(
    model: nn.Module,
    windows: Sequence[Sequence[Batch]],
    cfg: Config,
    *,
    world: int,
    clips: Sequence[float | None] | None = None,
    optimizer: OptimizerFactory | None = None,
    summed: Summed | None = None,
    before_update: Edit | None = None,
    after_update: Edit | None = None,
    before_window: Callable[[int], None] | None = None,
    device: torch.device | str | None = None,
) -> Curve:
    """Train a model in place according to `cfg`, on the concatenated data of all ranks.

    Args:
        model: In any dtype; afterwards it holds the master weights.
        windows: For each optimizer step the micro-batches of all ranks, of equal size: by position in the window, then
            by rank.
        cfg: Optimizer, schedule, clipping and precision. Its sharding is ignored.
        world: Number of ranks.
        clips: Gradient clipping of each optimizer step; default: `training.gradient_clipping`.
        optimizer: Builds the optimizer from the trainable parameters; default: from `cfg.optimizer`.
        summed: The loss as a sum over items; default: the mean that the model returns.
        before_update: Edits the `.grad` of the model's parameters, averaged and not yet clipped.
        after_update: Edits the parameters.
        before_window: Called with the number of each optimizer step, from 0, before it; may toggle `requires_grad` of
            parameters.
        device: Device to move model and data to; default: data is moved to the model's device.
    """
    if device is not None:
        model.to(device)
    here = next(model.parameters()).device
    windows = [[{name: value.to(here) for name, value in batch.items()} for batch in window] for window in windows]
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    trainable = [parameter for _, parameter in named]
    for parameter in trainable:
        parameter.data = parameter.data.to(DTYPES[cfg.precision.master])
    built = optimizer(trainable) if optimizer else _optimizer(cfg.optimizer, named)
    peaks = [group["lr"] for group in built.param_groups]
    gradients = _Fp32(model, summed) if cfg.precision.compute == "fp32" else _Low(model, summed, cfg.precision)
    losses: list[float] = []
    norms, lrs = [], []
    for turn, window in enumerate(windows):
        if before_window is not None:
            before_window(turn)
        clip = clips[turn] if clips is not None else cfg.training.gradient_clipping
        part = rate(cfg.scheduler, len(losses))
        for group, peak in zip(built.param_groups, peaks, strict=True):
            group["lr"] = peak * part
        built.zero_grad()
        loss = gradients.fill(window, world)
        if before_update:
            before_update(turn, model)
        norm = _norm(trainable)
        if gradients.skips(norm):
            continue
        nn.utils.clip_grads_with_norm_(trainable, math.inf if clip is None else clip, norm)
        built.step()
        losses.append(loss)
        norms.append(norm.item())
        lrs.append(peaks[0] * part)
        if after_update:
            after_update(turn, model)
    return Curve(tuple(losses), tuple(norms), tuple(lrs))


def _norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    squares = [parameter.grad.double().square().sum() for parameter in parameters if parameter.grad is not None]
    return torch.stack(squares).sum().sqrt().float()


def rate(schedule: Scheduler, update: int) -> float:
    """Factor of the peak learning rate in an optimizer step, counted from 0."""
    warm, end, floor = schedule.warmup_steps, schedule.total_steps, schedule.min_lr_ratio
    if update < warm:
        return update / warm
    if schedule.name == "inverse_sqrt":
        scale = warm or 10_000
        return float(((update - warm + scale) / scale) ** -0.5)
    if schedule.name == "constant" or end is None:
        return 1.0
    left = min(1.0, max(0.0, (end - update) / (schedule.decay_steps or end - warm)))
    shape = schedule.decay_type if schedule.name == "wsd" else schedule.name
    if shape == "sqrt":
        left = 1.0 - (1.0 - left) ** 0.5
    if shape == "cosine":
        left = math.sin(left * math.pi / 2) ** 2
    return floor + left - floor * left


class _Fp32:
    """Gradients of the mean over the concatenated batch."""

    def __init__(self, model: nn.Module, summed: Summed | None) -> None:
        self.model = model
        self.summed = summed

    def fill(self, window: Sequence[Batch], world: int) -> float:
        """Fill `.grad` and return the loss."""
        if self.summed is not None:
            total = torch.stack([self.summed.loss(self.model, batch) for batch in window]).sum()
            mean = total / sum(self.summed.count(batch) for batch in window)
            mean.backward()  # type: ignore[no-untyped-call]
            return float(mean.item())
        loss = self.model(**{name: torch.cat([batch[name] for batch in window]) for name in window[0]}).loss
        loss.backward()
        return float(loss.item())

    def skips(self, norm: Tensor) -> bool:
        """Never, since there is no loss scale."""
        return False


class _Low:
    """Forward and backward on a copy in bf16 or fp16, micro-batch by micro-batch; gradients averaged and summed in the
    config's dtypes.

    The loss is divided by the number of a rank's micro-batches before backward, as the engines do: with 3 of them,
    16-bit gradients round differently from those of an undivided loss. In fp16 the loss is scaled, and a window with
    non-finite gradients is skipped.
    """

    def __init__(self, model: nn.Module, summed: Summed | None, precision: Precision) -> None:
        self.summed = summed
        self.precision = precision
        self.low = DTYPES[precision.compute]
        self.scale = 1.0
        self.quiet = 0
        if precision.compute == "fp16":
            self.scale = (
                precision.initial_loss_scale if precision.loss_scale == "dynamic" else float(precision.loss_scale)
            )
        self.masters = list(model.parameters())
        self.copy = copy.deepcopy(model)
        for parameter in self.copy.parameters():  # not .to(dtype): buffers keep their dtype
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(self.low)

    def fill(self, window: Sequence[Batch], world: int) -> float:
        """Fill `.grad` of the master weights and return the mean loss."""
        copies = list(self.copy.parameters())
        for low, master in zip(copies, self.masters, strict=True):
            low.data.copy_(master.data)
            low.requires_grad_(master.requires_grad)
        wide = self.precision.reduce == self.precision.accumulate == "fp32"
        length = len(window) if wide else world  # micro-batches summed before averaging over ranks
        total = 0.0
        for start in range(0, len(window), length):
            sums: dict[int, Tensor] = {}
            for batch in window[start : start + length]:
                inputs = {
                    name: value.to(self.low) if value.is_floating_point() else value for name, value in batch.items()
                }
                loss = self.copy(**inputs).loss if self.summed is None else self.summed.loss(self.copy, inputs)
                total += loss.item()
                (loss.float() * (self.scale / (len(window) // world) if self.summed is None else self.scale)).backward()
                for index, low in enumerate(copies):
                    if low.grad is not None:
                        gradient = low.grad.to(DTYPES[self.precision.reduce])
                        sums[index] = sums[index] + gradient if index in sums else gradient
                        low.grad = None
            for index, gradient in sums.items():
                master = self.masters[index]
                mean = (gradient / world).to(DTYPES[self.precision.accumulate]).to(master.dtype)
                master.grad = (
                    mean
                    if master.grad is None
                    else (master.grad + mean).to(DTYPES[self.precision.accumulate]).to(master.dtype)
                )
        items = len(window) if self.summed is None else sum(self.summed.count(batch) for batch in window)
        for master in self.masters:
            if master.grad is not None:
                master.grad /= self.scale if self.summed is None else self.scale * items / world
        return total / items

    def skips(self, norm: Tensor) -> bool:
        """Whether the window is skipped; updates the loss scale."""
        if self.precision.compute != "fp16":
            return False
        bad = not math.isfinite(norm.item())
        if self.precision.loss_scale == "dynamic":
            self.quiet = 0 if bad else self.quiet + 1
            if bad:
                self.scale /= 2
            elif self.quiet % self.precision.loss_scale_growth_interval == 0:
                self.scale *= 2
        return bad


def _optimizer(cfg: Optimizer, named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    groups = [
        {"params": [parameter], **_settings(cfg, name, parameter.dim())}
        for name, parameter in sorted(named, key=lambda pair: _settings(cfg, pair[0], pair[1].dim()) != _plain(cfg))
    ]
    match cfg.name:
        case "sgd":
            return torch.optim.SGD(groups, momentum=cfg.momentum, nesterov=cfg.nesterov)
        case "adagrad":
            return torch.optim.Adagrad(groups, eps=cfg.eps)
        case "lion":
            return _Lion(groups, cfg.betas)
        case "muon":
            return _Muon(groups, cfg)
        case "adamw_8bit":
            from bitsandbytes.optim import AdamW8bit

            eight_bit: torch.optim.Optimizer = AdamW8bit(groups, betas=cfg.betas, eps=cfg.eps)
            return eight_bit
        case "adam":
            return torch.optim.Adam(groups, betas=cfg.betas, eps=cfg.eps, amsgrad=cfg.amsgrad, fused=True)
    return torch.optim.AdamW(groups, betas=cfg.betas, eps=cfg.eps, amsgrad=cfg.amsgrad, fused=True)


def _plain(cfg: Optimizer) -> dict[str, Any]:
    return {"lr": cfg.lr, "weight_decay": cfg.weight_decay} | ({"matrix": True} if cfg.name == "muon" else {})


def _is_matrix(cfg: Optimizer, name: str, dims: int) -> bool:
    """Whether Muon updates a parameter; by default weights in a numbered block, of two dimensions or three."""
    patterns = [r"\.\d+\."] if cfg.matrices == "auto" else cfg.matrices
    return dims > 1 and any(re.search(pattern, name) for pattern in patterns)


def _settings(cfg: Optimizer, name: str, dims: int) -> dict[str, Any]:
    """Options of one parameter; the oracle gives each parameter its own group, those with default options first."""
    settings: dict[str, Any] = _plain(cfg)
    if cfg.name == "muon":
        settings["matrix"] = _is_matrix(cfg, name, dims)
        if not settings["matrix"] and cfg.adamw_lr is not None:
            settings["lr"] = cfg.adamw_lr
    if any(re.search(pattern, name) for pattern in cfg.no_decay):
        settings["weight_decay"] = 0.0
    for section in cfg.groups:
        if any(re.search(pattern, name) for pattern in section.params):
            overrides = {"lr": section.lr, "weight_decay": section.weight_decay}
            return settings | {option: value for option, value in overrides.items() if value is not None}
    return settings


class _Lion(torch.optim.Optimizer):
    """Algorithm 2 of "Symbolic Discovery of Optimization Algorithms" (Chen et al. 2023), written out."""

    def __init__(self, groups: list[dict[str, Any]], betas: tuple[float, float]) -> None:
        super().__init__(groups, {"betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            slow, slower = group["betas"]
            for parameter in (each for each in group["params"] if each.grad is not None):
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                direction = (slow * momentum + (1 - slow) * parameter.grad).sign()
                parameter.copy_(parameter * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * direction)
                momentum.copy_(slower * momentum + (1 - slower) * parameter.grad)


class _Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` (torch 2.13) written out, in any dtype and for several matrices in one parameter, and
    `torch.optim.AdamW`.
    """

    def __init__(self, groups: list[dict[str, Any]], cfg: Optimizer) -> None:
        super().__init__(groups, {})
        self.cfg = cfg
        self.others = [group for group in self.param_groups if not group["matrix"]]
        groups = [dict(group) for group in self.others]
        self.adamw = torch.optim.AdamW(groups, betas=cfg.betas, eps=cfg.eps, fused=True) if groups else None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update."""
        if self.adamw is not None:
            for group, own in zip(self.others, self.adamw.param_groups, strict=True):
                own["lr"] = group["lr"]
            self.adamw.step()
        for group in self.param_groups:
            for parameter in group["params"] if group["matrix"] else ():
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        beta = self.cfg.momentum
        momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
        momentum.lerp_(parameter.grad, 1 - beta)
        assert parameter.grad is not None
        ahead = parameter.grad.lerp(momentum, beta) if self.cfg.nesterov else momentum
        rows, columns = parameter.shape[-2:]
        factor = max(1, rows / columns) ** 0.5 if self.cfg.adjust_lr == "original" else 0.2 * max(rows, columns) ** 0.5
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        for matrix, direction in zip(parameter.view(-1, rows, columns), ahead.reshape(-1, rows, columns), strict=True):
            matrix.add_(self._orthogonal(direction), alpha=-group["lr"] * factor)

    def _orthogonal(self, matrix: Tensor) -> Tensor:
        x = matrix.to(DTYPES[self.cfg.ns_dtype])
        x = x.T if matrix.shape[0] > matrix.shape[1] else x
        x = x / x.norm().clamp(min=1e-7)
        for _ in range(self.cfg.ns_steps):
            gram = x @ x.T
            gram = torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
            x = torch.addmm(x, gram, x, beta=3.4445)
        return x.T if matrix.shape[0] > matrix.shape[1] else x
