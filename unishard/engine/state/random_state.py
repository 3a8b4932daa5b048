"""The states of the random number generators that training uses."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from unishard.data.seeds import seed_of
from unishard.errors import CheckpointError


def capture_random(device: torch.device) -> dict[str, Tensor]:
    """Read the states of this rank's generators: torch's on the CPU and on its CUDA device, Python's, and numpy's
    global one.

    numpy is included only if it is already imported; otherwise nothing can have used it.

    Args:
        device: Where this rank computes.

    Returns:
        Bytes by kind (`torch`, `cuda`, `python`, `numpy`): torch's own encoding, else JSON.
    """
    states = {"torch": torch.get_rng_state(), "python": _packed(random.getstate())}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    if "numpy" in sys.modules:
        states["numpy"] = _packed(_numpy_state())
    return states


def restore_random(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore the states that `capture_random` returned. A generator without a captured state does not change.

    Args:
        states: The result of `capture_random`, on any device.
        device: Where this rank computes; without CUDA, a CUDA state is ignored.

    Raises:
        CheckpointError: A state does not fit its generator. Those before it are restored.
    """
    setters: dict[str, Callable[[Tensor], None]] = {
        "torch": torch.set_rng_state,
        "python": _set_python,
        "numpy": _set_numpy,
    }
    if device.type == "cuda":
        setters["cuda"] = lambda state: torch.cuda.set_rng_state(state, device)
    for kind in setters.keys() & states.keys():
        try:
            setters[kind](states[kind].cpu())
        except (RuntimeError, TypeError, ValueError, KeyError) as problem:
            raise CheckpointError(
                f"the checkpoint's {kind} random state does not fit this version of {kind} ({problem}); resume with "
                "the versions in its manifest"
            ) from problem


def require_random(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Check that `restore_random` can restore the states. The generators do not change.

    Raises:
        CheckpointError: A state does not fit its generator.
    """
    now = capture_random(device)
    try:
        restore_random(states, device)
    finally:
        restore_random(now, device)


def reseed(seed: int, step: int, rank: int) -> None:
    """Seed all generators of this rank from three numbers, for a run that resumes with another number of ranks.

    The saved states of the ranks cannot be used then. The new seeds differ between ranks and steps and are
    reproducible: resuming the same checkpoint again on the same number of ranks draws the same numbers.

    Args:
        seed: `training.seed`.
        step: The number of updates made.
        rank: This rank.
    """
    new = seed_of(seed, step, rank)
    torch.manual_seed(new)  # CUDA's too
    random.seed(new)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(new % 2**32)


def _numpy_state() -> dict[str, Any]:
    state = sys.modules["numpy"].random.get_state(legacy=False)
    return {**state, "state": {**state["state"], "key": state["state"]["key"].tolist()}}


def _set_numpy(state: Tensor) -> None:
    import numpy  # slow to import, and needed only if it was used before

    numpy.random.set_state(_unpacked(state))


def _set_python(state: Tensor) -> None:
    version, internal, gauss = _unpacked(state)
    random.setstate((version, tuple(internal), gauss))


def _packed(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _unpacked(state: Tensor) -> Any:
    return json.loads(bytes(state.tolist()))
