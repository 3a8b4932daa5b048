"""Long sequences beside what else a config asks for, and in checkpoints."""

from __future__ import annotations

import pytest
from harness import BACKENDS, in_ranks, refused
from harness.training import DEEP, OTHER
from sequence_models import build, data_for
from test_sequence import UPDATES, assert_equal, compared, configured, expected, trained
from torchdata.stateful_dataloader import StatefulDataLoader

import unishard
from unishard.testing import oracle


def resumed(backend: str, then: int, now: int, world: int, root: str) -> None:
    """Two updates with one size, and two more with another one on the other engine."""
    cfg = configured(backend, "full_shard", size=then).override(
        f"training.gradient_accumulation_steps={4 * then // world}"
    )
    with unishard.prepare(build("windows"), cfg) as engine:
        first = trained(engine, cfg, "windows", 2)
        engine.save(root)
    cfg = configured(OTHER[backend], "full_shard", size=now).override(
        f"training.gradient_accumulation_steps={4 * now // world}"
    )
    with unishard.prepare(build("windows"), cfg) as engine:
        engine.load(root, verify="bits")
        second = trained(engine, cfg, "windows", 2)
    reference, _ = expected(configured(backend, size=1), "windows", 2, updates=4)
    assert first.losses + second.losses == pytest.approx(reference.losses, rel=1e-6)
    assert first.norms + second.norms == pytest.approx(reference.norms, rel=1e-5)


@in_ranks(
    cells=tuple((backend, *sizes) for backend in BACKENDS for sizes in ((2, 1), (1, 2))[: 1 + DEEP]), in_turn=True
)
def test_another_size_and_engine_at_a_resume(backend, then, now, root):
    resumed(backend, then, now, 2, root)


@in_ranks(
    world=4,
    cells=tuple((backend, *sizes) for backend in BACKENDS for sizes in ((4, 2), (2, 4))[: 1 + DEEP]),
    in_turn=True,
)
def test_another_size_and_engine_at_a_resume_of_four_ranks(backend, then, now, root):
    resumed(backend, then, now, 4, root)


@in_ranks(
    world=4, cells=tuple((backend, strategy) for backend in BACKENDS for strategy in ("hybrid_shard",)), in_turn=True
)
def test_hybrid_groups(backend, strategy):
    compared(configured(backend, {"strategy": strategy, "group_size": 2}), "llama", readers=2)


@in_ranks(cells=tuple((backend,) for backend in BACKENDS))
def test_replicated_parameters(backend):
    """The first forward changes their values for a while, and gives them back."""
    compared(configured(backend, "full_shard").override("sharding.replicate=[norm]"), "llama", readers=1)


@in_ranks(cells=tuple((backend,) for backend in BACKENDS), in_turn=True)
def test_a_released_model_is_as_before(backend):
    model = build("windows")
    batch = {key: value[None] for key, value in data_for("windows")[0].items()}
    before = model(**batch).loss.item()
    with unishard.prepare(model, configured(backend)) as engine:
        engine.framework.release()
    assert model.config._attn_implementation == "sdpa"
    assert model(**batch).loss.item() == before


@in_ranks(cells=tuple((backend,) for backend in BACKENDS), in_turn=True)
def test_a_loader_that_knows_its_own_position_is_not_given_that_of_another_share(backend, root):
    """Both ranks have read one share; without groups there would be two."""
    cfg = configured(backend).override("training.gradient_accumulation_steps=1")
    with unishard.prepare(build("windows"), cfg) as engine:
        for batch in engine.batches(StatefulDataLoader(data_for("windows"), batch_size=2)):
            engine.backward(engine(**batch).loss)
            engine.step()
            break
        engine.save(root)
    messages = {}
    for size in (2, 1):
        with unishard.prepare(build("windows"), cfg.override(f"parallel.sequence={size}")) as engine:
            engine.load(root)
            loader = StatefulDataLoader(data_for("windows"), batch_size=2)
            messages[size] = refused(lambda engine=engine, loader=loader: next(iter(engine.batches(loader))))
    assert messages[2] == "nothing"
    assert "cannot be resumed" in messages[1]


PARTS = 2


@in_ranks(
    cells=(("fsdp", "ulysses"), ("deepspeed", "allgather"), *(("fsdp", "allgather"), ("deepspeed", "ulysses")) * DEEP)
)
def test_parts_of_a_micro_batch_whose_samples_are_shared(backend, method):
    """`training.backward_calls`: both halves of the samples have a forward and a backward of their own."""
    training = {"micro_batch_size": 2 * PARTS, "backward_calls": PARTS, "gradient_clipping": 0.5}
    cfg = configured(backend, "full_shard", method, training=training)
    losses, norms = [], []
    with unishard.prepare(build("llama"), cfg) as engine:
        for batch in engine.batches(unishard.dataloader(data_for("llama"), cfg, shuffle=False)):
            total = 0.0
            for part in range(PARTS):
                loss = engine(**{key: value[2 * part : 2 * part + 2] for key, value in batch.items()}).loss / PARTS
                engine.backward(loss)
                total += engine.mean(loss)
            losses.append(total)
            norms.append(engine.step().grad_norm)
            if len(losses) == UPDATES:
                break
    reference, _ = expected(cfg, "llama", readers=1)
    assert_equal(oracle.Curve(tuple(losses), tuple(norms), reference.lrs), reference)
