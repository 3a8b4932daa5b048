"""Functions with the arguments of kernels (fla 0.6, mamba_ssm 2.3, causal_conv1d 1.6), which compute by torch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback


def _pieces(numbers: torch.Tensor) -> list[tuple[int, int]]:
    """Where documents of a sample begin and end, of `seq_idx`."""
    starts = [0, *(torch.nonzero(numbers.diff())[:, 0] + 1).tolist()]
    return [*zip(starts, [*starts[1:], len(numbers)], strict=True)]


class Kernels:
    """Stand-ins that count the calls in which they keep documents apart."""

    def __init__(self, module: Any) -> None:
        self.apart: list[str] = []
        self._torch = {name: getattr(module, name).__wrapped__ for name in self.names if hasattr(module, name)}

    @property
    def names(self) -> dict[str, tuple[str, str, Callable[..., Any]]]:
        """transformers' name of each, the kernel's, its package, and what stands for it."""
        return {
            "causal_conv1d_fn": ("causal_conv1d_fn", "causal_conv1d", self.convolution),
            "torch_chunk_gated_delta_rule": ("chunk_gated_delta_rule", "fla", self.delta_rule),
            "mamba2_split_conv1d_scan_combined": ("mamba_split_conv1d_scan_combined", "mamba_ssm", self.fused),
            "mamba2_chunk_scan": ("mamba_chunk_scan_combined", "mamba_ssm", self.mamba2),
        }

    def convolution(
        self, x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False,
        final_states_out=None, activation=None,
    ):  # fmt: skip
        own = self._torch["causal_conv1d_fn"]
        if seq_idx is None:
            return own(x, weight, bias, activation)
        self.apart.append("convolution")
        rows = [
            torch.cat([own(row[None, :, a:b], weight, bias, activation) for a, b in _pieces(of_row)], 2)
            for row, of_row in zip(x, seq_idx, strict=True)
        ]
        return torch.cat(rows)

    def delta_rule(
        self, q, k, v, g=None, beta=None, scale=None, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, cu_seqlens=None,
    ):  # fmt: skip
        own, options = self._torch["torch_chunk_gated_delta_rule"], {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        if cu_seqlens is None:
            options |= {"initial_state": initial_state, "output_final_state": output_final_state}
            return own(q, k, v, g=g, beta=beta, **options)
        assert len(q) == 1, "as fla"
        self.apart.append("delta rule")
        borders = cu_seqlens.tolist()
        spans = pairwise(borders)
        parts = [own(q[:, a:b], k[:, a:b], v[:, a:b], g=g[:, a:b], beta=beta[:, a:b], **options)[0] for a, b in spans]
        return torch.cat(parts, 1), None

    def fused(self, zxbcdt, *options):
        """Leaves it to the others."""

    def mamba2(
        self, x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None,
        dt_softplus=False, dt_limit=(0.0, float("inf")), return_final_states=False,
    ):  # fmt: skip
        own, options = self._torch["mamba2_chunk_scan"], {"dt_softplus": dt_softplus, "dt_limit": dt_limit}
        options |= {"chunk_size": chunk_size, "D": D, "dt_bias": dt_bias}
        if seq_idx is None:
            return own(x, dt, A, B, C, **options, return_final_states=return_final_states)
        self.apart.append("mamba2")
        rows = [
            torch.cat([own(*(t[row, None, a:b] for t in (x, dt)), A, *(t[row, None, a:b] for t in (B, C)), **options)
                       for a, b in _pieces(seq_idx[row])], 1)
            for row in range(len(x))
        ]  # fmt: skip
        return torch.cat(rows)


@contextmanager
def kernels_for(model: Any) -> Iterator[Kernels]:
    """A block in which transformers has found kernels for a model's functions."""
    module = importlib.import_module(type(model).__module__)
    kernels = Kernels(module)
    packages: dict[str, Any] = {
        "causal_conv1d": SimpleNamespace(causal_conv1d_fn=kernels.convolution),
        "fla": SimpleNamespace(
            ops=SimpleNamespace(gated_delta_rule=SimpleNamespace(chunk_gated_delta_rule=kernels.delta_rule))
        ),
        "mamba_ssm": SimpleNamespace(
            mamba_chunk_scan_combined=kernels.mamba2, mamba_split_conv1d_scan_combined=kernels.fused
        ),
    }
    with ExitStack() as put, mock.patch.dict(sys.modules, packages):
        for name, (own_name, package, _) in kernels.names.items():
            if name in kernels._torch:
                found = use_kernel_func_from_hub_with_fallback(own_name, package)(kernels._torch[name])
                put.enter_context(mock.patch.object(module, name, found))
        yield kernels
