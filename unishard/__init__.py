"""One config, two real sharding engines (PyTorch FSDP2 and DeepSpeed ZeRO), one training loop.

Importing this package imports neither torch nor an engine; names that need torch load it when they are first used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unishard.config import Config, loading
from unishard.config.topology import Topology
from unishard.contract.registry import available
from unishard.contract.report import Report, Translation
from unishard.contract.rules import Fit, Rule
from unishard.contract.translate import translate
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
from unishard.failures import prelaunch_errors
from unishard.version import __version__ as __version__

if TYPE_CHECKING:
    from unishard.contract.backend import Backend, OptimizerFactory
    from unishard.contract.results import Placement, Resumed, Step
    from unishard.data import dataloader
    from unishard.engine.engine import Engine
    from unishard.engine.model.from_pretrained import from_pretrained
    from unishard.engine.model.initialization import init
    from unishard.engine.prepare import prepare
    from unishard.engine.state.moving_average import MovingAverage
    from unishard.failures.lifetime import shutdown
    from unishard.logits.chunks import chunked_loss
    from unishard.matrices.matrix_optimizer import MatrixOptimizer
    from unishard.matrices.muon import Muon
    from unishard.sequence.attention import attention
    from unishard.sequence.by_heads import by_heads
    from unishard.sequence.halo import causal_conv, shift

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
    "MatrixOptimizer",
    "ModelError",
    "MovingAverage",
    "Muon",
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
    "attention",
    "available",
    "by_heads",
    "causal_conv",
    "chunked_loss",
    "dataloader",
    "from_pretrained",
    "init",
    "load",
    "prepare",
    "shift",
    "shutdown",
    "translate",
]

_ON_FIRST_USE = {
    "Backend": "unishard.contract.backend",
    "Engine": "unishard.engine.engine",
    "MatrixOptimizer": "unishard.matrices.matrix_optimizer",
    "MovingAverage": "unishard.engine.state.moving_average",
    "Muon": "unishard.matrices.muon",
    "OptimizerFactory": "unishard.contract.backend",
    "Placement": "unishard.contract.results",
    "Resumed": "unishard.contract.results",
    "Step": "unishard.contract.results",
    "attention": "unishard.sequence.attention",
    "by_heads": "unishard.sequence.by_heads",
    "causal_conv": "unishard.sequence.halo",
    "chunked_loss": "unishard.logits.chunks",
    "dataloader": "unishard.data",
    "from_pretrained": "unishard.engine.model.from_pretrained",
    "init": "unishard.engine.model.initialization",
    "prepare": "unishard.engine.prepare",
    "shift": "unishard.sequence.halo",
    "shutdown": "unishard.failures.lifetime",
}


def load(
    source: str | Path | Mapping[str, Any] | None = None, overrides: Sequence[str] = (), *, section: str | None = None
) -> Config:
    """Load a config from a YAML 1.2 file or a mapping.

    Top-level keys that start with `x-` are your own, and are not read.

    Args:
        source: Path of a YAML file, or its content as a mapping. None: the file that `unishard launch` was given, with
            its overrides.
        overrides: Overrides such as `["training.micro_batch_size=4", "sharding.units=[A, B]"]`. The value is YAML;
            the last one wins.
        section: Dotted name of the section that holds the config, in a file that has other sections too; None for the
            whole file.

    Returns:
        The validated config.

    Raises:
        ConfigError: The file cannot be read, or has invalid values; lists every problem with `file:line`. Or there is
            no source, and `unishard launch` has not started this process.
    """
    if source is None:
        prelaunch_errors.install()  # `unishard launch` has started this process
    return loading.load(source, overrides, section=section)


def __getattr__(name: str) -> Any:
    """Load a name on first use: those that need torch, and types that the command line does not need."""
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module 'unishard' has no attribute {name!r}", name=name)
    try:
        value = globals()[name] = getattr(import_module(_ON_FIRST_USE[name]), name)
    except ModuleNotFoundError as error:
        raise BackendError(
            f"unishard.{name} needs {error.name}, which is not installed; pip install {error.name}"
        ) from error
    return value
