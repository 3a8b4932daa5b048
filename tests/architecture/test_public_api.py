"""What users write against. Taking a name away, or adding one, is a decision and not an accident."""

from __future__ import annotations

import inspect
from pathlib import Path

import unishard
from unishard.contract.adapter import ShardedModel, Updates
from unishard.contract.backend import Backend
from unishard.contract.results import Placement, Resumed, Step
from unishard.engine.engine import Engine
from unishard.engine.framework import Framework
from unishard.engine.gradients import Gradients
from unishard.engine.weights import Weights

PUBLIC = [
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


def members(kind: type) -> set[str]:
    names = {name for each in kind.__mro__ if each.__module__.startswith("unishard") for name in vars(each)}
    return {name for name in names if not name.startswith("_") or name in ("__call__", "__enter__", "__exit__")}


def test_names() -> None:
    assert sorted(unishard.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(unishard, name) is not None


def test_public_things_are_documented() -> None:
    for name in PUBLIC:
        if name != "OptimizerFactory":
            assert inspect.getdoc(getattr(unishard, name)), name


def test_what_an_engine_is() -> None:
    assert members(Engine) == {
        *("__call__", "__enter__", "__exit__"),
        *("backward", "step", "discard", "batches", "windows", "train", "eval"),
        *("generate", "lockstep", "gather_for_metrics", "mean", "log", "split_sequence"),
        *("save", "load", "wait", "export", "close"),
        *("weights", "gradients", "framework"),
        *("module", "optimizer", "lr", "resumed"),
        *("device", "rank", "world_size", "is_main", "print"),
    }
    assert members(Weights) == {
        *("read", "write", "gathered", "unsharded", "norms", "state_dict", "load", "stream"),
        *("set_trainable", "frozen", "average", "placement", "rounded"),
    }
    assert members(Gradients) == {"read", "write", "norms", "norm", "clip", "loss_scale"}
    assert members(Framework) == {
        *("set_boundary", "scaled_backward", "routed", "finish_whole", "reached_by", "on_save"),
        *("leave", "release"),
    }
    assert Resumed._fields == ("path", "step", "epoch", "state", "notes")
    assert Step._fields == ("updated", "grad_norm", "lr", "skipped")
    assert Placement._fields == ("engine", "units", "master_dtypes", "master_numel", "param_bytes")


def test_what_an_adapter_is() -> None:
    assert ShardedModel.__abstractmethods__ == {"forward", "master_shard", "placement", "close"}
    assert Updates.__abstractmethods__ == {
        *("begin", "backward", "finish_gradients", "update", "drop_gradients", "grad_shard"),
    }
    both = ShardedModel, Updates
    own, every = (sum(map(len, each)) for each in ([kind.__abstractmethods__ for kind in both], [*map(members, both)]))
    page = (Path(__file__).resolve().parents[2] / "docs" / "writing-a-backend.md").read_text(encoding="utf-8")
    assert f"{every} members:\nan author writes {own}, and {every - own} have defaults" in page


def test_what_a_backend_is() -> None:
    assert members(Backend) == {
        *("name", "requires", "tested", "private_api", "rules", "constants", "translate", "require", "spec", "build"),
        *("checkpoint_formats", "footprint", "layout", "averages_over_holders"),
    }


def test_signatures() -> None:
    assert str(inspect.signature(unishard.load)) == (
        "(source: 'str | Path | Mapping[str, Any] | None' = None, overrides: 'Sequence[str]' = (), *, section: 'str | "
        "None' = None) -> 'Config'"
    )
    assert str(inspect.signature(unishard.translate)) == (
        "(cfg: 'Config', *, backend: 'str | None' = None, topology: 'Topology | None' = None) -> 'Translation'"
    )
    assert str(inspect.signature(unishard.prepare)) == (
        "(model: 'nn.Module', cfg: 'Config', optimizer: 'OptimizerFactory | torch.optim.Optimizer | None' = None, "
        "scheduler: 'SchedulerFactory | LRScheduler | None' = None, *, train: 'bool' = True, reseed: 'bool' = True) -> 'Engine'"
    )


def test_a_name_that_is_not_there() -> None:
    assert not hasattr(unishard, "prepair")
