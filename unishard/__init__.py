"""One config, two real sharding engines (PyTorch FSDP2 and DeepSpeed ZeRO), one training loop.

Importing this package imports neither torch nor an engine; names that need torch load it when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from unishard.config import Config
from unishard.config.topology import Topology
from unishard.errors import (
    BackendError,
    CheckpointError,
    ConfigError,
    ContractError,
    DataError,
    EngineMismatchError,
    ModelError,
    NonFiniteError,
    RankMismatchError,
    TranslationError,
    UnishardError,
)
from unishard.hints.names import PACKAGE
from unishard.loading import load
from unishard.mapping.report import Report, Translation
from unishard.mapping.rules import Fit, Rule
from unishard.plugins.registry import available
from unishard.plugins.translate import translate
from unishard.version import __version__ as __version__

if TYPE_CHECKING:
    from unishard.data import dataloader
    from unishard.distributed.process_group import shutdown
    from unishard.engine.engine import Engine
    from unishard.engine.model.from_pretrained import from_pretrained
    from unishard.engine.model.init import init
    from unishard.engine.prepare import prepare
    from unishard.engine.results import Placement, Resumed, Step
    from unishard.engine.state.moving_average import MovingAverage
    from unishard.plugins.backend import Backend, OptimizerFactory

__all__ = [
    "Backend",
    "BackendError",
    "CheckpointError",
    "Config",
    "ConfigError",
    "ContractError",
    "DataError",
    "Engine",
    "EngineMismatchError",
    "Fit",
    "ModelError",
    "MovingAverage",
    "NonFiniteError",
    "OptimizerFactory",
    "Placement",
    "RankMismatchError",
    "Report",
    "Resumed",
    "Rule",
    "Step",
    "Topology",
    "Translation",
    "TranslationError",
    "UnishardError",
    "available",
    "dataloader",
    "from_pretrained",
    "init",
    "load",
    "prepare",
    "shutdown",
    "translate",
]

_ON_FIRST_USE = {
    "Backend": "unishard.plugins.backend",
    "Engine": "unishard.engine.engine",
    "MovingAverage": "unishard.engine.state.moving_average",
    "OptimizerFactory": "unishard.plugins.backend",
    "Placement": "unishard.engine.results",
    "Resumed": "unishard.engine.results",
    "Step": "unishard.engine.results",
    "dataloader": "unishard.data",
    "from_pretrained": "unishard.engine.model.from_pretrained",
    "init": "unishard.engine.model.init",
    "prepare": "unishard.engine.prepare",
    "shutdown": "unishard.distributed.process_group",
}


def __getattr__(name: str) -> Any:
    """Load a name on first use: those that need torch, and types that the command line does not need."""
    if name not in _ON_FIRST_USE:
        hint = PACKAGE.get(name, "")
        raise AttributeError(f"module 'unishard' has no attribute {name!r}{hint and f'; {hint}'}", name=name)
    try:
        value = globals()[name] = getattr(import_module(_ON_FIRST_USE[name]), name)
    except ModuleNotFoundError as error:
        raise BackendError(f"unishard.{name} needs {error.name}, which is not installed; pip install 'unishard[torch]'") from error
    return value
