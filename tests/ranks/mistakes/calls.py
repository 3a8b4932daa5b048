"""Names and arguments that people know from other tools, and inputs that torch does not take."""

from __future__ import annotations

import torch
from playing import checked as config
from playing import own_share, prepare
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

import unishard
from mistakes.data import samples
from mistakes.habits import HABITS
from unishard.testing.models import mlp


@HABITS.raises(
    "`engine.zero_grad()`",
    "AttributeError: 'Engine' object has no attribute 'zero_grad'; remove the call: engine.step() zeroes gradients "
    "after each update, and engine.discard() drops a window",
    "zero_grad",
)
@HABITS.raises(
    "`engine.clip_grad_norm_(...)`, and other names of Accelerate, Fabric, DeepSpeed and the Trainer",
    "AttributeError: 'Engine' object has no attribute 'clip_grad_norm_'; set training.gradient_clipping in the "
    "config, or call engine.step(clip_grad_norm=1.0); the norm is engine.step().grad_norm",
    "clip_grad_norm_",
)
@HABITS.raises(
    "`AdamW(engine.parameters())`",
    "AttributeError: 'Engine' object has no attribute 'parameters'; ...an optimizer is made from model.parameters() "
    "before unishard.prepare(model, cfg, optimizer)",
    "parameters",
)
@HABITS.raises(
    "`engine.head`, a part of the model",
    "AttributeError: 'Engine' object has no attribute 'head'; it is one of the model: engine.module.head",
    "head",
)
def name_of_another_tool(backend, name):
    with prepare(config(backend)) as engine:
        assert not hasattr(engine, name)
        getattr(engine, name)


CALLS = {
    "retain_graph": lambda engine, loss: engine.backward(loss, retain_graph=True),
    "step": lambda engine, loss: (engine.backward(loss), engine.step(torch.tensor(0.5))),
    "mean": lambda engine, loss: engine.mean(torch.stack([loss, loss])),
    "list": lambda engine, loss: engine.mean([0.5, 1.5]),
    "dict": lambda engine, loss: list(engine.batches({"x": torch.ones(4, 13)})),
    "average": lambda engine, loss: AveragedModel(engine),
    "file": lambda engine, loss: engine.load("model.pt"),
    "state": lambda engine, loss: engine.load(mlp().state_dict()),
}


@HABITS.raises(
    "`engine.backward(loss, retain_graph=True)`",
    "ContractError: backward does not accept retain_graph; add the losses of a micro-batch and call it once: "
    "engine.backward(loss_1 + loss_2)",
    "retain_graph",
)
@HABITS.raises(
    "`engine.step(loss)`",
    "ContractError: clip_grad_norm must be a positive number, got tensor(...); engine.step takes no loss: call "
    "engine.backward(loss), then engine.step()",
    "step",
)
@HABITS.raises(
    "`engine.mean` of a loss per sample",
    "ContractError: mean: value must be one number, got a tensor of shape (2,); pass its mean, value.mean()",
    "mean",
)
@HABITS.raises(
    "`engine.mean` of a list",
    "ContractError: mean: value must be a number or a tensor with one, got [0.5, 1.5]",
    "list",
)
@HABITS.raises(
    "`engine.batches` of a dict of tensors",
    "DataError: batches needs a loader of batches, got dict, whose keys would be the batches; pass a loader: "
    "unishard.dataloader(dataset, cfg)",
    "dict",
)
@HABITS.raises(
    "`AveragedModel(engine)`, or another copy of an engine",
    "ContractError: an engine cannot be copied or pickled; average its weights with engine.ema(decay)...",
    "average",
)
@HABITS.raises(
    '`engine.load("model.pt")`',
    "CheckpointError: .../model.pt: no such folder; weights are loaded before unishard.prepare, as in "
    "model.load_state_dict(torch.load(path)) or unishard.from_pretrained(cls, folder, cfg), and engine.load reads "
    "what engine.save has written",
    "file",
)
@HABITS.raises(
    "`engine.load(state_dict)`",
    "ContractError: load needs the folder of a checkpoint, got OrderedDict; load the weights of a state dict before "
    "unishard.prepare, with model.load_state_dict(...)",
    "state",
)
def call_of_another_tool(backend, call):
    with prepare(config(backend)) as engine:
        CALLS[call](engine, engine(**own_share(1)[0]).loss if call not in ("file", "state") else None)


ARGUMENTS = {
    "engine": lambda cfg: unishard.prepare(prepare(cfg), cfg),
    "order": lambda cfg: unishard.prepare(cfg, mlp()),
    "class": lambda cfg: unishard.prepare(nn.Linear, cfg),
    "list": lambda cfg: unishard.prepare([mlp(), mlp()], cfg),
    "wrapped": lambda cfg: unishard.prepare(nn.DataParallel(mlp()), cfg),
    "optimizer": lambda cfg: unishard.prepare(mlp(), torch.optim.AdamW(mlp().parameters()), cfg),
    "dict": lambda cfg: unishard.prepare(mlp(), {"backend": cfg.backend}),
    "loader": lambda cfg: unishard.dataloader(DataLoader(samples(4)), cfg),
    "columns": lambda cfg: unishard.dataloader({"x": torch.ones(4, 13)}, cfg),
    "swapped": lambda cfg: unishard.dataloader(cfg, samples(4)),
}


@HABITS.raises(
    "`unishard.prepare(engine, cfg)`",
    "ModelError: prepare needs a torch.nn.Module, got Engine; it is a prepared model: train with it, or build a new "
    "model to prepare",
    "engine",
)
@HABITS.raises(
    "`unishard.prepare(cfg, model)`",
    "ConfigError: expected a unishard.Config, got Mlp; pass the model before the config: unishard.prepare(model, cfg)",
    "order",
)
@HABITS.raises(
    "`unishard.prepare(Model, cfg)`, the class",
    "ModelError: prepare needs a torch.nn.Module, got type; it is a class: pass a model, as the class makes it when it "
    "is called",
    "class",
)
@HABITS.raises(
    "`unishard.prepare([generator, critic], cfg)`",
    "ModelError: prepare needs a torch.nn.Module, got list; call prepare for each model, or pass one module that "
    "holds them all and whose forward uses them",
    "list",
)
@HABITS.raises(
    "`unishard.prepare(nn.DataParallel(model), cfg)`",
    "ModelError: prepare needs a torch.nn.Module, got DataParallel; pass the model that it wraps, without the wrapper: "
    "its `module`",
    "wrapped",
)
@HABITS.raises(
    "`unishard.prepare(model, optimizer, cfg)`",
    "ConfigError: expected a unishard.Config, got AdamW; pass the optimizer after the config: unishard.prepare(model, "
    "cfg, optimizer)",
    "optimizer",
)
@HABITS.raises(
    "`unishard.prepare(model, {...})`",
    "ConfigError: expected a unishard.Config, got dict; load it: unishard.load({...})",
    "dict",
)
@HABITS.raises(
    "`unishard.dataloader(DataLoader(...), cfg)`",
    "DataError: dataloader needs a dataset of samples, got DataLoader; pass the dataset, "
    "unishard.dataloader(loader.dataset, cfg), or the loader to engine.batches(loader)",
    "loader",
)
@HABITS.raises(
    "`unishard.dataloader` of a dict of tensors",
    "DataError: dataloader needs a dataset of samples, got dict; its keys are no samples: pass "
    "torch.utils.data.TensorDataset(*tensors), datasets.Dataset.from_dict(data), or a list of samples",
    "columns",
)
@HABITS.raises(
    "`unishard.dataloader(cfg, dataset)`",
    "DataError: dataloader needs a dataset of samples, got Config; pass the dataset before the config: "
    "unishard.dataloader(dataset, cfg)",
    "swapped",
)
def arguments_in_another_order(backend, given):
    ARGUMENTS[given](config(backend))


class Tokens(nn.Module):
    """A tiny language model."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(8, 4), nn.Linear(4, 3)

    def forward(self, ids):
        return self.head(self.table(ids))


class Doubles(nn.Linear):
    """A linear layer."""

    def __init__(self):
        super().__init__(2, 2)


@HABITS.raises(
    "a token id that the vocabulary does not have",
    "ModelError: the forward of table (Embedding, calls.py:... in forward) got the id 11, and has the ids from 0 to "
    "7; if they are tokens, the tokenizer is larger than the vocabulary: call "
    "model.resize_token_embeddings(len(tokenizer)) before unishard.prepare; if they are positions, the sequences are "
    "too long: truncate them",
    Tokens,
    ((3, 11),),
)
@HABITS.raises(
    "token ids padded with -100",
    "ModelError: the forward of table (Embedding, calls.py:... in forward) got the id -100, and has the ids from 0 to "
    "7; a negative number "
    "such as -100 marks labels to ignore: pad ids with one that exists, such as tokenizer.pad_token_id",
    Tokens,
    ((3, -100),),
)
@HABITS.raises(
    "inputs in float64, as numpy makes them, under `precision: fp32`",
    "ModelError: the forward of the model (Doubles, calls.py:... in an_input_of_torch) computes with tensors of "
    "different dtypes (mat1 and mat2 must have the same dtype, but got Double and Float); parameters are in the "
    "dtypes of `precision`, and numbers from numpy and Python in float64 or int64: cast such inputs to torch.float32 "
    "in the dataset, or before engine(...)",
    Doubles,
    ((0.5, 1.5),),
)
def an_input_of_torch(backend, build, rows):
    with unishard.prepare(build(), config(backend)) as engine:
        engine(torch.tensor(rows, dtype=torch.float64 if isinstance(rows[0][0], float) else torch.int64))
