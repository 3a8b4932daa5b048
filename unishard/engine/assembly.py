"""Build the parts of an engine that need much of its plan."""

from __future__ import annotations

import torch

from unishard.contract.adapter import EngineAdapter, InferenceAdapter
from unishard.contract.plan import OptimizerPlan, RunPlan
from unishard.distributed.dtypes import DTYPES
from unishard.engine.loop.accumulation import Accumulation
from unishard.engine.loop.call_order import CallOrder
from unishard.engine.loop.equal_values import EqualValues
from unishard.engine.loop.evaluation import Evaluation
from unishard.engine.loop.guarded_module import GuardedModule
from unishard.engine.loop.inplace_writes import InplaceWrites
from unishard.engine.loop.module_order import named_with_class, watch_modules
from unishard.engine.loop.outside_batches import OutsideBatches
from unishard.engine.loop.trainable import Trainable
from unishard.engine.loop.written_parameters import WrittenParameters
from unishard.engine.model.compilation import eager_modules
from unishard.engine.optim.loss_scale import LossScale
from unishard.engine.optim.optimizer_calls import OptimizerCalls
from unishard.engine.optim.schedule import Schedule
from unishard.engine.optim.schedulers import TorchSchedule
from unishard.observe.observer import Observers


def order_of_calls(adapter: InferenceAdapter, plan: RunPlan) -> CallOrder:
    """The position in the loop, and what compares the ranks' calls. Collective."""
    order = CallOrder(
        adapter.module,
        adapter.device,
        window=plan.loop.gradient_accumulation_steps,
        precision=plan.model.precision,
        communication=plan.guard.communication,
    )
    if adapter.forward_is_collective and order.compares_ranks and plan.guard.shards:
        watch_modules(order, {**plan.model.casting, **named_with_class(adapter.gathered_modules())})
    return order


def training_windows(
    adapter: EngineAdapter,
    optimizer: OptimizerPlan,
    plan: RunPlan,
    order: CallOrder,
    observers: Observers,
    trainable: Trainable,
    outside: OutsideBatches,
    written: WrittenParameters | None,
) -> Accumulation:
    """What runs accumulation windows, with what it checks. Collective."""
    module, guard, own = adapter.module, plan.guard, optimizer.scheduler
    groups, eager = adapter.optimizer.param_groups, eager_modules(module)
    units = {name: unit for name, unit in plan.model.casting.items() if unit in eager}
    if written is not None:
        written.begin(order)
    return Accumulation(
        plan.loop,
        LossScale(plan.model.precision),
        adapter,
        order,
        Schedule(optimizer.schedule, groups) if own is None else TorchSchedule(own, groups),
        OptimizerCalls(
            adapter, optimizer.optimizer or adapter.torch_optimizer, plan.model.name, order.require_no_gradients
        ),
        trainable,
        plan.model.classes,
        outside,
        observers,
        written=written,
        held=EqualValues(module, order, adapter.device, full=guard.full_weights) if order.compares_ranks else None,
        inplace=None if guard.full_weights else InplaceWrites(units, order, gathers=guard.gathers),
    )


def guarded_module(adapter: InferenceAdapter, plan: RunPlan, order: CallOrder, evaluation: Evaluation) -> GuardedModule:
    """What refuses to read, replace or cast weights past the engine."""
    precision, trains = plan.model.precision, plan.optimizer is not None
    return GuardedModule(
        adapter.module,
        dtypes={DTYPES[precision.compute], *([DTYPES[precision.master]] if trains else [])},
        devices={adapter.device, *([torch.device("cpu")] if plan.model.offload.params != "none" else [])},
        full=plan.guard.full_weights,
        class_name=plan.model.name,
        trains=trains,
        require_no_gradients=order.require_no_gradients,
        generate=evaluation.of_module(),
    )
