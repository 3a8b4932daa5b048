"""Arguments that people pass by habit or in the wrong order, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from unishard.errors import ContractError

_WRAPPED = "pass the model that it wraps, without the wrapper: its `module`"
_SAMPLES = (
    "its keys are no samples: pass torch.utils.data.TensorDataset(*tensors), datasets.Dataset.from_dict(data), "
    "or a list of samples"
)

_VALUES: Mapping[str, Mapping[str, str]] = {
    "model": {
        "Engine": "it is a prepared model: train with it, or build a new model to prepare",
        "Config": "pass the model before the config: unishard.prepare(model, cfg)",
        "type": "it is a class: pass a model, as the class makes it when it is called",
        "list": "call prepare for each model, or pass one module that holds them all and whose forward uses them",
        "tuple": "call prepare for each model, or pass one module that holds them all and whose forward uses them",
        "dict": "pass a module; the weights of a state dict are loaded before, with model.load_state_dict(...)",
        "str": "load the model first, for example with unishard.from_pretrained(cls, path, cfg)",
        "generator": "pass the model itself, not its parameters",
        "function": "call the function, and pass the model that it returns",
        "DataParallel": _WRAPPED,
        "FullyShardedDataParallel": _WRAPPED,
        "DeepSpeedEngine": _WRAPPED,
        "_FabricModule": _WRAPPED,
        "object": "pass the model",
    },
    "cfg": {
        "Module": "pass the model before the config: unishard.prepare(model, cfg)",
        "Optimizer": "pass the optimizer after the config: unishard.prepare(model, cfg, optimizer)",
        "dict": "load it: unishard.load({...})",
        "TrainingArguments": "translate their file: unishard translate arguments.yaml --to unishard -o train.yaml",
        "DictConfig": "load it: unishard.load(OmegaConf.to_container(cfg, resolve=True))",
        "object": "load one with unishard.load(path)",
    },
    "dataset": {
        "Config": "pass the dataset before the config: unishard.dataloader(dataset, cfg)",
        "DataLoader": "pass the dataset, unishard.dataloader(loader.dataset, cfg), or the loader to "
        "engine.batches(loader)",
        "DatasetDict": "pass one of its splits, such as data['train']",
        "Mapping": _SAMPLES,
        "dict": _SAMPLES,
        "DataFrame": "pass a dataset of its rows: datasets.Dataset.from_pandas(frame)",
        "str": "load the data first",
    },
    "loader": {
        "Mapping": "whose keys would be the batches; pass a loader: unishard.dataloader(dataset, cfg)",
        "dict": "whose keys would be the batches; pass a loader: unishard.dataloader(dataset, cfg)",
        "str": "whose letters would be the batches; pass a loader: unishard.dataloader(dataset, cfg)",
    },
    "clip_grad_norm": {
        "Tensor": "engine.step takes no loss: call engine.backward(loss), then engine.step()",
        "function": "engine.step takes no closure: call engine.backward(loss), then engine.step()",
        "object": "pass None for no clipping",
    },
    "source": {
        "dict": "load the weights of a state dict before unishard.prepare, with model.load_state_dict(...)",
        "object": 'pass its path, or "latest"',
    },
}
"""By argument and class of the value, or of a class that it inherits from; `object` for all others."""

_KEYWORDS: Mapping[str, Mapping[str, str]] = {
    "backward": {
        "retain_graph": "add the losses of a micro-batch and call it once: engine.backward(loss_1 + loss_2)",
        "create_graph": "a gradient penalty is part of the loss: torch.autograd.grad(..., create_graph=True) before "
        "engine.backward(loss)",
        "gradient": "pass a scalar loss",
        "inputs": "freeze the other parameters: engine.set_trainable(names, False)",
        "scale_wrt_gas": "remove it: the engine divides the loss by the length of the window",
        "model": "remove it: the engine has one model",
    }
}


def instead(argument: str, value: object) -> str:
    """What to write in place of a value; empty where nothing is known.

    Args:
        argument: Name of the argument.
        value: What was passed. Classes are compared by name, so that nothing is imported for it.
    """
    hints = _VALUES[argument]
    return next((hints[kind.__name__] for kind in type(value).__mro__ if kind.__name__ in hints), "")


def refuse_keywords(call: str, given: Iterable[str]) -> None:
    """Refuse keyword arguments that a call of the engine does not have.

    Args:
        call: Name of the method.
        given: Names of the arguments.

    Raises:
        ContractError: One is an argument of the same call elsewhere; says what to write instead.
        TypeError: One is unknown.
    """
    for name in given:
        if name not in _KEYWORDS[call]:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")
        raise ContractError(f"{call} does not accept {name}; {_KEYWORDS[call][name]}")
