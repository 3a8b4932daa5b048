"""Configs that are wrong, however they are made."""

from __future__ import annotations

import torch
from playing import config
from ruamel.yaml import YAML
from torch import nn

import unishard
from mistakes.mistake import Mistakes
from unishard.config import Training
from unishard.testing.models import Mlp

CONFIGS = Mistakes("Configs")


@CONFIGS.raises(
    "`sharding: full_shart`",
    "ConfigError: sharding.strategy: must be one of ...; did you mean 'full_shard'?",
    "sharding: full_shart",
)
@CONFIGS.raises(
    "a config of DeepSpeed, Accelerate or `TrainingArguments`",
    "ConfigError: is a config of DeepSpeed (zero_optimization, train_batch_size), not of unishard; translate it: "
    "unishard translate FILE --to unishard -o train.yaml",
    "{train_batch_size: 8, zero_optimization: {stage: 2}}",
)
@CONFIGS.raises(
    "`model:` or `epochs:` in the config",
    "ConfigError: model: unknown field, which is not in the config: pass the model to unishard.prepare(model, cfg)",
    "model: gpt2",
)
@CONFIGS.raises("`trainig: {...}`", "ConfigError: trainig: unknown field; did you mean 'training'?", "trainig: {}")
@CONFIGS.raises(
    'a number in quotes, `micro_batch_size: "4"`',
    "ConfigError: training.micro_batch_size: must be a whole number of at least 1, got '4' (text); write 4 without "
    "quotes",
    'training: {micro_batch_size: "4"}',
)
@CONFIGS.raises(
    "another tool's name, `training: {max_grad_norm: 1.0}`",
    "ConfigError: training.max_grad_norm: unknown field; did you mean 'gradient_clipping'?",
    "training: {max_grad_norm: 1.0}",
)
@CONFIGS.raises(
    "`sharding: 2`, which is one strategy in Accelerate and another one in DeepSpeed",
    "ConfigError: sharding.strategy: ...2...",
    "sharding: 2",
)
@CONFIGS.raises(
    "`training.seed: 3` as a key of the file",
    "ConfigError: training.seed: is a dotted name, which only an override has; write training: {seed: ...}",
    "training.seed: 3",
)
@CONFIGS.raises(
    "`no_decay: ['layers[']`, or another pattern that is not a regular expression",
    "ConfigError: optimizer.no_decay: contains 'layers[', which is not a regular expression (...); write a substring "
    "of a parameter's name",
    "optimizer: {no_decay: ['layers[']}",
)
@CONFIGS.raises(
    "`no_decay: ['x{99999999999}']`",
    "ConfigError: optimizer.no_decay: contains 'x{99999999999}', which is not a regular expression (the repetition "
    "number is too large)...",
    "optimizer: {no_decay: ['x{99999999999}']}",
)
@CONFIGS.raises(
    "a seed of 5000 digits",
    "ConfigError: training.seed: must be a whole number of at least 0 and below 4294967296, got 0xffff...",
    "training: {seed: 0x" + "f" * 4200 + "}",
)
def loaded(backend, text):
    given = YAML(typ="safe", pure=True).load(text)
    unishard.load(given if "zero_optimization" in given else {"backend": backend, **given})


@CONFIGS.raises(
    "`backend: ddp`",
    "BackendError: no backend named 'ddp'; write backend: fsdp and sharding: no_shard, which is "
    "DistributedDataParallel; installed: ...",
    "ddp",
)
@CONFIGS.raises(
    "`backend: zero3`",
    "BackendError: no backend named 'zero3'; write backend: deepspeed and sharding: full_shard; installed: ...",
    "zero3",
)
@CONFIGS.raises(
    "`backend: accelerate`",
    "BackendError: no backend named 'accelerate'; it drives an engine, FSDP or DeepSpeed: write backend: fsdp or "
    "deepspeed...",
    "accelerate",
)
def backend_of_another_name(backend, name):
    unishard.prepare(Mlp(), unishard.load({"backend": name}))


@CONFIGS.raises(
    '`Config("config.yaml")`',
    "ConfigError: Config takes fields by name, got 'config.yaml'; a file is loaded by unishard.load(path)",
)
def config_of_a_path(backend):
    unishard.Config("config.yaml")


@CONFIGS.raises("`Config(sharding=...)` with a wrong value", "ConfigError: sharding.strategy: must be one of ...")
def config_of_wrong_values(backend):
    unishard.Config(backend=backend, sharding="zero9")


@CONFIGS.raises(
    "`cfg.training.seed = 3`",
    "ConfigError: seed: cannot be set, because a config is frozen; write cfg = cfg.override('training.seed=3'), which "
    "returns another one",
)
def config_that_is_changed(backend):
    unishard.Config(backend=backend).training.seed = 3


@CONFIGS.raises(
    '`cfg.model_copy(update={"training.seed": 3})`',
    "ConfigError: training.seed: is a dotted name, which only an override has; write training: {seed: ...}",
)
def copy_with_a_dotted_name(backend):
    unishard.Config(backend=backend).model_copy(update={"training.seed": 3})


@CONFIGS.harmless(
    '`cfg.model_copy(update={"training": {"seed": 3}})`, which pydantic does not check',
    "The values are checked, and the copy is a config.",
)
def copy_with_a_mapping(backend):
    return unishard.Config(backend=backend).model_copy(update={"training": {"seed": 3}}).training.seed, Training(
        seed=3
    ).seed


@CONFIGS.raises(
    "`precision: bf16` for a model with fp32 buffers that torch does not take together with bf16, such as those of "
    "BatchNorm",
    "ModelError: the forward of 1 computes with tensors in fp32 and bf16 (...); precision.compute is bf16, but "
    "precision.buffers: keep leaves buffers in fp32: 1.running_mean, 1.running_var; set precision.buffers to bf16, "
    "keep the module in precision.keep_fp32, or cast them where the module uses them",
)
def buffers_in_fp32(backend):
    with unishard.prepare(
        nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6)), config(backend, precision="bf16")
    ) as engine:
        engine(torch.ones(4, 5))


@CONFIGS.raises(
    "`precision.keep_fp32: [nrom]`, which no parameter has in its name",
    "ConfigError: precision.keep_fp32: 'nrom' matches no floating-point parameter or buffer; write part of a name, "
    "such as ...",
    "keep_fp32: [nrom]",
)
@CONFIGS.raises(
    "`precision.keep_fp32: ['.']`, which keeps all of the model",
    "ConfigError: precision.keep_fp32: keeps every parameter; set precision.compute to fp32 instead",
    "keep_fp32: ['.']",
)
@CONFIGS.raises(
    "`precision.keep_fp32` beside `reduce: bf16`",
    "ConfigError: precision.keep_fp32: keeps ...norm.weight in fp32 (precision.reduce bf16 would round it); set "
    "precision.reduce to fp32, or keep_fp32 to [] to keep nothing",
    "{keep_fp32: [norm], reduce: bf16}",
)
@CONFIGS.raises(
    "`precision.cast_inputs: [xs]`, an argument that no forward has",
    "ConfigError: precision.cast_inputs: no forward of the model or of its units has an argument 'xs'; they have ...",
    "cast_inputs: [xs]",
)
def precision_that_does_not_fit_the_model(backend, text):
    precision = {"compute": "bf16", **YAML(typ="safe", pure=True).load(text)}
    unishard.prepare(Mlp(), unishard.Config(backend=backend, precision=precision, optimizer={"lr": 0.1}))
