"""Parameters that every rank holds whole (`sharding.replicate`), beyond what the conformance suite measures: what they
are between calls, gradients, edits, checkpoints and refusals."""

from __future__ import annotations

import re

import pytest
import torch
from harness import BACKENDS, OTHER, checked, config, my_rank, own_share, play, raised, train, update, values
from torch import nn

import unishard
from unishard.config import Sharding
from unishard.contract.kit.replicated import find_replicated
from unishard.testing.features.conditional import CONDITIONAL_MODELS
from unishard.testing.models import MODELS, batch, batch_of, llama
from unishard.tools.plan.model import PlannedModel

NAMES = ["norm", "head"]
STRATEGIES = ("shard_grad_op", "full_shard")


def whole(engine, patterns=NAMES):
    """What is not an ordinary tensor of the shape that it has in the model, in the compute dtype."""
    plain = dict(MODELS["mlp"].build().named_parameters())
    return [
        (name, type(each).__name__, tuple(each.shape), str(each.dtype))
        for name, each in engine.module.named_parameters()
        if any(re.search(pattern, name) for pattern in patterns)
        and not (
            isinstance(each, nn.Parameter)
            and not hasattr(each, "to_local")
            and each.untyped_storage().nbytes() >= each.numel() * each.itemsize
            and each.shape == plain[name].shape
        )
    ]


def cfg_of(backend, strategy="full_shard", precision="fp32", **sections):
    sharding = {"strategy": strategy, "replicate": NAMES}
    return config(backend, sharding, precision=precision, **sections)


def between_calls(backend, strategy, precision):
    """What is not whole after each call, and whether all ranks have the same."""
    found, dtypes = [], set()
    two = {"gradient_accumulation_steps": 2}
    with unishard.prepare(MODELS["mlp"].build(), cfg_of(backend, strategy, precision, training=two)) as engine:
        for micro_batch in own_share(6):
            found += whole(engine)
            loss = engine(**micro_batch).loss
            found += whole(engine)
            engine.backward(loss)
            found += whole(engine)
            engine.step()
        with engine.weights.unsharded(["blocks.0.norm.weight", "inp.weight"]) as full:
            engine.backward(engine(**micro_batch).loss + full["blocks.0.norm.weight"].float().square().sum())
            found += whole(engine)
        engine.step()
        engine.discard()
        found += whole(engine)
        engine.weights.write("head.weight", torch.full((11, 23), 0.25))
        found += whole(engine)
        engine.weights.load(engine.weights.state_dict())
        found += whole(engine)
        named = dict(engine.module.named_parameters())
        dtypes = {str(named[name].dtype) for name in ("head.weight", "blocks.0.norm.bias")}
        return found, sorted(dtypes), named["head.weight"].float().tolist()


def gradients(backend, precision):
    """The gradients of a window as the module shows them after its last backward, as they are read, and as plain torch
    has them; and one that is written."""
    model = MODELS["mlp"].build()
    with unishard.prepare(MODELS["mlp"].build(), cfg_of(backend, precision=precision)) as engine:
        engine.backward(engine(**own_share(1)[0]).loss)
        shown = dict(engine.module.named_parameters())["head.bias"].grad.float().clone()
        read = engine.gradients.read("head.bias")
        norms = engine.gradients.norms()["head.bias"]
        engine.gradients.write("head.bias", torch.zeros(11))
        before = engine.weights.read("head.bias")
        engine.step()
        still = torch.equal(before, engine.weights.read("head.bias"))
    for rank in range(2):
        model(**batch("mlp", 2 * rank, 2)).loss.div(2).backward()
    wanted = model.head.bias.grad
    return [float((each - wanted).abs().max() / wanted.abs().max()) for each in (shown, read)], norms, still


def several_backwards(backend):
    """The norms of updates whose loss is sent back in parts, and in one."""
    norms = []
    for calls in (1, 2):
        training = {"gradient_accumulation_steps": 2, "backward_calls": calls}
        with unishard.prepare(MODELS["mlp"].build(), cfg_of(backend, training=training)) as engine:
            for micro_batch in own_share(4):
                for weight in (1.0,) if calls == 1 else (0.25, 0.75):
                    engine.backward(weight * engine(**micro_batch).loss)
                if (norm := engine.step().grad_norm) is not None:
                    norms.append(norm)
    return norms


def overflowing(backend):
    """In fp16 with a scale that no gradient bears: what is not whole after skipped updates, and whether any was made."""
    sections = {"precision": {"compute": "fp16", "initial_loss_scale": 2.0**60}}
    sharding = {"strategy": "full_shard", "replicate": NAMES}
    with unishard.prepare(MODELS["mlp"].build(), config(backend, sharding, **sections)) as engine:
        before = engine.weights.read("head.weight")
        skipped = [update(engine, micro_batch).skipped for micro_batch in own_share(2)]
        return skipped, whole(engine), torch.equal(before, engine.weights.read("head.weight"))


def skipped_by_ranks(backend):
    """With the comparison of calls, a tower that rank 0 alone runs."""
    test = CONDITIONAL_MODELS["pictures"]
    sharding = {"strategy": "full_shard", "replicate": ["tower"]}
    with unishard.prepare(test.build(), checked(backend, sharding)) as engine:
        units = engine.weights.placement().units
        for turn in range(3):
            micro_batch = batch_of(test, 2 * turn + 40 * my_rank(), 2)
            micro_batch["picture"] = torch.tensor([int(my_rank() == 0), 0])
            norm = update(engine, micro_batch).grad_norm
        return units, norm, engine.weights.read("tower.layers.0.up.weight").sum().item()


class Bare(nn.Module):
    """Units that are bare layers, beside a tower that a rank may skip."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.inp, self.out = nn.Linear(4, 8), nn.Linear(8, 5)
        self.tower = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x, use):
        x = self.inp(x)
        return self.out(x + self.tower(x) if use else x).square().mean()


def bare_batch(turn, rank):
    """Rank 1 skips the tower from the second update on."""
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * turn + rank)), rank == 0 or not turn


def skipped_beside_bare_layers(backend):
    """Losses and norms; without the comparison of calls."""
    found = []
    with unishard.prepare(Bare(), config(backend, {"strategy": "full_shard", "replicate": ["tower"]})) as engine:
        for turn in range(3):
            loss = engine(*bare_batch(turn, my_rank()))
            engine.backward(loss)
            found.append((engine.mean(loss), engine.step().grad_norm))
    return found


def frozen_later(backend):
    """A replicated parameter that is frozen for one window stays as it is."""
    with unishard.prepare(MODELS["mlp"].build(), cfg_of(backend, precision="bf16")) as engine:
        update(engine, own_share(1)[0])
        engine.weights.set_trainable("head", False)
        before = engine.weights.read("head.weight")
        update(engine, own_share(1)[0])
        same = torch.equal(before, engine.weights.read("head.weight"))
        engine.weights.set_trainable("head", True)
        update(engine, own_share(1)[0])
        return same, torch.equal(before, engine.weights.read("head.weight"))


def inferred(backend):
    """The logits of a model that does not train, and what is not whole."""
    with unishard.prepare(MODELS["mlp"].build(), cfg_of(backend), train=False) as engine:
        found = whole(engine)
        logits = engine(**batch("mlp", 0, 2)).logits
        plain = MODELS["mlp"].build()(**batch("mlp", 0, 2)).logits
        engine.weights.write("head.bias", torch.zeros(11))
        return found + whole(engine), float((logits - plain).abs().max())


def kept_in_groups(backend):
    """The losses with smaller groups after forward."""
    found = []
    for names in ([], ["norm", "head"]):
        sharding = {"strategy": "full_shard", "reshard_after_forward": 2, "replicate": names}
        with unishard.prepare(MODELS["mlp"].build(), config(backend, sharding)) as engine:
            found.append([loss for loss, _ in train(engine, own_share(4))])
    return found


def moved(backend, root):
    """The losses of a run that is saved, and goes on, on the other engine, without replicated parameters; and of one
    that does not stop."""
    losses = []
    for first, second, names in ((backend, backend, NAMES), (backend, OTHER[backend], [])):
        optimizer, data = {"name": "adamw", "lr": 1e-2}, own_share(4)
        average = []
        with unishard.prepare(MODELS["mlp"].build(), cfg_of(first, precision="bf16", optimizer=optimizer)) as engine:
            engine.weights.average(0.5)
            train(engine, data[:2])
            engine.save(f"{root}/{second}")
        sharding = {"strategy": "full_shard", "replicate": names}
        cfg = config(second, sharding, precision="bf16", optimizer=optimizer)
        with unishard.prepare(MODELS["mlp"].build(), cfg) as engine:
            moving = engine.weights.average(0.5)
            engine.load(f"{root}/{second}")
            average.append(moving.read("head.weight"))
            losses.append([loss for loss, _ in train(engine, data[2:])])
            average.append(moving.read("head.weight"))
        losses[-1] += [float(each.double().norm()) for each in average]
    return losses


SCENARIOS = (
    *(
        (between_calls, (backend, strategy, precision))
        for backend, turn in zip(BACKENDS, (0, 1), strict=True)
        for strategy, precision in zip(STRATEGIES, ("fp32", "bf16")[:: 1 - 2 * turn], strict=True)
    ),
    *((gradients, (backend, "fp32")) for backend in BACKENDS),
    *(
        (scenario, (backend,))
        for scenario in (
            several_backwards,
            overflowing,
            skipped_by_ranks,
            skipped_beside_bare_layers,
            frozen_later,
            inferred,
        )
        for backend in BACKENDS
    ),
)


def played(scenario, *cell):
    return values(play(SCENARIOS)[scenario, cell])


@pytest.mark.parametrize("cell", [cell for scenario, cell in SCENARIOS if scenario is between_calls], ids="-".join)
def test_they_are_whole_between_all_calls_and_the_same_on_all_ranks(cell):
    first, second = played(between_calls, *cell)
    assert first == second
    assert first[0] == []
    assert first[1] == [{"fp32": "torch.float32", "bf16": "torch.bfloat16"}[cell[2]]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_their_gradients_are_the_means_over_the_ranks(backend):
    for deviations, norm, still in played(gradients, backend, "fp32"):
        assert max(deviations) < 1e-6
        assert norm > 0
        assert still


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loss_may_be_sent_back_in_parts(backend):
    for norms in played(several_backwards, backend):
        assert norms[2:] == pytest.approx(norms[:2], rel=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_skipped_update_changes_none_of_them(backend):
    assert played(overflowing, backend) == [([True, True], [], True)] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_may_skip_a_replicated_tower_which_has_no_units(backend):
    first, second = played(skipped_by_ranks, backend)
    assert first == second
    assert not [name for name in first[0] if name.startswith("tower")]


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_may_skip_a_replicated_tower_beside_bare_layers(backend):
    model = Bare()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    expected = []
    for turn in range(3):
        losses = [model(*bare_batch(turn, rank)) for rank in range(2)]
        (sum(losses) / 2).backward()
        norm = torch.nn.utils.get_total_norm([each.grad for each in model.parameters()])
        expected.append((sum(losses).item() / 2, norm.item()))
        optimizer.step()
        optimizer.zero_grad()
    for found in played(skipped_beside_bare_layers, backend):
        for (loss, norm), (wanted, wanted_norm) in zip(found, expected, strict=True):
            assert loss == pytest.approx(wanted, rel=1e-6)
            assert norm == pytest.approx(wanted_norm, rel=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_that_is_frozen_for_a_window_keeps_its_values(backend):
    assert played(frozen_later, backend) == [(True, False)] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_that_does_not_train_has_them_too(backend):
    for found, deviation in played(inferred, backend):
        assert found == []
        assert deviation < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_smaller_groups_after_forward_train_the_same(backend):
    for without, with_them in values(play(((kept_in_groups, (backend,)),), 4)[kept_in_groups, (backend,)]):
        assert with_them == pytest.approx(without, rel=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_moves_to_the_other_engine_which_shards_them(backend, tmp_path):
    root = str(tmp_path)
    for stayed, went in values(play(((moved, (backend, root)),))[moved, (backend, root)]):
        assert went == pytest.approx(stayed, rel=4e-4)


# -- refusals --------------------------------------------------------------------------------------


def refused(pattern):
    with unishard.prepare(MODELS["mlp"].build(), config("fsdp", {"strategy": "full_shard", "replicate": [pattern]})):
        pass


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("haed", "sharding.replicate: 'haed' matches no parameter; did you mean 'head'? Its names are inp.weight"),
        ("router", "sharding.replicate: 'router' matches no parameter; write part of a name, such as inp.weight"),
        (".", "sharding.replicate: matches every parameter of Mlp; set sharding.strategy to no_shard instead"),
    ],
)
def test_a_pattern_must_match_something_and_leave_something(pattern, said):
    with pytest.raises(unishard.ConfigError) as raised_error:
        find_replicated(MODELS["mlp"].build(), Sharding(replicate=[pattern]))
    assert said in str(raised_error.value)


def test_the_ranks_raise_it():
    assert "did you mean 'head'?" in raised(refused, "haed")


def test_without_shards_there_is_nothing_to_replicate():
    assert find_replicated(MODELS["mlp"].build(), Sharding(strategy="no_shard", replicate=["."]))
    for backend in BACKENDS:
        cfg = config(backend, {"strategy": "no_shard", "replicate": ["norm"]})
        line = next(each for each in unishard.translate(cfg).report if each.path == "sharding.replicate")
        assert "nothing to replicate" in line.note


def test_what_explain_prints_for_a_model_has_their_names(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = PlannedModel(
        "unishard.testing.models:mlp", config("fsdp", {"strategy": "full_shard", "replicate": ["head"]})
    )
    assert model.native("fsdp", unishard.Topology(2, 2))["ignored_params"] == ["head.weight", "head.bias"]


def test_one_name_of_a_tied_weight_is_enough():
    assert find_replicated(llama(tie_word_embeddings=True), Sharding(replicate=["lm_head"])) == (
        "model.embed_tokens.weight",
    )
