"""DeepSpeed itself takes what is written, and understands by it what the config says."""

from __future__ import annotations

import logging
import warnings

import pytest

from unishard.config import Config
from unishard.config.nested import merge, nested
from unishard.contract import registry
from unishard.contract.entries import Unreadable
from unishard.formats import translate
from unishard_deepspeed.keys import TAKES
from unishard_deepspeed.start import quiet

with quiet(), warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from deepspeed.runtime.config import DeepSpeedConfig
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)

BASE = {
    "backend": "deepspeed",
    "training": {"micro_batch_size": 2, "gradient_accumulation_steps": 3, "gradient_clipping": 0.5},
}


def understood(document):
    """What DeepSpeed makes of a document that unishard wrote."""
    return DeepSpeedConfig(document)


def written(**sections):
    config = merge(BASE, sections)
    Config.model_validate(config)
    return understood(translate(config, "deepspeed", from_="unishard").document)


@pytest.mark.parametrize(
    ("strategy", "stage"), [("no_shard", 0), ("shard_optimizer", 1), ("shard_grad_op", 2), ("full_shard", 3)]
)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_strategies_and_formats(strategy, stage, precision):
    found = written(sharding=strategy, precision=precision)
    assert found.zero_config.stage == stage
    assert (found.bfloat16_config.enabled, found.float16_config.enabled) == (precision == "bf16", precision == "fp16")
    assert str(found.communication_data_type) == "torch.float32"
    assert (found.train_micro_batch_size_per_gpu, found.gradient_accumulation_steps, found.train_batch_size) == (
        2,
        3,
        6,
    )
    assert found.gradient_clipping == 0.5


@pytest.mark.parametrize(
    "sections",
    [
        {"sharding": "hybrid_shard"},
        {
            "sharding": {
                "strategy": "full_shard",
                "units": ["Block"],
                "conditional_modules": ["Expert"],
                "reshard_after_forward": False,
            }
        },
        {"offload": "cpu"},
        {"offload": {"params": "nvme", "optimizer": "cpu", "nvme_path": "/local", "pin_memory": False}},
        {"precision": {"compute": "fp16", "loss_scale": 512.0}},
        {"precision": {"compute": "bf16", "master": "bf16"}, "sharding": "zero2"},
        {"optimizer": {"name": "sgd", "momentum": 0.9, "nesterov": True}},
        {"optimizer": {"name": "adagrad"}},
        {"optimizer": "lion"},
        {"scheduler": {"warmup_steps": 5}},
        {"scheduler": {"name": "inverse_sqrt", "warmup_steps": 5}},
        {"scheduler": {"name": "wsd", "warmup_steps": 5, "total_steps": 20, "decay_steps": 9}},
        {"scheduler": {"name": "linear", "warmup_steps": 5, "total_steps": 9}},
        {"scheduler": {"name": "cosine", "warmup_steps": 5, "total_steps": 9, "min_lr_ratio": 0.1}},
        {"scheduler": {"name": "cosine", "total_steps": 9, "min_lr_ratio": 0.1}, "sharding": "ddp"},
        {"training": {"gradient_clipping": None, "nonfinite": "ignore"}, "precision": "bf16"},
        {"native": {"deepspeed": {"zero_optimization": {"sub_group_size": 10**8}}}},
    ],
)
def test_every_section_is_taken(sections):
    found = written(**sections)
    clip = merge(BASE, sections)["training"]["gradient_clipping"]
    assert found.gradient_clipping == (clip or 0.0)


def test_every_key_of_deepspeed_has_a_row():
    with quiet():
        from deepspeed.module_inject.auto_ep_config import AutoEPConfig
        from deepspeed.runtime import constants
        from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, _REMOVED_ZERO_CONFIG_KEYS
        from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
        from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
        from deepspeed.runtime.zero.offload_config import (
            DeepSpeedZeroOffloadOptimizerConfig,
            DeepSpeedZeroOffloadParamConfig,
        )

    blocks = {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.leaf_module": DeepSpeedZeroLeafModuleConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
    }
    keys = {
        f"{block}.{name}"
        for block, model in blocks.items()
        for field, info in model.model_fields.items()
        for name in (field, info.alias or field)
    }
    keys |= {f"zero_optimization.{key}" for key in _REMOVED_ZERO_CONFIG_KEYS} | {*_REMOVED_TOP_LEVEL_CONFIG_KEYS}
    keys |= {f"expert_parallel.{name}" for name in vars(AutoEPConfig()) if not name.startswith("_")}
    top = (
        "TRAIN_BATCH_SIZE",
        "GRADIENT_CLIPPING",
        "COMMUNICATION_DATA_TYPE",
        "PRESCALE_GRADIENTS",
        "DATALOADER_DROP_LAST",
        "DUMP_STATE",
    )
    keys |= {getattr(constants, name) for name in top}
    assert not keys - registry.arguments("deepspeed").keys.keys()


ODD = (
    None,
    True,
    -1,
    2,
    1e9,
    "1e-5",
    "5",
    "no",
    "x",
    [],
    {},
    ["a"],
    [1],
    {"enabled": 3},
    {"job_name": None},
    {"x": 1},
    "fp16",
)
NEEDS_ANOTHER = ("zero_optimization.compute_grad_norm", "bf16.bf16_optimizer_states", "bfloat16.bf16_optimizer_states")
"""Keys that DeepSpeed takes beside another alone, which their own rows look at."""


@pytest.mark.parametrize("key", [key for key in TAKES if key not in NEEDS_ANOTHER and not key.endswith("device")])
def test_deepspeed_takes_every_value_that_is_repeated(key):
    for value in ODD:
        try:
            TAKES[key](value)
        except Unreadable:
            continue
        understood(merge({"train_batch_size": 1, "zero_optimization": {"stage": 3}}, nested({key: value})))
