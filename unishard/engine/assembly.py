"""Build the parts of an engine that need much of its plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unishard.contract.adapter import ShardedModel, Updates
from unishard.contract.plan import OptimizerPlan, RunPlan
from unishard.distributed.dtypes import DTYPES
from unishard.engine.around_forward import AroundForward
from unishard.engine.entered_modules import named_with_class, watch_modules
from unishard.engine.guards.added_modules import AddedModules
from unishard.engine.guards.copied_containers import CopiedContainers
from unishard.engine.guards.cut_blocks import CutBlocks
from unishard.engine.guards.divided_loss import DividedLoss
from unishard.engine.guards.edited_gradients import EditedGradients, Shown
from unishard.engine.guards.ended_schedule import EndedSchedule
from unishard.engine.guards.equal_options import EqualOptions
from unishard.engine.guards.equal_weights import EqualWeights, computes_alike
from unishard.engine.guards.foreign_backward import ForeignBackward
from unishard.engine.guards.freed_views import FreedViews
from unishard.engine.guards.guard import Guard, Guards, WatchedModule
from unishard.engine.guards.guarded_module import GuardedModule
from unishard.engine.guards.inference_mode import InferenceInForward
from unishard.engine.guards.inplace_writes import InplaceWrites
from unishard.engine.guards.late_unfreezing import LateUnfreezing
from unishard.engine.guards.mixed_positions import MixedPositions
from unishard.engine.guards.module_hooks import ModuleHooks
from unishard.engine.guards.other_parameters import OtherParameters
from unishard.engine.guards.parameter_writes import GatheredWrites, ParameterWrites
from unishard.engine.guards.reached_parameters import ReachedParameters
from unishard.engine.guards.recomputed_attention import RecomputedAttention
from unishard.engine.guards.skipped_updates import SkippedUpdates
from unishard.engine.guards.unfit_loss import UnfitLoss
from unishard.engine.guards.unshared_data import UnsharedData
from unishard.engine.guards.unweighed_loss import UnweighedLoss
from unishard.engine.loop.accumulation import Accumulation
from unishard.engine.loop.call_order import CallOrder
from unishard.engine.loop.evaluation import Evaluation
from unishard.engine.loop.rank_calls import RankCalls
from unishard.engine.loop.trainable import Trainable
from unishard.engine.model.compilation import eager_modules
from unishard.engine.optim.loss_scale import LossScale
from unishard.engine.optim.optimizer_calls import OptimizerCalls
from unishard.engine.optim.schedule import Schedule
from unishard.engine.optim.torch_schedule import TorchSchedule
from unishard.engine.place import LoopPlace
from unishard.observe.observer import Observers
from unishard.sequence.split_sequences import SplitSequences


def order_of_calls(adapter: ShardedModel, plan: RunPlan) -> CallOrder:
    """The position in the loop, and what compares the ranks' calls. Collective."""
    place = LoopPlace(adapter.module, plan.loop)
    ranks = RankCalls(adapter.module, adapter.device, place, plan.guard.communication)
    order = CallOrder(adapter.module, place, ranks, plan.model.precision)
    if adapter.forward_is_collective and order.ranks.compared and plan.guard.shards:
        watch_modules(order, {**plan.model.casting, **named_with_class(adapter.gathered_modules())})
    return order


def training_windows(
    updates: Updates,
    optimizer: OptimizerPlan,
    plan: RunPlan,
    order: CallOrder,
    observers: Observers,
    guards: Sequence[Guard],
) -> Accumulation:
    """What runs accumulation windows."""
    own, groups = optimizer.scheduler, updates.optimizer.param_groups
    schedule = Schedule(optimizer.schedule, groups) if own is None else TorchSchedule(own, groups)
    hooks = [] if plan.guard.full_weights else [ModuleHooks(_watched_modules(updates.model, plan), guards)]
    return Accumulation(
        plan.loop,
        LossScale(plan.model.precision),
        updates,
        order,
        schedule,
        OptimizerCalls(
            updates,
            optimizer.optimizer or updates.torch_optimizer,
            plan.model.name,
            order.require_no_gradients,
            order.place.wrote,
            whole=plan.guard.full_weights,
        ),
        Guards(order.place, [*guards, *hooks, EndedSchedule(schedule, order.place)]),
        observers,
    )


def training_guards(
    updates: Updates,
    plan: RunPlan,
    order: CallOrder,
    trainable: Trainable,
    unshared_data: UnsharedData,
    shown: Shown,
    around: AroundForward,
) -> list[Guard]:
    """The guards of a training loop, in the order in which they look. Collective."""
    module, place, full = updates.model.module, order.place, plan.guard.full_weights
    packages = {"torch", "unishard", type(updates).__module__.partition(".")[0], *plan.backend.requires}
    writes = Guard() if full else ParameterWrites(module, place)
    guards: list[Guard] = [
        UnfitLoss(),
        LateUnfreezing(module, trainable.prepared),
        AddedModules(module, packages, place),
        *(_of_shards(writes, plan, order) if isinstance(writes, ParameterWrites) else ()),
        EditedGradients(module, shown, place),
        OtherParameters(updates),
        DividedLoss(plan.loop.gradient_accumulation_steps, plan.loop.backward_calls),
        ForeignBackward(updates, order.blocks),
        SkippedUpdates(),
        unshared_data,
        *([] if around.sequences is None else _of_sequences(updates.model, around.sequences, order, writes)),
        *([CutBlocks(around.sliced)] if around.sliced.exchanges else []),
    ]
    if order.ranks.compared:
        guards.append(ReachedParameters(updates, place, plan.model.classes))
        guards.append(EqualOptions(lambda: updates.optimizer.param_groups, place))
        if full and computes_alike(updates.model.device):
            guards.append(EqualWeights(module, place))
    return guards


def _of_shards(writes: ParameterWrites, plan: RunPlan, order: CallOrder) -> list[Guard]:
    """Those where the module's own tensors are not the weights."""
    return [
        InferenceInForward(),
        writes,
        CopiedContainers(order.blocks),
        InplaceWrites(gathers=plan.guard.gathers),
        GatheredWrites(writes),
        FreedViews(),
    ]


def _watched_modules(adapter: ShardedModel, plan: RunPlan) -> list[WatchedModule]:
    """Those that are not compiled."""
    units = {id(unit) for unit in plan.model.casting.values()}
    gathered = units | {id(unit.module) for unit in adapter.gathered_modules() if unit.module is not adapter.module}
    return [
        WatchedModule(
            part,
            name,
            f"{name} ({plan.model.classes[name]})" if name else plan.model.name,
            is_unit=id(part) in units,
            is_gathered=id(part) in gathered,
        )
        for name, part in eager_modules(adapter.module).items()
    ]


def _of_sequences(adapter: ShardedModel, sequences: SplitSequences, order: CallOrder, writes: Guard) -> list[Guard]:
    """Those where each rank has a part of a sequence."""
    mixed = MixedPositions(adapter, sequences, order.place, order.blocks, writes)
    return [mixed, UnweighedLoss(sequences), RecomputedAttention(sequences)]


def guarded_module(adapter: ShardedModel, plan: RunPlan, order: CallOrder, evaluation: Evaluation) -> GuardedModule:
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
