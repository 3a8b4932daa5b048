"""What must be equal of a model on all ranks, and checks that it can be sharded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from unishard.contract.units import numel_of
from unishard.distributed.storable import obstacle
from unishard.errors import ModelError


def description_of(model: Any) -> dict[str, str]:
    """Describe what must be equal on all ranks: the class; shape, dtype and whether frozen of each tensor.

    Raises nothing.
    """
    described = {"class of the model": type(model).__name__}
    if isinstance(model, nn.Module):
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            shape = (
                "uninitialized"
                if isinstance(tensor, UninitializedParameter | UninitializedBuffer)
                else f"{tuple(tensor.shape)} {tensor.dtype}"
            )
            frozen = " frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
            described[name] = shape + frozen
    return described


def check_model(model: nn.Module, *, train: bool = True, forward_writes: bool = True) -> None:
    """Check that a model can be sharded.

    Args:
        model: Not sharded yet.
        train: Whether parameters with `requires_grad` are trained; False for inference.
        forward_writes: Whether what the forward writes into a parameter stays there, the same on all ranks.

    Raises:
        ModelError: It cannot be sharded as configured: it has nothing to train, is already sharded, or has parameters
            without data, with a dtype that no engine trains, in a layout that cannot be saved, or with hooks that
            sharding would lose; or its forward writes parameters.
    """
    problem = next(_problems(model, train=train, forward_writes=forward_writes), None)
    if problem:
        raise ModelError(problem)


def _problems(model: nn.Module, *, train: bool, forward_writes: bool) -> Iterator[str]:
    scripted = next(
        (name for name, part in model.named_modules() if isinstance(part, torch.jit.ScriptModule) and numel_of(part)),
        None,
    )
    if scripted is not None:
        yield (
            f"{scripted or 'the model'} of {type(model).__name__} is a ScriptModule, whose parameters cannot be "
            "replaced by shards; pass the module that torch.jit.script or torch.jit.trace was called on, and set "
            "compile in the config"
        )
    kind, named = type(model).__name__, dict(model.named_parameters())
    if not named:
        yield f"{kind} has no parameters; there is nothing to {'train' if train else 'shard, so call it as it is'}"
    if hasattr(model, "require_backward_grad_sync"):  # DistributedDataParallel, or a similar wrapper
        yield f"{kind} is already wrapped; pass model.module instead"
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod"):
            path, subject = (f"{name}.", f"module {name} of {kind}") if name else ("model.", "the model")
            yield (
                f"{subject} is already compiled; pass the original module, {path}_orig_mod, and set compile to "
                "per_block or full"
            )
        if hasattr(module, "_checkpoint_wrapped_module"):
            yield (
                f"module {name} of {kind} is in torch's checkpoint_wrapper; use the original module and set "
                "activation_checkpointing"
            )
        if (
            train
            and not forward_writes
            and isinstance(module, nn.Embedding | nn.EmbeddingBag)
            and module.max_norm is not None
        ):
            weight = f"{name}.weight" if name else "weight"
            yield (
                f"{name or 'the model'} ({type(module).__name__}) of {kind} has max_norm, with which each rank's "
                "forward writes the rows of its own batch into the weight, where sharding loses them and replicas "
                "would differ; leave max_norm out, and limit the norms of the rows after engine.step() in `with "
                f"engine.weights.gathered([{weight!r}]) as weights:`"
            )
        if (
            train
            and isinstance(module, nn.Embedding | nn.EmbeddingBag)
            and module.sparse
            and module.weight.requires_grad
        ):
            yield (
                f"{name or 'the model'} ({type(module).__name__}) of {kind} has sparse=True, and engines reduce and "
                "shard only dense gradients; build it with sparse=False, and train it with an optimizer for dense "
                "gradients, such as AdamW"
            )
    for name, parameter in named.items():
        yield from (f"parameter {name} of {kind} {problem}" for problem in _parameter_problems(parameter))
    for name, tensor in (*named.items(), *model.named_buffers()):
        if not isinstance(tensor, UninitializedBuffer) and (problem := obstacle(tensor)) is not None:
            yield (
                f"{name} of {kind} {problem}, which can be neither sent to other ranks nor saved; make it a dense "
                "tensor of another dtype, or keep it as a plain attribute of its module"
            )
    trainable = {name: parameter for name, parameter in named.items() if parameter.requires_grad and train}
    if train and not trainable:
        yield (
            f"all {len(named)} parameters of {kind} are frozen; unfreeze the ones to train, or prepare it with "
            "train=False"
        )
    odd = [
        name
        for name, parameter in trainable.items()
        if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16)
    ]
    if odd:
        yield (
            f"trainable parameters must be fp32, bf16 or fp16, but {odd[0]} and {len(odd) - 1} others of {kind} "
            f"are {named[odd[0]].dtype}; call model.float() and set the training dtypes in the section precision"
        )


def _parameter_problems(parameter: nn.Parameter) -> Iterator[str]:
    if isinstance(parameter, UninitializedParameter):
        yield "has no shape yet (lazy module); run the model once on a batch, then prepare it"
    elif isinstance(parameter, DTensor) or hasattr(parameter, "ds_id"):
        yield "is already sharded; build a new model and prepare it once"
    # torch 2.13 keeps both kinds of hooks in private attributes of the tensor, which sharding replaces.
    elif any(getattr(parameter, hooks, None) for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks")):
        yield (
            "has a gradient hook, which sharding would lose; remove it and edit gradients with engine.gradients.write "
            "instead"
        )
