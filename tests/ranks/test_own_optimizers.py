"""Optimizers of users that look at more than an element, hold others, or have modes: as in plain torch."""

from __future__ import annotations

import pytest
import torch
from harness import assert_conforms, in_ranks, of_all_ranks, play, refused, values
from harness.training import DEEP, EACH, MECHANISMS, config, curve, everyones, own_share, train
from own_optimizers import MAKES, Lamb, Lookahead, Normalized, ScheduleFree, Tracing

import unishard
from unishard.testing import oracle
from unishard.testing.conformance import TOLERANCES
from unishard.testing.models import mlp

BEFORE, AFTER = 3, 3


MOVES = (
    ("deepspeed", "shard_grad_op", 2, "fsdp", "full_shard", 1),
    ("fsdp", "full_shard", 2, "deepspeed", "full_shard", 2),
    ("deepspeed", "full_shard", 1, "fsdp", "no_shard", 2),
    ("fsdp", "no_shard", 2, "deepspeed", "shard_grad_op", 2),
)
"""Where a run is saved, and where it goes on."""


def configured(backend, strategy, world):
    """The same four micro-batches in each update, whatever the number of ranks."""
    training = {"gradient_accumulation_steps": 4 // world, "gradient_clipping": 0.5}
    return config(backend, strategy, optimizer=None, training=training)


def batches(world, first, last):
    return own_share(last * 4 // world)[first * 4 // world :]


def saved(backend, strategy, world, kind, folder):
    with unishard.prepare(mlp(), configured(backend, strategy, world), MAKES[kind]) as engine:
        done = train(engine, batches(world, 0, BEFORE))
        with engine.eval():  # of schedule-free ones, other weights are saved
            engine.save(folder)
        return curve(done)


def resumed(backend, strategy, world, kind, folder):
    with unishard.prepare(mlp(), configured(backend, strategy, world), MAKES[kind]) as engine:
        assert engine.load(folder, verify="files").step == BEFORE
        return curve(train(engine, batches(world, BEFORE, BEFORE + AFTER)))


def plain(kind):
    def make(params):
        optimizer = MAKES[kind](params)
        if hasattr(optimizer, "train"):
            optimizer.train()
        return optimizer

    every = [everyones(2 * turn, 2 * turn + 2, world=2) for turn in range(BEFORE + AFTER)]
    return oracle.train(mlp(), every, configured("fsdp", "no_shard", 2), world=2, optimizer=make)


KINDS = [*MAKES]
CELLS = tuple(
    (kind, move)
    for number, kind in enumerate(KINDS)
    for turn, move in enumerate(MOVES)
    if DEEP or turn == number % len(MOVES)
)


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """The curves of all runs before and after they go on elsewhere; runs of a number of ranks share processes."""
    root = tmp_path_factory.mktemp("own")
    found = {}
    for function, places in ((saved, slice(0, 3)), (resumed, slice(3, 6))):
        for world in (1, 2):
            here = {
                (function, kind, move): (*move[places], kind, f"{root}/{kind}-{MOVES.index(move)}")
                for kind, move in CELLS
                if move[places][-1] == world
            }
            outcomes = play(tuple((function, cell) for cell in here.values()), world)
            found |= {key: values(outcomes[function, cell]) for key, cell in here.items()}
    return found


@pytest.mark.parametrize(("kind", "move"), CELLS, ids=str)
def test_an_optimizer_steps_as_in_plain_torch_and_goes_on_elsewhere(kind, move, played):
    whole = plain(kind)
    first, rest = (oracle.Curve(*(each[part] for each in whole)) for part in (slice(0, BEFORE), slice(BEFORE, None)))
    for function, wanted in ((saved, first), (resumed, rest)):
        for found in played[function, kind, move]:
            assert_conforms(found, wanted, TOLERANCES["fp32"])


def evaluated(model, call):
    with torch.no_grad():
        return [float(call(**each).loss) for each in everyones(0, 1, world=2)]


@in_ranks(cells=tuple((backend, strategy) for backend, strategy in MECHANISMS if strategy != "no_shard"))
def test_evaluation_has_the_weights_of_evaluation_and_training_goes_on(backend, strategy):
    model, plain_model = mlp(), mlp()
    optimizer, wanted = ScheduleFree(model.parameters()), ScheduleFree(plain_model.parameters())
    with unishard.prepare(model, configured(backend, strategy, 2), optimizer) as engine:
        for turn in range(2):
            wanted.train()
            train(engine, own_share(2))
            for each in everyones(0, 2, world=2):
                (plain_model(**each).loss / 4).backward()
            torch.nn.utils.clip_grad_norm_(plain_model.parameters(), 0.5)
            wanted.step()
            wanted.zero_grad()
            training = engine.weights.read("inp.weight")
            wanted.eval()
            with engine.eval():
                optimizer.eval()  # by habit
                assert evaluated(model, engine) == pytest.approx(evaluated(plain_model, plain_model), rel=1e-6)
                torch.testing.assert_close(engine.weights.read("inp.weight"), plain_model.inp.weight.detach())
                assert turn == 0 or (engine.weights.read("inp.weight") - training).norm() > 1e-3
                optimizer.train()
                torch.testing.assert_close(engine.weights.read("inp.weight"), training)
                engine.optimizer.eval()
            torch.testing.assert_close(engine.weights.read("inp.weight"), training)


@in_ranks(cells=EACH)
def test_an_update_that_needs_all_tensors_together_is_refused_where_no_rank_has_them(backend):
    message = refused(
        lambda: unishard.prepare(mlp(), configured(backend, "full_shard", 2), lambda params: Normalized(params, lr=0.1))
    )
    assert "optimizer: Normalized updates a tensor by what it finds in others, such as the norm of" in message
    assert "write sharding: no_shard, or training.gradient_clipping" in message
    with unishard.prepare(
        mlp(), configured(backend, "no_shard", 2), lambda params: Normalized(params, lr=0.1)
    ) as engine:
        assert train(engine, own_share(2))[-1][1].updated


class Expert(torch.nn.Linear):
    """A rank may skip it."""


class Gated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.always, self.expert = torch.nn.Linear(4, 4), Expert(4, 4)

    def forward(self, words, asks):
        hidden = self.always(words)
        return (self.expert(hidden) if asks else hidden).square().mean()


@in_ranks(cells=EACH)
def test_weights_without_a_gradient_are_averaged_with_their_copies(backend):
    model, words = Gated(), torch.arange(8.0).view(2, 4)
    wanted = MAKES["lookahead"](model.parameters())
    cfg = config(backend, {"strategy": "full_shard", "conditional_modules": ["Expert"]}, optimizer=None)
    with unishard.prepare(Gated(), cfg, MAKES["lookahead"]) as engine:
        for asks in (True, False, True):
            model(words, asks).backward()
            wanted.step()
            model.zero_grad()
            engine.backward(engine(words, asks))
            engine.step()
        found = {name: engine.weights.read(name) for name, _ in model.named_parameters()}
    for name, weight in model.named_parameters():
        torch.testing.assert_close(found[name], weight.detach())


@in_ranks(cells=(("fsdp", "no_shard"), ("deepspeed", "full_shard")))
def test_state_that_cannot_be_saved_is_said_before_the_first_step(backend, strategy, root):
    sections = {"optimizer": None, "checkpoint": {"dir": root}}
    message = refused(lambda: unishard.prepare(mlp(), config(backend, strategy, **sections), Tracing))
    assert "optimizer: the state of Tracing cannot be saved, and checkpoint.dir is set" in message
    with unishard.prepare(mlp(), config(backend, strategy, optimizer=None), Tracing) as engine:
        assert train(engine, own_share(1))[0][1].updated


@in_ranks(cells=EACH)
def test_copies_of_whole_weights_are_refused_and_state_is_found_by_parameter(backend):
    model = mlp()
    made = Lookahead(torch.optim.AdamW(model.parameters()))
    message = refused(lambda: unishard.prepare(model, configured(backend, "full_shard", 2), made))
    assert "Lookahead has copies of the whole parameters" in message
    assert "pass a function that builds it" in message
    for kind, key in ((torch.optim.AdamW, "exp_avg"), (Lamb, "mean")):
        with unishard.prepare(mlp(), configured(backend, "full_shard", 2), kind) as engine:
            weight = engine.module.inp.weight
            assert weight not in engine.optimizer.state
            train(engine, own_share(2))
            state = engine.optimizer.state[weight]
            sizes = of_all_ranks(state[key].numel() if state else 0)
            assert sum(sizes) == 13 * 23
            assert len(engine.optimizer.state) <= 25
