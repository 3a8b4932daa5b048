"""This rank's tensor of a DTensor, without the 6 us that the public `to_local` takes for a parameter (torch 2.13)."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch import Tensor

local_tensor: Callable[[Any], Tensor] = attrgetter("_local_tensor")
