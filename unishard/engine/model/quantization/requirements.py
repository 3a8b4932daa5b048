"""Whether bitsandbytes is there, and works on a device."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import torch
from torch import nn

from unishard.config import Quantization
from unishard.config.topology import Topology
from unishard.contract.installed import version_of
from unishard.distributed.devices import device_of
from unishard.eight_bit.kernel_hint import hide_kernel_hint
from unishard.engine.model.quantization.linear import quantized_layers
from unishard.engine.model.quantization.loading import storage_of
from unishard.engine.model.quantization.storage import Storage
from unishard.errors import ConfigError, Problem

_FIELD = "quantization.type"
_SMALL = (8, 64)


def require_installed(word: str) -> None:
    """Check that bitsandbytes is installed.

    Raises:
        ConfigError: It is not.
    """
    if find_spec("bitsandbytes") is None:
        message = f"{word} needs bitsandbytes, which is not installed; pip install 'unishard[quantization]'"
        raise ConfigError([Problem(_FIELD, message)])
    hide_kernel_hint()


def check_quantized(model: nn.Module, cfg: Quantization, topology: Topology) -> None:
    """Check that the layers of a model are as the section says, and that they run on this rank's device.

    Raises:
        ConfigError: They are not, or do not.
    """
    storages = {name: layer.storage for name, layer in quantized_layers(model)}
    if cfg.on and not storages:
        message = (
            f"is {cfg.type}, and {type(model).__name__} has no quantized layers; load it with "
            "unishard.from_pretrained(cls, path, cfg), or remove quantization"
        )
        raise ConfigError([Problem(_FIELD, message)])
    for name, storage in storages.items() if cfg.on else ():
        wanted = storage_of(storage.shape, cfg)
        if (storage.type, storage.nested) != (wanted.type, wanted.nested):
            message = (
                f"the model has {_words(storage)} in {name}, and this config says {_words(wanted)}; write what the "
                "model was loaded with, or remove quantization, which a loaded model does not need"
            )
            raise ConfigError([Problem(_FIELD, message)])
    device = device_of(topology)
    for storage in {(each.type, each.nested): each for each in storages.values()}.values():
        require_device(storage, device)


def _words(storage: Storage) -> str:
    return f"{storage.type} with double_quantization" if storage.nested else storage.type


def require_device(storage: Storage, device: torch.device) -> None:
    """Check that bitsandbytes has what the layers call on a device, by one small product and its backward.

    Raises:
        ConfigError: It has not.
    """
    small = replace(storage, shape=_SMALL)
    try:
        elements, scales = (torch.zeros(size, dtype=torch.uint8, device=device) for size in small.sizes)
        small.product(torch.zeros(1, _SMALL[1], device=device), elements, scales, None)
        small.backward_weight(elements, scales, torch.float32)
    except (RuntimeError, NotImplementedError, AssertionError, AttributeError, OSError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        message = (
            f"{storage.type} does not run on {device.type} with bitsandbytes {version_of('bitsandbytes')} "
            f"({reason:.200}); install the build of bitsandbytes for this device, or leave out quantization"
        )
        raise ConfigError([Problem(_FIELD, message)]) from error
