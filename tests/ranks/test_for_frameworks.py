"""What a framework around the engine needs: windows that it ends itself, losses that it has scaled, the norm before the
step, the model as the engine's entry, and all weights at once."""

from __future__ import annotations

import inspect
import tempfile

import pytest
import torch
import torch.distributed as dist
from harness import (
    BACKENDS,
    DEEP,
    FEWER,
    FEWER_SPANNING,
    SPANNING,
    checked,
    my_rank,
    own_share,
    play,
    prepare,
    refused,
    train,
    values,
)
from safetensors.torch import save_file
from torch import nn
from torch.testing import assert_close

import unishard
from unishard.testing.models import MODELS, llama, mlp

LENGTHS = (3, 1, 2)
TOLERANCE = {"fp32": 1e-6, "bf16": 1e-2}


def losses(engine, micro_batches, *, lengths=None, scaled=False):
    """Mean losses and norms of windows of these lengths: pushed, or pulled."""
    found, batches = [], iter(micro_batches)
    for length in LENGTHS:
        for turn in range(length):
            if lengths == "pushed":
                engine.framework.set_boundary(turn + 1 == length)
            loss = engine(**next(batches)).loss
            if scaled:
                engine.framework.scaled_backward(loss / length)
            else:
                engine.backward(loss)
            if turn + 1 == length:
                norm = engine.gradients.norm()
                assert engine.gradients.norm() == norm
            step = engine.step()
            found.append(engine.mean(loss))
        assert step.updated
        assert_close(norm.item(), step.grad_norm, rtol=1e-6, atol=0)
        found.append(step.grad_norm)
    return found


def windows(backend, strategy, precision):
    cfg = checked(backend, strategy, precision=precision, training={"gradient_clipping": 0.5})
    data = own_share(sum(LENGTHS))
    with prepare(cfg) as engine:
        pulled = []
        for window in engine.windows(data, lengths=LENGTHS):
            for batch in window:
                loss = engine(**batch).loss
                engine.backward(loss)
                step = engine.step()
                pulled.append(engine.mean(loss))
            pulled.append(step.grad_norm)
    for scaled in (False, True):
        with prepare(cfg) as engine:
            pushed = losses(engine, data, lengths="pushed", scaled=scaled)
            assert_close(pushed, pulled, rtol=TOLERANCE[precision], atol=0)
            # A value holds until the next one, a discarded window is forgotten, and the config's windows come back.
            engine.framework.set_boundary(False)
            for batch in data[:2]:
                engine.backward(engine(**batch).loss)
                assert not engine.step().updated
            engine.discard()
            assert train(engine, data[:1])[0][1].updated


def going_on(backend, strategy, precision):
    """A window goes on where a forward, or `set_boundary`, comes in place of the step that was said."""
    cfg = checked(backend, strategy, precision=precision, training={"gradient_clipping": 0.5})
    data = own_share(4)
    found = []
    for said in (False, True):
        with prepare(cfg) as engine:
            engine.framework.set_boundary(said)
            for turn, batch in enumerate(data):
                engine.backward(engine(**batch).loss)
                if not said and turn < 3:
                    engine.framework.set_boundary(turn == 2)
            found.append(engine.step().grad_norm)
            engine.backward(engine(**data[0]).loss)
            found.append(engine.step().grad_norm)
    assert_close(found[2:], found[:2], rtol=TOLERANCE[precision], atol=0)
    with prepare(cfg) as engine:
        engine.framework.set_boundary(True)
        engine.backward(engine(**data[0]).loss)
        engine.gradients.norm()
        return refused(engine, **data[1])


def wrong_windows(backend):
    with prepare(checked(backend, training={"gradient_accumulation_steps": 2})) as engine:
        one, two = own_share(2)
        engine.backward(engine(**one).loss)
        after_backward = refused(engine.framework.set_boundary, True)
        engine.step()
        known = refused(engine.framework.set_boundary, True)
        mixed = refused(engine.framework.scaled_backward, engine(**two).loss)
        engine.discard()
        engine.framework.set_boundary(True)
        loss = engine(**one).loss
        late = refused(engine.framework.set_boundary, False)
        engine.backward(loss)
        assert engine.step().updated
        return after_backward, known, mixed, late


class Parts(nn.Module):
    """Has a method, and a part that is called from outside."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()
        self.head = nn.Linear(4, 1)
        self.own = nn.Parameter(torch.full((3,), 2.0))

    def forward(self, x, labels):
        return self.inner(x=x, labels=labels)

    def penalized(self, x, labels):
        return self(x, labels=labels).loss + self.own.square().sum()

    def score(self, x):
        return self.head(x).square().mean()


def routed(backend, strategy):
    """The model's own calls are the engine's."""
    cfg = checked(backend, strategy, sharding={"strategy": strategy, "conditional_modules": ["Mlp", "Linear"]})
    torch.manual_seed(0)
    model = Parts()
    (batch,), given = own_share(1), type(model)
    x = torch.arange(8.0).view(2, 4) + my_rank()
    plain = [model(**batch).loss.item(), model.score(x).item(), model.inner(**batch).loss.item()]
    plain += [model.penalized(**batch).item(), 4.0]
    with unishard.prepare(model, cfg, reseed=False) as engine:
        assert engine.framework.routed("score", "penalized", parts=["inner"]) is model
        assert [*inspect.signature(model.score).parameters] == ["x"]
        assert isinstance(model, given)
        assert type(model).__name__ == "Parts"
        found = []
        for call in (lambda: model(**batch).loss, lambda: model.score(x), lambda: model.inner(**batch).loss):
            loss = call()
            found.append(loss.item())
            engine.backward(loss)
            engine.step(clip_grad_norm=1e-12)
        loss = model.penalized(**batch)
        engine.backward(loss)
        found += [loss.item(), engine.gradients.read("own").mean().item()]
        engine.step(clip_grad_norm=1e-12)
        assert_close(found, plain, rtol=1e-5, atol=0)
        engine.backward(engine.framework.routed()(**batch).loss)  # no part of it is routed, only the model
        assert engine.step(clip_grad_norm=1e-12).updated
        model.eval()
        assert not model(**batch).loss.requires_grad
        none = refused(engine.framework.routed, "compute_loss")
    assert "compute_loss" in none
    return type(model).__call__ is nn.Module.__call__


def generated(backend):
    with unishard.prepare(llama(), checked(backend)) as engine:
        model = engine.framework.routed()
        model.eval()
        ids = torch.ones(1, 3 + my_rank(), dtype=torch.int64)
        return model.generate(ids, max_new_tokens=2, do_sample=False).shape[1] - ids.shape[1]


def whole(backend, strategy, precision, folder):
    """All weights out and in again."""
    expected = {name: value.clone() for name, value in MODELS["llama"].build().state_dict().items()}
    with unishard.prepare(MODELS["llama"].build(), checked(backend, strategy, precision=precision)) as engine:
        first = engine.weights.state_dict()
        assert bool(first) is (my_rank() == 0)
        everywhere = engine.weights.state_dict(all_ranks=True, dtype="bf16")
        streamed = dict(engine.weights.stream())
        assert everywhere.keys() == expected.keys()
        for name, value in expected.items():
            assert everywhere[name].equal(value.to(torch.bfloat16)), name
            assert name not in streamed or streamed[name].equal(value), name
            assert not first or first[name].equal(value), name
        train(engine, own_share(2, "llama"))
        assert not engine.weights.state_dict(all_ranks=True)["model.norm.weight"].equal(expected["model.norm.weight"])
        wrong = {**expected, "model.norm.weight": torch.ones(3)}
        problems = refused(engine.weights.load, wrong if my_rank() == 0 else None)
        missing = {name: value for name, value in expected.items() if name != "model.norm.weight"}
        problems += refused(engine.weights.load, missing)
        engine.weights.load(missing, strict=False)
        engine.weights.load(expected if my_rank() == 0 else None)
        if my_rank() == 0:
            save_file({name: value.contiguous() for name, value in expected.items()}, f"{folder}/model.safetensors")
        for _ in range(2):
            for name, value in engine.weights.state_dict(all_ranks=True).items():
                assert value.equal(expected[name]), name
            train(engine, own_share(1, "llama"))
            engine.weights.load(folder)
    return problems


class Normed(nn.Module):
    """Has buffers that are saved, of two dtypes, and one that is not."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x):
        return self.norm(x).square().mean()


def buffers(backend):
    """Rank 0's are on every rank then, and the forward computes with them."""
    values = {
        "norm.weight": torch.full((4,), 2.0),
        "norm.bias": torch.ones(4),
        "norm.running_mean": torch.arange(4.0),
        "norm.running_var": torch.full((4,), 4.0 - 1e-5),
        "norm.num_batches_tracked": torch.tensor(7),
    }
    with unishard.prepare(Normed(), checked(backend)) as engine:
        refused_names = refused(engine.weights.load, {**values, "scratch": torch.ones(2)})
        engine.weights.load(values if my_rank() == 0 else None)
        found = engine.weights.state_dict(all_ranks=True)
        assert found.keys() == values.keys() == dict(engine.weights.stream()).keys()
        for name, value in values.items():
            assert found[name].equal(value), name
            assert found[name].dtype == value.dtype, name
        engine.eval()
        with torch.no_grad():
            output = engine(torch.arange(4.0).expand(2, 4) + 2)  # a unit away from the mean: 2 * (2 / 2) + 1
        assert_close(output.cpu(), torch.tensor(9.0))
    return refused_names


def empty_group(backend, strategy):
    """The Trainer makes a group without decay, which has no parameter under PEFT."""
    model = mlp()
    optimizer = torch.optim.AdamW([{"params": [*model.parameters()]}, {"params": [], "weight_decay": 0.0}], lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    cfg = checked(backend, strategy, optimizer=None)
    with tempfile.TemporaryDirectory() as own, unishard.prepare(model, cfg, optimizer, scheduler) as engine:
        folders = [own]
        dist.broadcast_object_list(folders)
        done = train(engine, own_share(2))
        assert len(optimizer.param_groups) == 2
        engine.load(engine.save(folders[0]))
        train(engine, own_share(1))
    with prepare(checked(backend, strategy, optimizer={"name": "adamw", "lr": 0.1, "weight_decay": 0.01})) as engine:
        again = train(engine, own_share(2))
        assert_close([loss for loss, _ in again], [loss for loss, _ in done], rtol=1e-6, atol=0)


def seed(backend):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    with unishard.prepare(mlp(), checked(backend), reseed=False):
        return torch.equal(before, torch.get_rng_state())


def again(backend, strategy, precision):
    """Evaluated, trained, and trained on the other engine, with one model."""
    data, other = own_share(2, "llama"), next(each for each in BACKENDS if each != backend)
    cfg = {name: checked(name, strategy, precision=precision, activation_checkpointing="full") for name in BACKENDS}
    with unishard.prepare(llama(), cfg[backend]) as engine:
        expected = train(engine, data)
        weights = engine.weights.state_dict(all_ranks=True)
    model = llama()
    before = {name: type(module) for name, module in model.named_modules()}
    with torch.no_grad():
        loss = model(**data[0]).loss
    engine = unishard.prepare(model, checked(backend, strategy), train=False)
    engine.framework.routed()
    with torch.no_grad():
        assert_close(engine(**data[0]).loss.cpu(), loss, rtol=1e-5, atol=0)
    assert engine.framework.release() is model
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert model.state_dict().keys() == weights.keys()
    assert_close(model(**data[0]).loss, loss, rtol=1e-6, atol=0, check_device=False)
    engine = unishard.prepare(model, cfg[backend])
    assert [step.grad_norm for _, step in train(engine, data)] == [step.grad_norm for _, step in expected]
    engine.framework.release()
    for name, value in model.state_dict().items():
        assert value.cpu().equal(weights[name]), name
    with unishard.prepare(model, cfg[other]) as engine:
        found = train(engine, data)
    with pytest.raises(unishard.ModelError, match=r"call engine.framework.release\(\) on its engine in place of close"):
        unishard.prepare(model, cfg[other])
    fresh = llama()
    fresh.load_state_dict(weights)
    with unishard.prepare(fresh, cfg[other]) as engine:
        assert [loss for loss, _ in train(engine, data)] == [loss for loss, _ in found]
    if precision == "bf16":
        rounded = unishard.prepare(llama(), cfg[backend], train=False)
        assert "was rounded to bf16 by prepare(..., train=False)" in refused(rounded.framework.release)
        rounded.close()


WINDOWED = tuple(cell for cell in SPANNING if DEEP or cell not in FEWER_SPANNING)
SCENARIOS = (
    *((windows, cell) for cell in WINDOWED),
    *((going_on, cell) for cell in FEWER_SPANNING),
    *((wrong_windows, (backend,)) for backend in BACKENDS),
    *((routed, pair) for pair in FEWER),
    *((generated, (backend,)) for backend in BACKENDS),
    *((buffers, (backend,)) for backend in BACKENDS),
    *((empty_group, pair) for pair in FEWER),
    *((seed, (backend,)) for backend in BACKENDS),
    *((again, cell) for cell in FEWER_SPANNING),
)


def of(scenario, *arguments):
    return values(play(SCENARIOS)[scenario, arguments])


@pytest.mark.parametrize("cell", WINDOWED, ids="-".join)
def test_windows_that_the_caller_ends_are_those_that_a_loop_is_given(cell):
    of(windows, *cell)


@pytest.mark.parametrize("cell", FEWER_SPANNING, ids="-".join)
def test_a_window_goes_on_where_a_forward_comes_in_place_of_the_step(cell):
    for problem in of(going_on, *cell):
        assert "a window goes on after its gradients, or their norm, were read" in problem


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_whose_end_is_known_is_not_told_again(backend):
    (after_backward, known, mixed, late), _ = of(wrong_windows, backend)
    assert "set_boundary was called after backward; call engine.step() first" in after_backward
    assert "set_boundary was called after 1 of 2 micro-batches of a window" in known
    assert "called without num_items and by framework.scaled_backward in one accumulation window" in mixed
    assert "after a forward that was told otherwise" in late


@pytest.mark.parametrize("pair", FEWER, ids="-".join)
def test_calls_of_a_routed_model_run_through_the_engine(pair):
    assert all(of(routed, *pair))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_routed_model_generates(backend):
    assert of(generated, backend) == [2, 2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_buffers_that_are_saved_are_loaded_with_the_weights(backend):
    for problem in of(buffers, backend):
        assert "scratch is not in the model" in problem


@pytest.mark.parametrize("pair", FEWER, ids="-".join)
def test_an_empty_group_changes_nothing(pair):
    of(empty_group, *pair)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_random_state_is_the_callers(backend):
    assert all(of(seed, backend))


@pytest.mark.parametrize("cell", FEWER_SPANNING, ids="-".join)
def test_all_weights_go_out_and_in(cell, tmp_path):
    problems, other = values(play(((whole, (*cell, str(tmp_path))),))[whole, (*cell, str(tmp_path))])
    assert problems == other
    assert "model.norm.weight has the shape (3,), not" in problems
    assert "model.norm.weight is missing; pass weights of this model, or strict=False" in problems


@pytest.mark.parametrize("cell", FEWER_SPANNING, ids="-".join)
def test_a_released_model_is_plain_and_can_be_prepared_again(cell):
    of(again, *cell)
