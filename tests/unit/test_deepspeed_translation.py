"""The JSON of `deepspeed.initialize`: what the installed DeepSpeed takes, and that our tables have its keys."""

from __future__ import annotations

import os
import sys
from itertools import product
from typing import Any

import pytest

from unishard.config import Config
from unishard.config.nested import flat
from unishard.config.topology import Topology
from unishard.contract.report import Translation
from unishard_deepspeed import backend
from unishard_deepspeed.keys import ROWS, Use, used

STRATEGIES = ["no_shard", "shard_optimizer", "shard_grad_op", "full_shard"]


PRECISIONS = ["fp32", "bf16", {"compute": "bf16", "reduce": "bf16"}, "fp16"]


def translate(world: int = 2, **sections: Any) -> Translation:
    return backend.translate(Config.model_validate(sections), Topology(world_size=world, local_world_size=world))


@pytest.fixture(scope="module")
def deepspeed() -> Any:
    from unishard_deepspeed.start import quiet

    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with quiet():
        import deepspeed

        return deepspeed


def known(block: str) -> set[str]:
    """Keys of one block in our tables, without what DeepSpeed has removed and without what lies deeper."""
    written = (key for key, _ in flat(translate(precision="bf16", offload="cpu").native))
    keys = {*(ROWS.keys() - used(Use.REMOVED).keys()), *written}
    inside = {key[len(block) + 1 :] if block else key for key in keys if key.startswith(f"{block}." if block else "")}
    return {key.split(".")[0] for key in inside}


@pytest.mark.parametrize(
    ("block", "module", "model"),
    [
        ("zero_optimization", "runtime.zero.config", "DeepSpeedZeroConfig"),
        ("zero_optimization.offload_param", "runtime.zero.offload_config", "DeepSpeedZeroOffloadParamConfig"),
        ("zero_optimization.offload_optimizer", "runtime.zero.offload_config", "DeepSpeedZeroOffloadOptimizerConfig"),
        ("bf16", "runtime.precision_config", "DeepSpeedBF16Config"),
        ("fp16", "runtime.precision_config", "DeepSpeedFP16Config"),
    ],
)
def test_the_keys_of_a_block_are_those_that_deepspeed_validates(
    deepspeed: Any, block: str, module: str, model: str
) -> None:
    fields = getattr(sys.modules[f"deepspeed.{module}"], model).model_fields
    assert known(block) == {field.alias or name for name, field in fields.items()}


def test_the_removed_keys_are_deepspeeds(deepspeed: Any) -> None:
    config = sys.modules["deepspeed.runtime.config"]
    theirs = {
        *config._REMOVED_TOP_LEVEL_CONFIG_KEYS,
        *(f"zero_optimization.{key}" for key in config._REMOVED_ZERO_CONFIG_KEYS),
    }
    assert used(Use.REMOVED).keys() == theirs


class Recorder(dict[str, Any]):
    """Remembers which keys are asked for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.read: set[str] = set()

    def __copy__(self) -> Recorder:
        return self

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        recorder = self

        class Keys:
            def __contains__(self, key: object) -> bool:
                return key in recorder

            def __iter__(self) -> Any:
                return iter(list(recorder))

        return Keys()


def test_every_top_level_key_that_deepspeed_reads_is_known(deepspeed: Any) -> None:
    native = Recorder(translate(world=1).native)
    deepspeed.DeepSpeedConfig(native)
    assert len(native.read) > 40
    assert native.read - known("") - used(Use.REMOVED).keys() == set()


@pytest.mark.parametrize(("strategy", "precision"), list(product(STRATEGIES, PRECISIONS)))
def test_deepspeed_takes_the_json(deepspeed: Any, strategy: str, precision: Any) -> None:
    translation = translate(world=1, sharding=strategy, precision=precision, training={"gradient_clipping": 0.5})
    config = deepspeed.DeepSpeedConfig(translation.native)
    named = STRATEGIES.index(strategy)
    assert config.zero_optimization_stage == (2 if named == 1 and config.bfloat16_config.enabled else named)
    assert config.gradient_clipping == 0.5
    assert config.bfloat16_config.enabled == (precision not in ("fp32", "fp16"))
    assert config.float16_config.enabled == (precision == "fp16")
    assert not config.managed_gradient_accumulation
