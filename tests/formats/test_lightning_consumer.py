"""Lightning itself takes what is written for it, and has the arguments and defaults that the tables say."""

from __future__ import annotations

import inspect
from typing import Any

import deepspeed
import lightning.fabric.strategies as fabric
import lightning.pytorch as pl
import lightning.pytorch.strategies as pytorch
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import STRATEGY_REGISTRY as FABRIC_REGISTRY
from lightning.pytorch.plugins import FSDPPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from unishard.config.topology import Topology
from unishard.contract import registry
from unishard.contract.entries import Unreadable
from unishard.formats import translating
from unishard.formats.lightning import deepspeed_arguments, torch_arguments
from unishard.formats.lightning.keys import TRAINER
from unishard.formats.lightning.shape import NAMES, built, strategy_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

Namespace = dict[str, Any]


def run(document: dict[str, Any], ranks: Topology | None = None) -> Namespace:
    """What the snippet of a config defines."""
    outcome = translating.translate(document, "lightning", topology=ranks)
    namespace: Namespace = {}
    exec(compile(outcome.text, "snippet", "exec"), namespace)
    return namespace


def parameters(of: Any) -> dict[str, Any]:
    return {
        name: parameter.default
        for name, parameter in inspect.signature(of).parameters.items()
        if name != "self" and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }


@pytest.mark.parametrize(
    ("sharding", "word"),
    [
        ({"strategy": "full_shard"}, "FULL_SHARD"),
        ({"strategy": "full_shard", "reshard_after_forward": False}, "SHARD_GRAD_OP"),
        ({"strategy": "hybrid_shard", "group_size": 4}, "HYBRID_SHARD"),
        ({"strategy": "hybrid_shard", "group_size": 4, "reshard_after_forward": False}, "_HYBRID_SHARD_ZERO2"),
    ],
)
def test_fsdp_strategy_holds_what_the_config_says(sharding: dict[str, Any], word: str) -> None:
    sharding = {**sharding, "units": ["TransformerEncoderLayer"]}
    document = {
        "sharding": sharding,
        "offload": "cpu",
        "precision": "bf16",
        "activation_checkpointing": ["TransformerEncoderLayer"],
    }
    strategy = run(document, Topology(world_size=8, local_world_size=8))["strategy"]
    assert isinstance(strategy, pytorch.FSDPStrategy)
    assert strategy.sharding_strategy.name == word
    assert strategy.cpu_offload.offload_params is True
    formats = strategy.mixed_precision_config
    assert (formats.param_dtype, formats.reduce_dtype, formats.buffer_dtype) == (torch.bfloat16, torch.float32, None)
    assert strategy.kwargs.get("device_mesh") == ((2, 4) if "HYBRID" in word else None)
    layer = torch.nn.TransformerEncoderLayer(4, 1)
    for policy in (strategy.kwargs["auto_wrap_policy"], strategy._activation_checkpointing_kwargs["auto_wrap_policy"]):
        assert policy(module=layer, recurse=False, nonwrapped_numel=1)
        assert not policy(module=layer.linear1, recurse=False, nonwrapped_numel=1)


def test_a_size_based_policy_is_torchs_own() -> None:
    policy = run({"sharding": {"strategy": "full_shard", "min_unit_params": 10}})["strategy"].kwargs["auto_wrap_policy"]
    assert policy(module=torch.nn.Linear(4, 4), recurse=False, nonwrapped_numel=20)
    assert not policy(module=torch.nn.Linear(4, 4), recurse=False, nonwrapped_numel=5)


def test_deepspeed_strategy_holds_a_config_that_deepspeed_takes() -> None:
    document = {
        "backend": "deepspeed",
        "sharding": "full_shard",
        "offload": "cpu",
        "precision": "bf16",
        "training": {"micro_batch_size": 3},
    }
    outcome = translating.translate(document, "lightning")
    strategy = run(document)["strategy"]
    assert isinstance(strategy, pytorch.DeepSpeedStrategy)
    assert strategy.config == outcome.document["trainer"]["strategy"]["init_args"]["config"]
    assert "gradient_accumulation_steps" not in strategy.config
    taken = deepspeed.DeepSpeedConfig(dict(strategy.config))
    assert (taken.zero_config.stage, taken.zero_config.offload_param.device, taken.train_micro_batch_size_per_gpu) == (
        3,
        "cpu",
        3,
    )
    assert taken.bfloat16_config.enabled


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
def test_the_trainer_takes_the_arguments(backend: str) -> None:
    document = {
        "backend": backend,
        "sharding": "no_shard",
        "precision": "bf16" if backend == "fsdp" else "fp32",
        "training": {"gradient_accumulation_steps": 3, "gradient_clipping": 0.5, "seed": 11},
    }
    trainer = run(document)["trainer"]()
    assert (trainer.accumulate_grad_batches, trainer.gradient_clip_val) == (3, 0.5)
    assert trainer.precision == ("bf16-mixed" if backend == "fsdp" else "32-true")
    assert type(trainer.strategy).__name__ == {"fsdp": "DDPStrategy", "deepspeed": "DeepSpeedStrategy"}[backend]


def test_the_recipe_trains_with_the_optimizer_of_the_config(tmp_path: Any) -> None:
    made = run(
        {"sharding": "no_shard", "optimizer": {"name": "sgd", "lr": 0.5, "momentum": 0.9}, "training": {"seed": 1}}
    )

    class Model(made["Recipe"], pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.layer(batch).square().mean()

    model = Model()
    optimizer = model.configure_optimizers()
    assert (type(optimizer), optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (
        torch.optim.SGD,
        0.5,
        0.9,
    )
    assert optimizer.param_groups[0]["params"] == list(model.parameters())


def test_a_scaler_is_set_after_the_plugin_that_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="does not use a scaler"):
        FSDPPrecision("16-mixed", scaler=ShardedGradScaler())
    given: dict[str, Any] = {}

    def scaler(**arguments: Any) -> str:
        inspect.signature(ShardedGradScaler).bind(**arguments)
        given.update(arguments)
        return "the scaler"

    monkeypatch.setattr("torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler", scaler)
    made = run(
        {
            "sharding": "full_shard",
            "precision": {"compute": "fp16", "initial_loss_scale": 1024.0, "loss_scale_growth_interval": 50},
        }
    )
    assert (made["precision"].scaler, given) == ("the scaler", {"init_scale": 1024.0, "growth_interval": 50})
    assert made["strategy"].mixed_precision_config.param_dtype is torch.float16


def test_lightning_refuses_to_clip_with_fsdp_and_the_recipe_asks_fsdp_itself() -> None:
    with pytest.raises(MisconfigurationException, match="not supported"):
        FSDPPrecision("32-true").clip_grad_by_norm()
    made = run({"sharding": "full_shard", "training": {"gradient_clipping": 0.25}})
    asked: list[float] = []

    class Root:
        def clip_grad_norm_(self, largest: float) -> None:
            asked.append(largest)

    module = made["Recipe"]()
    module.trainer = type("Trainer", (), {"model": Root()})()
    module.configure_gradient_clipping(None, gradient_clip_val=0.25, gradient_clip_algorithm="norm")
    assert asked == [0.25]


# What the tables claim of Lightning.


def test_every_argument_of_the_trainer_has_a_row() -> None:
    assert set(parameters(pl.Trainer.__init__)) - {"strategy"} <= set(TRAINER)
    assert set(parameters(Fabric.__init__)) - {"strategy"} <= set(TRAINER)


@pytest.mark.parametrize("strategy", [pytorch.DeepSpeedStrategy, fabric.DeepSpeedStrategy])
def test_the_arguments_and_defaults_of_deepspeed_strategy_are_those_of_the_table(strategy: Any) -> None:
    given = parameters(strategy.__init__)
    known = {**deepspeed_arguments.ARGUMENTS, **deepspeed_arguments.SCALING}
    assert set(given) == {*known, *deepspeed_arguments.OWN, "config"} & set(given)
    batch = "logging_batch_size_per_gpu"
    assert {name: given[name] for name in known if name != batch} == {
        name: value for name, value in known.items() if name != batch
    }


@pytest.mark.parametrize(
    ("strategies", "rows"),
    [
        ((pytorch.FSDPStrategy, fabric.FSDPStrategy), {*torch_arguments.ARGUMENTS, *torch_arguments.OWN}),
        ((pytorch.DDPStrategy, fabric.DDPStrategy), {*torch_arguments.DDP}),
        ((pytorch.ModelParallelStrategy, fabric.ModelParallelStrategy), {*torch_arguments.MODEL_PARALLEL}),
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
        *torch_arguments.ARGUMENTS,
        *torch_arguments.OWN,
    }
    assert set(parameters(DistributedDataParallel.__init__)) - ours <= {*torch_arguments.DDP}


def test_every_registered_name_is_known_or_refused_with_what_instead() -> None:
    for name in {*pytorch.StrategyRegistry, *FABRIC_REGISTRY}:
        if name in NAMES:
            continue
        with pytest.raises(Unreadable, match="must be a strategy that is supported"):
            strategy_of(built(name), name, fabric=False)


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
