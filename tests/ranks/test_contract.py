"""The training loop's contract: the same on every engine, on every rank, in every order of calls."""

from __future__ import annotations

import math

import pytest
import torch
from harness import (
    FEWER,
    PAIRS,
    Scenario,
    curve,
    in_ranks,
    my_rank,
    own_share,
    play,
    prepare,
    refused,
    train,
    update,
    values,
)
from harness.training import BACKENDS, EACH, SPANNING, config, everyones

import unishard
from unishard.testing import conformance, oracle
from unishard.testing.models import MODELS

# -- training --------------------------------------------------------------------------------------

CLIPS = (..., 0.2, None, 0.4, ..., None)


def clip_by_step(backend, strategy):
    with prepare(config(backend, strategy, training={"gradient_clipping": 0.7})) as engine:
        done = []
        for clip, batch in zip(CLIPS, engine.batches(own_share(len(CLIPS))), strict=True):
            loss = engine(**batch).loss
            engine.backward(loss)
            done.append((engine.mean(loss), engine.step() if clip is ... else engine.step(clip_grad_norm=clip)))
    return curve(done)


def clip_by_step_without_one_in_the_config(backend, strategy):
    with prepare(config(backend, strategy)) as engine:
        return curve(train(engine, own_share(4), clip_grad_norm=0.3))


def short_window(backend, strategy, last_window):
    """Two epochs of 5 micro-batches in windows of 3."""
    with prepare(
        config(backend, strategy, training={"gradient_accumulation_steps": 3, "last_window": last_window})
    ) as engine:
        return [train(engine, own_share(5)) for _ in range(2)]


def bad_gradient_on_one_rank(backend, strategy, precision):
    """Five windows of 2 under a falling rate; in the third, rank 1's first gradient is infinite."""
    schedule = {"name": "cosine", "warmup_steps": 1, "total_steps": 6}
    cfg = config(
        backend, strategy, precision=precision, scheduler=schedule, training={"gradient_accumulation_steps": 2}
    )
    rank = unishard.Topology.from_environment().rank
    done = []
    with prepare(cfg) as engine:
        for turn, batch in enumerate(engine.batches(own_share(10))):
            loss = engine(**batch).loss
            engine.backward(loss * math.inf if turn == 4 and rank == 1 else loss)
            done.append((engine.mean(loss), engine.step()))
        return done, engine.lr


SOME = {backend: [strategy for engine, strategy in PAIRS if engine == backend] for backend in BACKENDS}


def training(backend):
    """All of an engine."""
    return (
        *((clip_by_step, (backend, strategy)) for strategy in SOME[backend]),
        *((clip_by_step_without_one_in_the_config, (backend, strategy)) for strategy in SOME[backend]),
        *((short_window, (*pair, last)) for pair in FEWER if pair[0] == backend for last in ("step", "drop")),
        *((bad_gradient_on_one_rank, cell) for cell in SPANNING if cell[0] == backend),
    )


def trained(backend, function, *arguments):
    """The value that both ranks returned."""
    by_rank = values(play(training(backend))[function, (backend, *arguments)])
    assert repr(by_rank[0]) == repr(by_rank[1])  # NaN is not equal to itself
    return by_rank[0]


def expect(windows, cfg, clips=None):
    return oracle.train(MODELS["mlp"].build(), windows, cfg, world=2, clips=clips)


def losses_within(backend, strategy, precision):
    cell = conformance.Cell("mlp", strategy, 1, None, precision, 2)
    declared = conformance.tolerance(backend, cell) is not conformance.TOLERANCES[precision]
    return conformance.tolerance(backend, cell).losses if declared else {"fp32": 2e-6, "bf16": 1e-4}[precision]


def assert_curve(found, wanted, rel=2e-6):
    assert found.losses == pytest.approx(wanted.losses, rel=rel)
    assert found.norms == pytest.approx(wanted.norms, rel=10 * rel)
    assert found.lrs == pytest.approx(wanted.lrs, rel=1e-12)


@pytest.mark.parametrize(("backend", "strategy"), PAIRS)
def test_clipping_given_to_a_step_counts_for_that_step_and_none_turns_it_off(backend, strategy):
    windows = [everyones(turn, turn + 1, world=2) for turn in range(len(CLIPS))]
    clips = [0.7 if clip is ... else clip for clip in CLIPS]
    wanted = expect(windows, config("fsdp"), clips)
    assert min(wanted.norms) > 0.7
    assert_curve(trained(backend, clip_by_step, strategy), wanted)
    wanted = expect(windows[:4], config("fsdp"), [0.3] * 4)
    assert_curve(trained(backend, clip_by_step_without_one_in_the_config, strategy), wanted)


@pytest.mark.parametrize(("backend", "strategy"), FEWER)
def test_the_last_window_is_averaged_over_what_is_there(backend, strategy):
    epochs = trained(backend, short_window, strategy, "step")
    full, rest = everyones(0, 3, world=2), everyones(3, 5, world=2)
    wanted = expect([full, rest, full, rest], config("fsdp"))
    assert_curve(curve([*epochs[0], *epochs[1]]), wanted)
    assert [step.updated for _, step in epochs[0]] == [False, False, True, False, True]


@pytest.mark.parametrize(("backend", "strategy"), FEWER)
def test_the_last_window_is_left_out_when_asked(backend, strategy):
    epochs = trained(backend, short_window, strategy, "drop")
    assert [len(epoch) for epoch in epochs] == [3, 3]
    full = everyones(0, 3, world=2)
    assert_curve(curve([*epochs[0], *epochs[1]]), expect([full, full], config("fsdp")))


@pytest.mark.parametrize("backend", BACKENDS)
def test_inside_a_window_a_step_says_that_nothing_moved(backend):
    inside, at_the_end = trained(backend, short_window, "full_shard", "drop")[0][1:]
    assert inside[1] == unishard.Step(updated=False, grad_norm=None, lr=0.1, skipped=False)
    assert at_the_end[1]._replace(grad_norm=None) == unishard.Step(updated=True, grad_norm=None, lr=0.1, skipped=False)
    assert type(at_the_end[1].grad_norm) is float


@pytest.mark.parametrize(("backend", "strategy", "precision"), SPANNING)
def test_an_infinite_gradient_on_one_rank_skips_the_update_everywhere_and_leaves_no_trace(backend, strategy, precision):
    done, next_lr = trained(backend, bad_gradient_on_one_rank, strategy, precision)
    steps = [step for _, step in done]
    assert [step.skipped for step in steps] == [False] * 5 + [True] + [False] * 4
    assert [step.updated for step in steps] == [False, True, False, True, False, False, False, True, False, True]
    assert not math.isfinite(steps[5].grad_norm)
    cfg = config("fsdp", precision=precision, scheduler={"name": "cosine", "warmup_steps": 1, "total_steps": 6})
    kept = [everyones(turn, turn + 2, world=2) for turn in (0, 2, 6, 8)]
    wanted = expect(kept, cfg)
    assert_curve(curve(done), wanted, rel=losses_within(backend, strategy, precision))
    assert next_lr == pytest.approx(0.1 * oracle.rate(cfg.scheduler, 4), rel=1e-12)


@in_ranks(cells=FEWER)
def test_a_validation_loop_in_the_middle_of_a_window_sees_every_batch_and_does_not_disturb_training(backend, strategy):
    seen = []

    def validate(engine, number):
        if number == 2:
            engine.eval()
            with torch.no_grad():
                seen.extend(engine(**other).loss for other in engine.batches(own_share(5)))
            engine.train()

    cfg = config(backend, strategy, training={"gradient_accumulation_steps": 2, "last_window": "drop"})
    Scenario(micro_batches=8, disturb=validate).judge(cfg)
    assert len(seen) == 5


# -- the rest of the engine's surface --------------------------------------------------------------


@in_ranks(cells=EACH, in_turn=True)
def test_the_engine_is_a_context_manager_that_closes_and_hides_no_error(backend):
    with prepare(config(backend, "no_shard")) as engine:
        pass
    assert "closed engine" in refused(engine.step)
    with pytest.raises(KeyError, match="mine"), prepare(config(backend, "no_shard")):
        raise KeyError("mine")


@in_ranks(cells=EACH, in_turn=True)
def test_mean_is_over_the_ranks_and_leaves_its_argument_alone(backend):
    rank = my_rank()
    with prepare(config(backend, "no_shard")) as engine:
        tensor = torch.tensor([rank + 1.0], requires_grad=True)
        means = engine.mean(rank), engine.mean(tensor), engine.mean(torch.tensor(float(rank), dtype=torch.bfloat16))
    assert means == (0.5, 1.5, 0.5)
    assert tensor.item() == rank + 1


@in_ranks(cells=EACH, in_turn=True)
def test_the_module_is_the_users_own_and_the_optimizer_shows_the_live_rate(backend):
    model = MODELS["mlp"].build()
    names = [name for name, _ in model.named_parameters()]
    with unishard.prepare(model, config(backend)) as engine:
        assert isinstance(engine.module, type(MODELS["mlp"].build()))
        assert [name for name, _ in engine.module.named_parameters()] == names
        assert (engine.device.type, engine.lr) == ("cpu", 0.1)
        assert [group["lr"] for group in engine.optimizer.param_groups] == [0.1]


@in_ranks(cells=EACH, in_turn=True)
def test_a_loop_by_hand_has_full_windows(backend):
    """After a short one was left at its end."""
    with prepare(config(backend, "no_shard", training={"gradient_accumulation_steps": 3})) as engine:
        for batch in engine.batches(own_share(1)):
            update(engine, batch)
            break
        by_hand = [update(engine, batch).updated for batch in own_share(3)]
    assert by_hand == [False, False, True]
