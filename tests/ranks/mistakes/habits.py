"""What people write by habit from plain torch loops, Accelerate and transformers."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import tempfile

import torch
from playing import STRATEGIES, curve, own_share, prepare, train
from playing import checked as config
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import unishard
from mistakes.mistake import Mistakes
from unishard.testing.models import mlp

HABITS = Mistakes("Habits from torch and Accelerate")

ARGUMENTS = {"state_dict": (), "load_state_dict": ({},), "add_param_group": ({"params": []},)}
ACCUMULATION = {"gradient_accumulation_steps": 2}
COSINE = {"name": "cosine", "total_steps": 8}


def in_every_strategy(scenario):
    """Play a scenario under each strategy, which must raise the same error or return the same; do that at last."""

    @functools.wraps(scenario)
    def played(backend, *arguments):
        outcomes = []
        for strategy in STRATEGIES:
            try:
                outcomes.append((strategy, scenario(backend, strategy, *arguments), None))
            except unishard.ContractError as problem:
                outcomes.append((strategy, None, problem))
        first = outcomes[0]
        assert all(str(each[2]) == str(first[2]) for each in outcomes), outcomes
        if first[2] is not None:
            raise first[2]
        return tuple([value for _, returned, _ in outcomes for value in returned[index]] for index in range(2))

    return played


def losses(done):
    """What a training shows: the losses and norms of its updates."""
    found = curve(done)
    return [*found.losses, *found.norms]


def in_a_window(backend, strategy, call):
    """Make a call after the first backward of a window of two."""
    with prepare(config(backend, strategy, training=ACCUMULATION)) as engine:
        engine.backward(engine(**own_share(1)[0]).loss)
        call(engine)


# -- the optimizer
# --------------------------------------------------------------------------------------------------------------------


@HABITS.raises(
    "`optimizer.zero_grad()` for each micro-batch of a window",
    "ContractError: engine.optimizer.zero_grad() was called after 1 of 2 backward calls of the accumulation window, "
    "and would drop their "
    "gradients; remove the call: engine.step() zeroes gradients after each update, and engine.discard() drops a window",
)
@in_every_strategy
def zero_grad_in_a_window(backend, strategy):
    in_a_window(backend, strategy, lambda engine: engine.optimizer.zero_grad())


@HABITS.raises(
    "the same on the optimizer that was passed to `prepare`",
    "ContractError: SGD.zero_grad() was called after 1 of 2 backward calls of the accumulation window, and would drop "
    "their gradients...",
)
@in_every_strategy
def zero_grad_of_the_own_optimizer(backend, strategy):
    model = mlp()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    with unishard.prepare(model, config(backend, strategy, training=ACCUMULATION, optimizer=None), own) as engine:
        engine.backward(engine(**own_share(1)[0]).loss)
        own.zero_grad()


@HABITS.harmless(
    "`optimizer.zero_grad()` right after an update, or before the first forward of a window",
    "nothing: there are no gradients",
)
@in_every_strategy
def zero_grad_between_windows(backend, strategy):
    def trained(*, zeroing):
        model = mlp()
        own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        found = []
        with unishard.prepare(model, config(backend, strategy, training=ACCUMULATION, optimizer=None), own) as engine:
            for index, batch in enumerate(engine.batches(own_share(6))):
                if zeroing and index % 2 == 0:
                    engine.optimizer.zero_grad()
                    own.zero_grad(set_to_none=False)
                loss = engine(**batch).loss
                if zeroing and index % 2 == 0:
                    own.zero_grad()
                engine.backward(loss)
                found.append((engine.mean(loss), engine.step()))
            return losses(found)

    return trained(zeroing=True), trained(zeroing=False)


@HABITS.raises(
    "`optimizer.step()` beside `engine.step()`, or in its place",
    "ContractError: engine.optimizer.step() was called, but the engine steps its optimizer; remove the call: "
    "engine.step() updates the parameters, zeroes their gradients and steps the scheduler",
)
@in_every_strategy
def optimizer_step(backend, strategy):
    in_a_window(backend, strategy, lambda engine: engine.optimizer.step())


@HABITS.raises(
    "the same on the optimizer that was passed to `prepare`",
    "ContractError: SGD.step() was called, but the engine steps this optimizer; remove the call: engine.step() "
    "updates the parameters, zeroes their gradients and steps the scheduler",
)
@in_every_strategy
def step_of_the_own_optimizer(backend, strategy):
    model = mlp()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    with unishard.prepare(model, config(backend, strategy, optimizer=None), own) as engine:
        train(engine, own_share(1))
        own.step()


@HABITS.raises(
    "an optimizer that is made from `engine.module.parameters()` after `prepare`, and stepped",
    "ContractError: AdamW.step() was called on 25 parameters of the Mlp that unishard.prepare has prepared without "
    "it, so it would train nothing, or bypass the engine; create it before prepare and pass it, as in "
    "unishard.prepare(model, cfg, optimizer=optimizer)...",
    "after",
)
@HABITS.raises(
    "an optimizer that is made before `prepare`, not passed to it, and stepped",
    "ContractError: AdamW.step() was called on 25 parameters of the Mlp that unishard.prepare has prepared without "
    "it...",
    "before",
)
@in_every_strategy
def foreign_optimizer(backend, strategy, made):
    model = mlp()
    own = torch.optim.AdamW(model.parameters())
    other = torch.nn.Linear(2, 2)
    others = torch.optim.AdamW(other.parameters())
    with unishard.prepare(model, config(backend, strategy)) as engine:
        if made == "after":
            own = torch.optim.AdamW(engine.module.parameters())
        engine.backward(engine(**own_share(1)[0]).loss)
        others.step()  # another model's may step
        own.step()


@HABITS.raises(
    "`torch.save(optimizer.state_dict(), ...)`",
    "ContractError: engine.optimizer.state_dict() returns only shards of the state; engine.save() saves the optimizer "
    "with the model, and engine.load() loads both, on any engine",
    "state_dict",
)
@HABITS.raises(
    "`optimizer.load_state_dict(...)` after `prepare`",
    "ContractError: engine.optimizer.load_state_dict() would not reach the engine's shards; engine.save() saves the "
    "optimizer...",
    "load_state_dict",
)
@HABITS.raises(
    "`optimizer.add_param_group(...)` after `prepare`",
    "ContractError: engine.optimizer.add_param_group() comes too late: the parameters are sharded; give the optimizer "
    "all groups before prepare, and freeze what trains later with engine.set_trainable(names, False)",
    "add_param_group",
)
def state_of_the_optimizer(backend, call):
    with prepare(config(backend)) as engine:
        getattr(engine.optimizer, call)(*ARGUMENTS[call])


@HABITS.raises(
    "`state_dict()` of the optimizer that was passed to `prepare`",
    "ContractError: SGD.state_dict() returns only shards of the state; engine.save() saves the optimizer...",
    "state_dict",
)
@HABITS.raises(
    "`load_state_dict()` of the same",
    "ContractError: SGD.load_state_dict() would not reach the engine's shards; engine.save() saves the optimizer...",
    "load_state_dict",
)
@HABITS.raises(
    "`add_param_group()` of the same",
    "ContractError: SGD.add_param_group() comes too late: the parameters are sharded...",
    "add_param_group",
)
def state_of_the_own_optimizer(backend, call):
    model = mlp()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    with unishard.prepare(model, config(backend, optimizer=None), own):
        getattr(own, call)(*ARGUMENTS[call])


# -- the scheduler
# --------------------------------------------------------------------------------------------------------------------


@HABITS.raises(
    "`scheduler.step()` of the scheduler that was passed to `prepare`",
    "ContractError: StepLR.step() was called, but the engine steps this scheduler; remove the call: engine.step() "
    "moves the learning rate once after each update that was not skipped",
)
@in_every_strategy
def scheduler_step(backend, strategy):
    model = mlp()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(own, 1)
    with unishard.prepare(model, config(backend, strategy, optimizer=None), own, scheduler) as engine:
        train(engine, own_share(1))
        scheduler.step()


@HABITS.raises(
    "a scheduler on `engine.optimizer` beside the config's schedule",
    "ContractError: a scheduler was built on engine.optimizer, but the engine's own schedule writes the learning "
    "rates after each update; use only one: remove `scheduler` from the config, or pass a function that builds yours, "
    "as in unishard.prepare(model, cfg, scheduler=lambda optimizer: ...)",
)
def two_schedules(backend):
    with prepare(config(backend, scheduler=COSINE)) as engine:
        torch.optim.lr_scheduler.StepLR(engine.optimizer, 1)
        train(engine, own_share(1))


@HABITS.harmless(
    "a scheduler on `engine.optimizer` with a constant schedule in the config, stepped by hand, such as "
    "`ReduceLROnPlateau`",
    "works: the engine keeps the rates that it writes",
)
@in_every_strategy
def scheduler_by_hand(backend, strategy):
    with prepare(config(backend, strategy)) as engine:
        decay = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, gamma=0.5)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(engine.optimizer, factor=0.1, patience=0)
        rates = []
        for batch in own_share(3):
            rates.append(train(engine, [batch])[0][1].lr)
            decay.step()
            plateau.step(1.0)
        return rates, [0.1, 0.05, 0.0025]


# -- gradients ---------------------------------------------------------------------------------------------------------


@HABITS.raises(
    "`torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0)` under `no_shard` and `shard_optimizer`",
    "ContractError: gradients were changed between engine.backward and engine.step, as by "
    "torch.nn.utils.clip_grad_norm_, which other engines would not see; remove that: clip with "
    "training.gradient_clipping in the config or engine.step(clip_grad_norm=1.0), edit a gradient with "
    "engine.set_grad, and drop a window with engine.discard()",
)
def clipping_by_hand(backend):
    for strategy in ("no_shard", "shard_optimizer"):
        expected = unishard.ContractError if strategy == "no_shard" else ()
        with prepare(config(backend, strategy, training=ACCUMULATION)) as engine, contextlib.suppress(expected):
            clip_each_micro_batch(engine)
            raise AssertionError(strategy)


def clip_each_micro_batch(engine):
    """The loop of a habit; returns what `engine.step()` and clipping say."""
    said = []
    for batch in engine.batches(own_share(2)):
        engine.backward(engine(**batch).loss)
        norm = torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1e-3)
        said.append((float(norm), engine.step().grad_norm))
    return said


HABITS.elsewhere(
    "the same under `shard_grad_op` and `full_shard`",
    "On FSDP the same error. On DeepSpeed nothing happens and nothing is clipped: its parameters hold no gradients "
    "there, and the norm that the function returns is 0. Clip with `training.gradient_clipping` in the config, or "
    "`engine.step(clip_grad_norm=1.0)`.",
    "tests/ranks/test_habits.py::test_clipping_by_hand_is_refused_where_parameters_hold_gradients",
)
HABITS.elsewhere(
    "`engine.backward(loss / accumulation)`",
    "A warning on rank 0 at the first backward: the loss that was passed to engine.backward ends in a division by 4, "
    "which is training.gradient_accumulation_steps; engine.backward divides by the accumulation window itself: pass "
    "the undivided loss...",
    "tests/ranks/test_habits.py::test_a_loss_that_is_divided_by_hand_is_named_once",
)


@HABITS.raises(
    "`model.zero_grad()` for each micro-batch of a window",
    "ContractError: model.zero_grad() was called after 1 of 2 backward calls of the accumulation window, and would "
    "drop their gradients...",
)
@in_every_strategy
def zero_grad_of_the_module(backend, strategy):
    in_a_window(backend, strategy, lambda engine: engine.module.zero_grad())


# -- backward ----------------------------------------------------------------------------------------------------------


@HABITS.raises(
    "`loss.backward()` instead of `engine.backward(loss)`",
    "ContractError: a backward that is not this engine's reaches the parameters of its ... call this engine's "
    "backward(loss), or, if the loss trains only another model, compute and backward it inside `with engine.frozen():`",
)
def backward_of_the_loss(backend):
    with prepare(config(backend)) as engine:
        engine(**own_share(1)[0]).loss.backward()


# -- the model ---------------------------------------------------------------------------------------------------------

SHARDED = (*STRATEGIES[1:], "no_shard with bf16")


def in_every_sharded_strategy(scenario):
    """The same where the module's parameters are not the weights in full."""

    @functools.wraps(scenario)
    def played(backend, *arguments):
        said = set()
        for strategy in SHARDED:
            name, _, precision = strategy.partition(" with ")
            with prepare(config(backend, name, precision=precision or "fp32")) as engine:
                train(engine, own_share(1))
                try:
                    scenario(engine, *arguments)
                except unishard.ContractError as problem:
                    said.add(str(problem))
                else:
                    raise AssertionError(strategy)
        assert len(said) == 1, said
        raise unishard.ContractError(*said)

    return played


@HABITS.raises(
    "`torch.save(engine.module.state_dict(), ...)`",
    "ContractError: state_dict() was called on a prepared Mlp, of whose weights this rank holds only shards or "
    "rounded copies; write a checkpoint with engine.save(folder), write the weights in Hugging Face's layout with "
    "engine.export(folder), or read one with engine.parameter(name)",
    "state_dict",
)
@HABITS.raises(
    "`state_dict()` of a part of the model", "ContractError: state_dict() was called on a prepared Mlp...", "part"
)
@HABITS.raises(
    "torch's `get_model_state_dict(engine.module)`",
    "ContractError: state_dict() was called on a prepared Mlp...",
    "dcp",
)
@in_every_sharded_strategy
def state_of_the_model(engine, how):
    {
        "state_dict": engine.module.state_dict,
        "part": engine.module.head.state_dict,
        "dcp": lambda: get_model_state_dict(engine.module),
    }[how]()


@HABITS.raises(
    "`engine.module.save_pretrained(folder)`",
    "ContractError: state_dict() was called on a prepared LlamaForCausalLM...write the weights...with "
    "engine.export(folder)...",
)
def save_pretrained(backend):
    with prepare(config(backend), "llama") as engine, tempfile.TemporaryDirectory() as folder:
        engine.module.save_pretrained(folder)


@HABITS.raises(
    "`model.load_state_dict(...)` after `prepare`",
    "ContractError: load_state_dict() was called on a prepared Mlp, and would not reach the engine's shards; load the "
    "weights before unishard.prepare, or load a checkpoint with engine.load(folder), or set one with "
    "engine.set_parameter(name, value)",
)
@in_every_sharded_strategy
def load_into_the_model(engine):
    engine.module.load_state_dict(mlp().state_dict())


@HABITS.harmless(
    "`state_dict()` and `load_state_dict()` of the model under `no_shard` in fp32",
    "works: the parameters are the weights on both engines",
)
def state_of_a_replicated_model(backend):
    with prepare(config(backend, "no_shard")) as engine:
        train(engine, own_share(1))
        trained = {name: value.clone() for name, value in engine.module.state_dict().items()}
        right = [engine.parameter(name).norm().item() for name, _ in engine.module.named_parameters()]
        engine.module.load_state_dict(mlp().state_dict())
        train(engine, own_share(1))
        again = [engine.parameter(name).norm().item() for name, _ in engine.module.named_parameters()]
        got = [trained[name].norm().item() for name, _ in engine.module.named_parameters()]
        return got, right if again != right else []


@HABITS.raises(
    "`nn.init.constant_(model.head.weight, 0.5)` after `prepare`, or another edit of a parameter between two updates",
    "ContractError: parameter head.weight changed since the last update, but not by the engine, whose shards or "
    "rounded copies of the weights this would reach in part or not at all; write the parameter with `with "
    "engine.gathered(['head.weight']) as weights:` or engine.set_parameter, or before unishard.prepare",
)
@in_every_sharded_strategy
def edit_of_a_parameter(engine):
    torch.nn.init.constant_(engine.module.head.weight, 0.5)
    train(engine, own_share(1))


HABITS.elsewhere(
    "the same as `model.head.weight.data.fill_(0.5)`",
    "The same error where the parameter holds elements. Under `full_shard` on DeepSpeed it holds none between two "
    "forwards: nothing happens, and there is no trace of it.",
    "tests/ranks/test_written_parameters.py::test_a_parameter_that_is_written_between_updates_is_named",
)


@HABITS.raises(
    "a forward that writes a parameter: a clamped weight, a first batch that sets a scale, a momentum encoder",
    "ContractError: the forward writes parameter head.weight, of which it has only a shard, or a gathered or rounded "
    "copy, so the write is lost or differs between engines; write it after engine.step() with `with "
    "engine.gathered(['head.weight']) as weights:`, for example to clamp a weight or to update a momentum encoder "
    "(engine.ema averages all weights); for an initialization that depends on data, run a batch through the model "
    "before unishard.prepare; a write that is the same on all ranks also works with sharding: no_shard and precision: "
    "fp32",
)
@in_every_sharded_strategy
def write_in_the_forward(engine):
    head, plain = engine.module.head, engine.module.head.forward

    def clamped(x):
        with torch.no_grad():
            head.weight.clamp_(-0.1, 0.1)
        return plain(x)

    head.forward = clamped
    train(engine, own_share(1))


@HABITS.raises(
    "`nn.Embedding(..., max_norm=1.0)`",
    "ModelError: 0 (Embedding) of Sequential has max_norm, with which each rank's forward writes the rows of its own "
    "batch into the weight, where sharding loses them and replicas would differ; leave max_norm out, and limit the "
    "norms of the rows after engine.step() in `with engine.gathered(['0.weight']) as weights:`",
)
def embedding_with_a_maximum(backend):
    unishard.prepare(
        torch.nn.Sequential(torch.nn.Embedding(9, 4, max_norm=1.0), torch.nn.Linear(4, 2)), config(backend, "no_shard")
    )


@HABITS.raises(
    "`requires_grad_(True)` after `prepare` on a layer that was frozen before",
    "ContractError: inp.weight was frozen when the model was prepared, so it has no fp32 master weight and is not in "
    "the optimizer; leave "
    "it trainable in prepare, and call engine.set_trainable(..., False) until you want to train it",
)
@in_every_strategy
def late_unfreezing(backend, strategy):
    model = mlp()
    model.inp.requires_grad_(False)
    with unishard.prepare(model, config(backend, strategy)) as engine:
        train(engine, own_share(1))
        engine.module.inp.requires_grad_(True)
        train(engine, own_share(1))


class Adding(torch.nn.Linear):
    """A unit that changes its input."""

    def forward(self, x):
        return super().forward(x.add_(1.0))


class Viewing(torch.nn.Linear):
    """A unit that returns a view."""

    def forward(self, x):
        return super().forward(x).view(-1, 2, 4)


class Changing(torch.nn.Module):
    """Changes in place what a unit returns."""

    def __init__(self, kind):
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.unit = kind(8, 8)

    def forward(self, x):
        return self.unit(self.first(x)).mul_(2.0).square().mean()


@HABITS.raises(
    "`x += 1` on the input of a block, under `full_shard`",
    "ModelError: unit unit (Adding) changes its input in place, as x.add_(y) does, behind the function with which the "
    "engine runs its backward; write x = x + y, or change a copy, x = x.clone()",
    Adding,
)
@HABITS.raises(
    "`y *= 2` on an output of a block that is a view, under `full_shard`",
    "ModelError: an output of unit unit (Viewing) is a view or its input, and is changed in place after the unit, as "
    "y.add_(x) does, behind the function with which the engine runs the unit's backward; write y = y + x, or return "
    "y.clone() from the unit",
    Viewing,
)
def change_in_place(backend, kind):
    cfg = config(backend, {"strategy": "full_shard", "units": [kind.__name__]})
    with unishard.prepare(Changing(kind), cfg) as engine:
        engine.backward(engine(torch.ones(2, 8)))


HABITS.elsewhere(
    "a mean loss with `num_items`",
    "A warning on rank 0 at the first backward: the loss that was passed to engine.backward with num_items ends in a "
    "mean (NllLossBackward0), and the engine divides it by the number of items again; pass the sum of the losses of "
    "the items...",
    "tests/ranks/test_habits.py::test_a_mean_with_num_items_is_named_once",
)
HABITS.elsewhere(
    "a loop that goes on after `scheduler.total_steps`",
    "A warning on rank 0: update 3 has a learning rate of 0 and trains nothing: scheduler.total_steps is reached; end "
    "the loop there...",
    "tests/ranks/test_habits.py::test_a_run_that_trains_nothing_is_named_once",
)
HABITS.elsewhere(
    "NaN in every batch or weight",
    "Updates are skipped, and after 5 in a row a warning on rank 0: 5 updates in a row were skipped, because a "
    "gradient is infinite or NaN; nothing is trained while this lasts...",
    "tests/ranks/test_habits.py::test_a_run_that_trains_nothing_is_named_once",
)


@HABITS.raises(
    "`copy.deepcopy(engine.module)`",
    "ContractError: a prepared Mlp cannot be copied: this rank holds only shards or rounded copies of its weights; "
    "read them with "
    "engine.parameter(name), average them with engine.ema(decay), or write them with engine.export(folder)",
)
@in_every_sharded_strategy
def copy_of_the_model(engine):
    copy.deepcopy(engine.module)


@HABITS.harmless("`copy.deepcopy(engine.module)` under `no_shard` in fp32", "works: the copy is a plain module")
def copy_of_a_replicated_model(backend):
    with prepare(config(backend, "no_shard")) as engine:
        train(engine, own_share(1))
        clone = copy.deepcopy(engine.module).to(torch.float64).to(torch.float32)
        torch.optim.SGD(clone.parameters()).step()
        train(engine, own_share(1))
        right = [engine.parameter(name).norm().item() for name, _ in engine.module.named_parameters()]
        got = [parameter.norm().item() for parameter in clone.parameters()]
        assert got != right
        with torch.no_grad():
            for name, parameter in clone.named_parameters():
                parameter.copy_(engine.parameter(name))
        return [parameter.norm().item() for parameter in clone.parameters()], right


@HABITS.raises(
    "`torch.save(engine.module, ...)`",
    "ContractError: a prepared Mlp cannot be pickled, as by torch.save(model): it holds the engine's hooks, and on "
    "this rank only shards "
    "or rounded copies of its weights; write them with engine.save(folder) or engine.export(folder)",
)
@in_every_strategy
def pickle_of_the_model(backend, strategy):
    with prepare(config(backend, strategy)) as engine:
        torch.save(engine.module, io.BytesIO())


@HABITS.raises(
    "`model.half()` after `prepare`",
    "ContractError: model.half() would change the dtype or the device of a prepared Mlp, which engines ignore or break "
    "on; remove the "
    "call: the engine has put the model on engine.device, and its dtypes are those of `precision` in the config",
    "half",
)
@HABITS.raises(
    "`model.to(torch.bfloat16)` after `prepare`",
    "ContractError: model.to() would change the dtype...",
    "to",
    torch.bfloat16,
)
@HABITS.raises(
    "`model.to_empty(device=...)` after `prepare`",
    "ContractError: model.to_empty() would change the dtype...",
    "to_empty",
)
@in_every_strategy
def cast_of_the_model(backend, strategy, call, *arguments):
    with prepare(config(backend, strategy)) as engine:
        getattr(engine.module, call)(*arguments)


@HABITS.raises(
    "`model.float()` with bf16 in the config", "ContractError: model.float() would change the dtype...", "float"
)
@HABITS.raises(
    "`model.bfloat16()` with bf16 in the config",
    "ContractError: model.bfloat16() would change the dtype...",
    "bfloat16",
)
def cast_of_a_mixed_model(backend, call):
    with prepare(config(backend, precision="bf16")) as engine:
        getattr(engine.module, call)()


@HABITS.harmless(
    "`model.to(engine.device)`, `model.float()` in fp32, after `prepare`", "nothing: the model is there already"
)
@in_every_strategy
def move_of_the_model(backend, strategy):
    def trained(*, moves):
        with prepare(config(backend, strategy)) as engine:
            if moves:
                assert (
                    engine.module.to(engine.device).float().to(device=engine.device, dtype=torch.float32)
                    is engine.module
                )
            return losses(train(engine, own_share(2)))

    return trained(moves=True), trained(moves=False)


# -- training mode
# --------------------------------------------------------------------------------------------------------------------


@HABITS.raises(
    "`engine.backward(loss)` in evaluation mode, as after a validation that ended without `engine.train()`",
    "ContractError: backward was called in evaluation mode, where engine(...) builds no graph; call engine.train() "
    "before the forward",
)
def backward_in_evaluation(backend):
    with prepare(config(backend)) as engine:
        engine.backward(engine.eval()(**own_share(1)[0]).loss)


# -- weights outside their modules
# -----------------------------------------------------------------------------------------------------


def in_unsharded(backend, strategy, act, names=("head.weight",)):
    """Do something inside `engine.unsharded`."""
    with prepare(config(backend, strategy)) as engine, engine.unsharded(names) as weights:
        act(engine, weights)


@HABITS.raises(
    "`engine.step()` inside `engine.unsharded`",
    "ContractError: step was called inside engine.unsharded(), where weights are full for a forward and its backward; "
    "call it after the block",
)
@in_every_strategy
def step_inside_unsharded(backend, strategy):
    in_unsharded(backend, strategy, lambda engine, weights: train(engine, own_share(1)))


@HABITS.raises(
    "`engine.backward` after the block of `engine.unsharded`",
    "ContractError: engine.unsharded() ended without a backward, which needs the full weights; call "
    "engine.backward(loss) inside the block, or use torch.no_grad() around it if you only read weights",
)
@in_every_strategy
def backward_after_unsharded(backend, strategy):
    in_unsharded(backend, strategy, lambda engine, weights: weights["head.weight"].square().sum())


@HABITS.raises(
    "edits a weight inside `engine.unsharded`",
    "ContractError: a parameter was edited inside engine.unsharded(), which holds copies: head.weight; edit weights "
    "inside `with engine.gathered(names):`, which writes them back",
)
@in_every_strategy
def edit_inside_unsharded(backend, strategy):
    in_unsharded(backend, strategy, lambda engine, weights: weights["head.weight"].detach().mul_(2))


@HABITS.raises(
    "`engine.unsharded` inside `engine.unsharded`",
    "ContractError: engine.unsharded() was entered inside engine.unsharded(); name all parameters in one block",
)
@in_every_strategy
def unsharded_inside_unsharded(backend, strategy):
    in_unsharded(backend, strategy, lambda engine, weights: engine.unsharded(["head.bias"]).__enter__())


@HABITS.raises(
    "a name that the model does not have in `engine.unsharded`",
    "ContractError: unsharded: the model has no parameter 'heads.weight'; did you mean head.weight...?",
)
@in_every_strategy
def unknown_name_in_unsharded(backend, strategy):
    in_unsharded(backend, strategy, lambda engine, weights: None, names=["heads.weight"])


# -- what transformers does for its Trainer
# -------------------------------------------------------------------------------------------


@HABITS.raises(
    "`HfDeepSpeedConfig(...)` or `TrainingArguments(deepspeed=...)` of stage 3 beside `prepare`",
    "ModelError: transformers holds a DeepSpeed config of stage 3, from HfDeepSpeedConfig(...), "
    "TrainingArguments(deepspeed=...) or Accelerate's DeepSpeedPlugin; with it, its models partition the weights that "
    "they load and run without LayerDrop; remove it from the script: the config of unishard.prepare says how the "
    "model is sharded",
)
def zero3_of_transformers(backend):
    from transformers.integrations import HfDeepSpeedConfig, unset_hf_deepspeed_config

    kept = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    try:
        prepare(config(backend))
    finally:
        assert kept.is_zero3()
        unset_hf_deepspeed_config()
