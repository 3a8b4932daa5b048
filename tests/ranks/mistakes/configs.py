"""Configs that are wrong, however they are made."""

from __future__ import annotations

import torch
from harness import config
from ruamel.yaml import YAML
from torch import nn

import unishard
from mistakes.mistake import mistake
from unishard.config import Training
from unishard.testing.models import Mlp


@mistake("`sharding: full_shart`", "sharding: full_shart")
@mistake(
    "a config of DeepSpeed, Accelerate or `TrainingArguments`", "{train_batch_size: 8, zero_optimization: {stage: 2}}"
)
@mistake("`model:` or `epochs:` in the config", "model: gpt2")
@mistake("`trainig: {...}`", "trainig: {}")
@mistake('a number in quotes, `micro_batch_size: "4"`', 'training: {micro_batch_size: "4"}')
@mistake("another tool's name, `training: {max_grad_norm: 1.0}`", "training: {max_grad_norm: 1.0}")
@mistake("`sharding: 2`, which is one strategy in Accelerate and another one in DeepSpeed", "sharding: 2")
@mistake("`training.seed: 3` as a key of the file", "training.seed: 3")
@mistake(
    "`no_decay: ['layers[']`, or another pattern that is not a regular expression", "optimizer: {no_decay: ['layers[']}"
)
@mistake("`no_decay: ['x{99999999999}']`", "optimizer: {no_decay: ['x{99999999999}']}")
@mistake("a seed of 5000 digits", "training: {seed: 0x" + "f" * 4200 + "}")
def loaded(backend, text):
    given = YAML(typ="safe", pure=True).load(text)
    unishard.load(given if "zero_optimization" in given else {"backend": backend, **given})


@mistake("`backend: ddp`", "ddp")
@mistake("`backend: zero3`", "zero3")
@mistake("`backend: accelerate`", "accelerate")
def backend_of_another_name(backend, name):
    unishard.prepare(Mlp(), unishard.load({"backend": name}))


@mistake('`Config("config.yaml")`')
def config_of_a_path(backend):
    unishard.Config("config.yaml")


@mistake("`Config(sharding=...)` with a wrong value")
def config_of_wrong_values(backend):
    unishard.Config(backend=backend, sharding="zero9")


@mistake("`cfg.training.seed = 3`")
def config_that_is_changed(backend):
    unishard.Config(backend=backend).training.seed = 3


@mistake('`cfg.model_copy(update={"training.seed": 3})`')
def copy_with_a_dotted_name(backend):
    unishard.Config(backend=backend).model_copy(update={"training.seed": 3})


@mistake('`cfg.model_copy(update={"training": {"seed": 3}})`, which pydantic does not check')
def copy_with_a_mapping(backend):
    return unishard.Config(backend=backend).model_copy(update={"training": {"seed": 3}}).training.seed, Training(
        seed=3
    ).seed


@mistake(
    "`precision: bf16` for a model with fp32 buffers that torch does not take together with bf16, such as those of BatchNorm"
)
def buffers_in_fp32(backend):
    with unishard.prepare(
        nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6)), config(backend, precision="bf16")
    ) as engine:
        engine(torch.ones(4, 5))


@mistake("`training.buffers: {min_vla: min}`, which no buffer has in its name", "min_vla", "min")
@mistake("`training.buffers` that asks for the mean of counts", "num_batches_tracked", "mean")
def merges_that_do_not_fit_the_model(backend, pattern, how):
    unishard.prepare(nn.BatchNorm1d(6), config(backend, training={"buffers": {pattern: how}}))


@mistake("`precision.keep_fp32: [nrom]`, which no parameter has in its name", "keep_fp32: [nrom]")
@mistake("`precision.keep_fp32: ['.']`, which keeps all of the model", "keep_fp32: ['.']")
@mistake("`precision.keep_fp32` beside `reduce: bf16`", "{keep_fp32: [norm], reduce: bf16}")
@mistake("`precision.cast_inputs: [xs]`, an argument that no forward has", "cast_inputs: [xs]")
def precision_that_does_not_fit_the_model(backend, text):
    precision = {"compute": "bf16", **YAML(typ="safe", pure=True).load(text)}
    unishard.prepare(Mlp(), unishard.Config(backend=backend, precision=precision, optimizer={"lr": 0.1}))
