"""Lightning has the arguments and defaults that the tables say."""

from __future__ import annotations

import inspect
from typing import Any

import lightning.fabric.strategies as fabric
import lightning.pytorch as pl
import lightning.pytorch.strategies as pytorch
import pytest
from lightning.fabric import Fabric
from lightning.fabric.strategies import STRATEGY_REGISTRY as FABRIC_REGISTRY

from unishard.contract import registry
from unishard.contract.entries import Unreadable
from unishard.formats import translating
from unishard.formats.lightning import ddp, deepspeed, fsdp, model_parallel
from unishard.formats.lightning.built import built
from unishard.formats.lightning.keys import REMOVED, TRAINER
from unishard.formats.lightning.strategies import NAMES, run_by

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def parameters(of: Any) -> dict[str, Any]:
    return {
        name: parameter.default
        for name, parameter in inspect.signature(of).parameters.items()
        if name != "self" and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }


def test_every_argument_of_the_trainer_has_a_row() -> None:
    assert set(parameters(pl.Trainer.__init__)) - {"strategy"} <= set(TRAINER)
    assert set(parameters(Fabric.__init__)) - {"strategy"} <= set(TRAINER)


def test_no_argument_that_is_said_to_be_removed_is_there() -> None:
    assert not set(REMOVED) & set(parameters(pl.Trainer.__init__))


@pytest.mark.parametrize("strategy", [pytorch.DeepSpeedStrategy, fabric.DeepSpeedStrategy])
def test_the_arguments_and_defaults_of_deepspeed_strategy_are_those_of_the_table(strategy: Any) -> None:
    given = parameters(strategy.__init__)
    known = {**deepspeed.ARGUMENTS, **deepspeed.SCALING}
    assert set(given) == {*known, *deepspeed.OWN, "config"} & set(given)
    batch = "logging_batch_size_per_gpu"
    assert {name: given[name] for name in known if name != batch} == {
        name: value for name, value in known.items() if name != batch
    }


@pytest.mark.parametrize(
    ("strategies", "rows"),
    [
        ((pytorch.FSDPStrategy, fabric.FSDPStrategy), {*fsdp.ARGUMENTS, *fsdp.OWN}),
        ((pytorch.DDPStrategy, fabric.DDPStrategy), {*ddp.ARGUMENTS}),
        ((pytorch.ModelParallelStrategy, fabric.ModelParallelStrategy), {*model_parallel.ARGUMENTS}),
    ],
)
def test_every_argument_of_the_other_strategies_has_a_row(strategies: tuple[Any, Any], rows: set[str]) -> None:
    for strategy in strategies:
        assert set(parameters(strategy.__init__)) <= rows


def test_torchs_own_arguments_that_lightning_hands_on_have_a_row() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    ours = {"module", "device_mesh"}
    assert set(parameters(FullyShardedDataParallel.__init__)) - ours <= {
        *fsdp.ARGUMENTS,
        *fsdp.OWN,
    }
    assert set(parameters(DistributedDataParallel.__init__)) - ours <= {*ddp.ARGUMENTS}


def test_every_registered_name_is_known_or_refused_with_what_instead() -> None:
    for name in {*pytorch.StrategyRegistry, *FABRIC_REGISTRY}:
        if name in NAMES:
            continue
        with pytest.raises(Unreadable, match="must be a strategy that is supported"):
            run_by(built(name), name)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"stage": 3, "offload_optimizer": True, "offload_parameters": True, "pin_memory": True},
        {
            "stage": 3,
            "offload_parameters": True,
            "offload_params_device": "nvme",
            "nvme_path": "/disk",
            "max_in_cpu": 5,
        },
        {"zero_optimization": False},
        {"stage": 1, "reduce_bucket_size": 1000, "overlap_comm": False, "reduce_scatter": False},
    ],
)
def test_the_json_of_deepspeed_strategy_means_what_its_arguments_mean(arguments: dict[str, Any]) -> None:
    theirs = pytorch.DeepSpeedStrategy(**arguments).config
    document = {"strategy": {"class_path": "DeepSpeedStrategy", "init_args": arguments}}
    ours = translating.read(document, "lightning").config
    said: dict[str, Any] = {}
    for entry in registry.arguments("deepspeed").read(
        {**theirs, "gradient_clipping": 0.0, "gradient_accumulation_steps": 1}
    ):
        said |= entry.effect.fields
    named = {
        name: value for name, value in said.items() if name.startswith(("sharding.", "offload.", "communication."))
    }
    for path, value in named.items():
        section, _, field = path.partition(".")
        assert getattr(getattr(ours, section), field) == value, path
