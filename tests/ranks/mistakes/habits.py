"""What people write by habit from plain torch loops, Accelerate and transformers."""

from __future__ import annotations

import copy
import functools
import tempfile

import torch
from harness import PAIRS, curve, own_share, prepare, train
from harness import checked as config
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import unishard
from mistakes.mistake import elsewhere, mistake
from unishard.testing.models import mlp

ARGUMENTS = {"state_dict": (), "load_state_dict": ({},), "add_param_group": ({"params": []},)}
ACCUMULATION = {"gradient_accumulation_steps": 2}
COSINE = {"name": "cosine", "total_steps": 8}


def in_every_strategy(scenario):
    """Play a scenario under each strategy, which must raise the same error or return the same; do that at last."""

    @functools.wraps(scenario)
    def played(backend, *arguments):
        outcomes = []
        for strategy in (strategy for engine, strategy in PAIRS if engine == backend):
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


# -- the optimizer ---------------------------------------------------------------------------------


@mistake("`optimizer.zero_grad()` for each micro-batch of a window")
@in_every_strategy
def zero_grad_in_a_window(backend, strategy):
    in_a_window(backend, strategy, lambda engine: engine.optimizer.zero_grad())


@mistake("`zero_grad()` of the optimizer that was passed to `prepare`, in a window")
@in_every_strategy
def zero_grad_of_the_own_optimizer(backend, strategy):
    model = mlp()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    with unishard.prepare(model, config(backend, strategy, training=ACCUMULATION, optimizer=None), own) as engine:
        engine.backward(engine(**own_share(1)[0]).loss)
        own.zero_grad()


@mistake("`optimizer.zero_grad()` right after an update, or before the first forward of a window")
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


@mistake("`optimizer.step()` beside `engine.step()`, or in its place")
@in_every_strategy
def optimizer_step(backend, strategy):
    in_a_window(backend, strategy, lambda engine: engine.optimizer.step())


@mistake("`step()` of the optimizer that was passed to `prepare`")
@in_every_strategy
def step_of_the_own_optimizer(backend, strategy):
    model = mlp()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    with unishard.prepare(model, config(backend, strategy, optimizer=None), own) as engine:
        train(engine, own_share(1))
        own.step()


@mistake("an optimizer that is made from `engine.module.parameters()` after `prepare`, and stepped", "after")
@mistake("an optimizer that is made before `prepare`, not passed to it, and stepped", "before")
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


@mistake("`torch.save(optimizer.state_dict(), ...)`", "state_dict")
@mistake("`optimizer.load_state_dict(...)` after `prepare`", "load_state_dict")
@mistake("`optimizer.add_param_group(...)` after `prepare`", "add_param_group")
def state_of_the_optimizer(backend, call):
    with prepare(config(backend)) as engine:
        getattr(engine.optimizer, call)(*ARGUMENTS[call])


@mistake("`state_dict()` of the optimizer that was passed to `prepare`", "state_dict")
@mistake("`load_state_dict()` of the optimizer that was passed to `prepare`", "load_state_dict")
@mistake("`add_param_group()` of the optimizer that was passed to `prepare`", "add_param_group")
def state_of_the_own_optimizer(backend, call):
    model = mlp()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    with unishard.prepare(model, config(backend, optimizer=None), own):
        getattr(own, call)(*ARGUMENTS[call])


# -- the scheduler ---------------------------------------------------------------------------------


@mistake("`scheduler.step()` of the scheduler that was passed to `prepare`")
@in_every_strategy
def scheduler_step(backend, strategy):
    model = mlp()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(own, 1)
    with unishard.prepare(model, config(backend, strategy, optimizer=None), own, scheduler) as engine:
        train(engine, own_share(1))
        scheduler.step()


@mistake("a scheduler on `engine.optimizer` beside the config's schedule")
def two_schedules(backend):
    with prepare(config(backend, scheduler=COSINE)) as engine:
        torch.optim.lr_scheduler.StepLR(engine.optimizer, 1)
        train(engine, own_share(1))


@mistake(
    "a scheduler on `engine.optimizer` with a constant schedule in the config, stepped by hand, such as `ReduceLROnPlateau`"
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


# -- gradients -------------------------------------------------------------------------------------


@mistake("`torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0)`")
@in_every_strategy
def clipping_by_hand(backend, strategy):
    with prepare(config(backend, strategy, training=ACCUMULATION)) as engine:
        clip_each_micro_batch(engine)


def clip_each_micro_batch(engine):
    """The loop of a habit; returns what `engine.step()` and clipping say."""
    said = []
    for batch in engine.batches(own_share(2)):
        engine.backward(engine(**batch).loss)
        norm = torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1e-3)
        said.append((float(norm), engine.step().grad_norm))
    return said


elsewhere(
    "`engine.backward(loss / accumulation)`",
    "tests/ranks/test_habits.py::test_a_loss_that_is_divided_by_hand_is_named_once",
)


@mistake("`model.zero_grad()` for each micro-batch of a window")
@in_every_strategy
def zero_grad_of_the_module(backend, strategy):
    in_a_window(backend, strategy, lambda engine: engine.module.zero_grad())


# -- backward --------------------------------------------------------------------------------------


@mistake("`loss.backward()` instead of `engine.backward(loss)`")
def backward_of_the_loss(backend):
    with prepare(config(backend)) as engine:
        engine(**own_share(1)[0]).loss.backward()


# -- the model -------------------------------------------------------------------------------------


def in_every_sharded_strategy(scenario):
    """The same where the module's parameters are not the weights in full."""

    @functools.wraps(scenario)
    def played(backend, *arguments):
        said = set()
        some = [strategy for engine, strategy in PAIRS if engine == backend and strategy != "no_shard"]
        for strategy in (*some, "no_shard with bf16"):
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


@mistake("`torch.save(engine.module.state_dict(), ...)`", "state_dict")
@mistake("`state_dict()` of a part of the model", "part")
@mistake("torch's `get_model_state_dict(engine.module)`", "dcp")
@in_every_sharded_strategy
def state_of_the_model(engine, how):
    {
        "state_dict": engine.module.state_dict,
        "part": engine.module.head.state_dict,
        "dcp": lambda: get_model_state_dict(engine.module),
    }[how]()


@mistake("`engine.module.save_pretrained(folder)`")
def save_pretrained(backend):
    with prepare(config(backend), "llama") as engine, tempfile.TemporaryDirectory() as folder:
        engine.module.save_pretrained(folder)


@mistake("`model.load_state_dict(...)` after `prepare`")
@in_every_sharded_strategy
def load_into_the_model(engine):
    engine.module.load_state_dict(mlp().state_dict())


@mistake("`state_dict()` and `load_state_dict()` of the model under `no_shard` in fp32")
def state_of_a_replicated_model(backend):
    with prepare(config(backend, "no_shard")) as engine:
        train(engine, own_share(1))
        trained = {name: value.clone() for name, value in engine.module.state_dict().items()}
        right = [engine.weights.read(name).norm().item() for name, _ in engine.module.named_parameters()]
        engine.module.load_state_dict(mlp().state_dict())
        train(engine, own_share(1))
        again = [engine.weights.read(name).norm().item() for name, _ in engine.module.named_parameters()]
        got = [trained[name].norm().item() for name, _ in engine.module.named_parameters()]
        return got, right if again != right else []


@mistake(
    "`nn.init.constant_(model.head.weight, 0.5)` after `prepare`, or another edit of a parameter between two updates"
)
@in_every_sharded_strategy
def edit_of_a_parameter(engine):
    torch.nn.init.constant_(engine.module.head.weight, 0.5)
    train(engine, own_share(1))


elsewhere(
    "`model.head.weight.data.fill_(0.5)` after `prepare`",
    "tests/ranks/test_written_parameters.py::test_a_parameter_that_is_written_between_updates_is_named",
)


@mistake("a forward that writes a parameter: a clamped weight, a first batch that sets a scale, a momentum encoder")
@in_every_sharded_strategy
def write_in_the_forward(engine):
    head, plain = engine.module.head, engine.module.head.forward

    def clamped(x):
        with torch.no_grad():
            head.weight.clamp_(-0.1, 0.1)
        return plain(x)

    head.forward = clamped
    train(engine, own_share(1))


@mistake("`nn.Embedding(..., max_norm=1.0)`")
def embedding_with_a_maximum(backend):
    unishard.prepare(
        torch.nn.Sequential(torch.nn.Embedding(9, 4, max_norm=1.0), torch.nn.Linear(4, 2)), config(backend, "no_shard")
    )


@mistake("`requires_grad_(True)` after `prepare` on a layer that was frozen before")
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


@mistake("`x += 1` on the input of a block, under `full_shard`", Adding)
@mistake("`y *= 2` on an output of a block that is a view, under `full_shard`", Viewing)
def change_in_place(backend, kind):
    cfg = config(backend, {"strategy": "full_shard", "units": [kind.__name__]})
    with unishard.prepare(Changing(kind), cfg) as engine:
        engine.backward(engine(torch.ones(2, 8)))


elsewhere("a mean loss with `num_items`", "tests/ranks/test_habits.py::test_a_mean_with_num_items_is_named_once")
elsewhere(
    "a loop that goes on after `scheduler.total_steps`",
    "tests/ranks/test_habits.py::test_a_run_that_trains_nothing_is_named_once",
)
elsewhere("NaN in every batch or weight", "tests/ranks/test_habits.py::test_a_run_that_trains_nothing_is_named_once")


@mistake("`copy.deepcopy(engine.module)`")
@in_every_sharded_strategy
def copy_of_the_model(engine):
    copy.deepcopy(engine.module)


@mistake("`copy.deepcopy(engine.module)` under `no_shard` in fp32")
def copy_of_a_replicated_model(backend):
    with prepare(config(backend, "no_shard")) as engine:
        train(engine, own_share(1))
        clone = copy.deepcopy(engine.module).to(torch.float64).to(torch.float32)
        torch.optim.SGD(clone.parameters()).step()
        train(engine, own_share(1))
        right = [engine.weights.read(name).norm().item() for name, _ in engine.module.named_parameters()]
        got = [parameter.norm().item() for parameter in clone.parameters()]
        assert got != right
        with torch.no_grad():
            for name, parameter in clone.named_parameters():
                parameter.copy_(engine.weights.read(name))
        return [parameter.norm().item() for parameter in clone.parameters()], right


@mistake("`model.half()` after `prepare`", "half")
@mistake("`model.to(torch.bfloat16)` after `prepare`", "to", torch.bfloat16)
@mistake("`model.to_empty(device=...)` after `prepare`", "to_empty")
@in_every_strategy
def cast_of_the_model(backend, strategy, call, *arguments):
    with prepare(config(backend, strategy)) as engine:
        getattr(engine.module, call)(*arguments)


@mistake("`model.float()` with bf16 in the config", "float")
@mistake("`model.bfloat16()` with bf16 in the config", "bfloat16")
def cast_of_a_mixed_model(backend, call):
    with prepare(config(backend, precision="bf16")) as engine:
        getattr(engine.module, call)()


@mistake("`model.to(engine.device)`, `model.float()` in fp32, after `prepare`")
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


# -- training mode ---------------------------------------------------------------------------------


@mistake("`engine.backward(loss)` in evaluation mode, as after a validation that ended without `engine.train()`")
def backward_in_evaluation(backend):
    with prepare(config(backend)) as engine:
        engine.backward(engine.eval()(**own_share(1)[0]).loss)


# -- weights outside their modules -----------------------------------------------------------------


def in_unsharded(backend, strategy, act, names=("head.weight",)):
    """Do something inside `engine.weights.unsharded`."""
    with prepare(config(backend, strategy)) as engine, engine.weights.unsharded(names) as weights:
        act(engine, weights)


@mistake("`engine.step()` inside `engine.weights.unsharded`")
@in_every_strategy
def step_inside_unsharded(backend, strategy):
    in_unsharded(backend, strategy, lambda engine, weights: train(engine, own_share(1)))


@mistake("`engine.backward` after the block of `engine.weights.unsharded`")
@in_every_strategy
def backward_after_unsharded(backend, strategy):
    in_unsharded(backend, strategy, lambda engine, weights: weights["head.weight"].square().sum())


@mistake("edits a weight inside `engine.weights.unsharded`")
@in_every_strategy
def edit_inside_unsharded(backend, strategy):
    in_unsharded(backend, strategy, lambda engine, weights: weights["head.weight"].detach().mul_(2))


@mistake("`engine.weights.unsharded` inside `engine.weights.unsharded`")
@in_every_strategy
def unsharded_inside_unsharded(backend, strategy):
    in_unsharded(backend, strategy, lambda engine, weights: engine.weights.unsharded(["head.bias"]).__enter__())


@mistake("a name that the model does not have in `engine.weights.unsharded`")
@in_every_strategy
def unknown_name_in_unsharded(backend, strategy):
    in_unsharded(backend, strategy, lambda engine, weights: None, names=["heads.weight"])


# -- what transformers does for its Trainer --------------------------------------------------------


@mistake("`HfDeepSpeedConfig(...)` or `TrainingArguments(deepspeed=...)` of stage 3 beside `prepare`")
def zero3_of_transformers(backend):
    from transformers.integrations import HfDeepSpeedConfig, unset_hf_deepspeed_config

    kept = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    try:
        prepare(config(backend))
    finally:
        assert kept.is_zero3()
        unset_hf_deepspeed_config()


# -- the engine as something else ------------------------------------------------------------------


@mistake("`engine.gradient_accumulation_steps = 4`, or another attribute that is set on the engine")
def attribute_of_the_engine(backend):
    with prepare(config(backend)) as engine:
        engine.mine = 1
        engine.gradient_accumulation_steps = 4


@mistake("`torch.compile(engine)`")
def compiled_engine(backend):
    with prepare(config(backend)) as engine:
        torch.compile(engine)


@mistake("`with engine.eval():`")
def evaluation_in_a_block(backend):
    """An update before it and one after it."""
    found = []
    for in_a_block in (True, False):
        with prepare(config(backend)) as engine:
            first, second = own_share(2)
            train(engine, [first])
            if in_a_block:
                with engine.eval() as same, same.lockstep():
                    loss = same(**second).loss
            else:
                engine.eval()
                loss = engine(**second).loss
                engine.train()
            found.append([float(loss), *losses(train(engine, [second]))])
    return found[0], found[1]


@mistake("one loss of two engines' outputs")
def loss_of_two_engines(backend):
    with prepare(config(backend)) as first, prepare(config(backend)) as second:
        batch = own_share(1)[0]
        first.backward(first(**batch).loss + second(**batch).loss)


@mistake("a loss that no forward has computed, as those with cached gradients (GradCache) return")
@in_every_strategy
def leaf_loss(backend, strategy):
    with prepare(config(backend, strategy)) as engine:
        engine(**own_share(1)[0])
        engine.backward(torch.tensor(1.0, requires_grad=True))
