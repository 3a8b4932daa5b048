"""Parameters of unusual shapes and types, and parameters that a forward writes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dev.models.case import Kind
from dev.models.habits.blocks import WIDTH, Block, add, stack

__all__ = ["KIND"]

KIND = Kind("Own modules: parameters")


class _Scaled(nn.Module):
    """Blocks over inputs that own parameters change."""

    def __init__(self, **parameters: nn.Parameter) -> None:
        super().__init__()
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)
        self.blocks = stack()


class _Temperature(_Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x) * self.scale.exp()


add(KIND, "a parameter without dimensions", lambda: _Temperature(scale=nn.Parameter(torch.tensor(0.6))))


class _Empty(_Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x) + self.none.sum()


add(KIND, "an empty parameter", lambda: _Empty(none=nn.Parameter(torch.zeros(0, 4))))


class _EmptyInBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.none.sum()


add(KIND, "an empty parameter in a unit", lambda: nn.Sequential(_EmptyInBlock(), _EmptyInBlock()))


class _OneElement(_Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x * self.row + self.shift) * self.gate


add(
    KIND,
    "parameters smaller than the number of ranks",
    lambda: _OneElement(
        row=nn.Parameter(torch.ones(1, WIDTH)),
        shift=nn.Parameter(torch.zeros(1)),
        gate=nn.Parameter(torch.ones(1, 1, 1)),
    ),
)


class _Strided(_Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x @ self.transposed @ self.strided)


add(
    KIND,
    "parameters that are not contiguous",
    lambda: _Strided(
        transposed=nn.Parameter(0.3 * torch.randn(WIDTH, WIDTH).t()),
        strided=nn.Parameter(0.3 * torch.randn(WIDTH, 2 * WIDTH)[:, ::2]),
    ),
)


class _Einsum(_Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(torch.einsum("btd,edf->btf", x, self.experts)) + self.grid.mean()


add(
    KIND,
    "einsum with parameters of 3 and 4 dimensions",
    lambda: _Einsum(
        experts=nn.Parameter(0.2 * torch.randn(3, WIDTH, WIDTH)), grid=nn.Parameter(0.1 * torch.randn(1, 5, 1, 3))
    ),
)


class _Complex(_Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return self.blocks((x * self.phase).real.to(x.dtype))


add(
    KIND, "a trained complex parameter", lambda: _Complex(phase=nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64)))
)
add(
    KIND,
    "a frozen complex parameter",
    lambda: _Complex(phase=nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64), requires_grad=False)),
)


class _Fourier(_Scaled):
    def forward(self, x: Tensor) -> Tensor:
        filtered = torch.fft.rfft(x.float()) * torch.view_as_complex(self.pairs.float().contiguous())
        return self.blocks(torch.fft.irfft(filtered, n=WIDTH).to(x.dtype))


add(
    KIND,
    "complex numbers within the forward",
    lambda: _Fourier(pairs=nn.Parameter(0.5 * torch.randn(WIDTH // 2 + 1, 2))),
)


class _Quantized(_Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x @ (self.int8.to(x.dtype) * self.scale))


add(
    KIND,
    "frozen int8 weights with trained scales",
    lambda: _Quantized(
        int8=nn.Parameter(torch.randint(-100, 100, (WIDTH, WIDTH), dtype=torch.int8), requires_grad=False),
        scale=nn.Parameter(torch.full((WIDTH,), 0.01)),
    ),
)


class _MixedTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = stack()
        self.frozen = nn.Linear(WIDTH, WIDTH).to(torch.bfloat16).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x) + self.frozen(x.to(torch.bfloat16)).to(x.dtype)


add(KIND, "a frozen layer in bf16", _MixedTypes)


class _Collections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.named = nn.ParameterDict({"weight": 0.3 * torch.randn(WIDTH, WIDTH), "bias": 0.1 * torch.randn(WIDTH)})
        self.listed = nn.ParameterList([0.3 * torch.randn(WIDTH, WIDTH) for _ in range(3)])
        self.blocks = nn.ModuleDict({"x": Block(), "y": Block()})

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.named["weight"] + self.named["bias"]
        for weight in self.listed:
            x = torch.tanh(x @ weight)
        return self.blocks["y"](self.blocks["x"](x))


add(KIND, "ParameterDict, ParameterList and ModuleDict", _Collections)


def _biases_only() -> nn.Module:
    blocks = stack(3)
    for name, parameter in blocks.named_parameters():
        parameter.requires_grad_("bias" in name)
    return blocks


add(KIND, "only biases are trained", _biases_only)


class _Clamped(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


add(KIND, "weights clamped in the forward", lambda: nn.Sequential(_Clamped(), _Clamped()))


class _ActNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("initialized", torch.tensor(0))
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        if not self.initialized.item():
            self.shift.data.fill_(0.3)
            self.scale.data.fill_(0.7)
            self.initialized.fill_(1)
        return self.block((x + self.shift) * self.scale)


add(KIND, "ActNorm, initialized by the first batch", lambda: nn.Sequential(_ActNorm(), _ActNorm()))


class _MomentumEncoder(nn.Module):
    def __init__(self, *, replaces: bool) -> None:
        super().__init__()
        self.replaces = replaces
        self.query, self.key = stack(), stack()
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
                if self.replaces:
                    key.data = key.data * 0.9 + query.data * 0.1
                else:
                    key.mul_(0.9).add_(query, alpha=0.1)
            target = self.key(x)
        return self.query(x) + 0.5 * target


add(KIND, "MoCo's momentum encoder, in place", lambda: _MomentumEncoder(replaces=False))
add(KIND, "MoCo's momentum encoder, by .data", lambda: _MomentumEncoder(replaces=True))


class _Codebook(nn.Module):
    """A moving average of what is nearest, in a buffer."""

    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = stack()
        self.register_buffer("codes", torch.randn(8, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.blocks(x)
        nearest = (
            self.codes[torch.cdist(hidden.float().flatten(0, 1), self.codes.float()).argmin(1)]
            .view_as(hidden)
            .to(hidden.dtype)
        )
        self.codes.mul_(0.99)
        return hidden + 0.5 * (nearest - hidden).detach()


add(KIND, "a codebook in a buffer that the forward writes", _Codebook)
