"""Parameters that every rank holds whole (`sharding.replicate`), beyond what the conformance suite measures: what they
are between calls, gradients, edits, checkpoints and refusals."""

from __future__ import annotations

import re

import pytest
import torch
from harness import (
    BACKENDS,
    EACH,
    OTHER,
    Scenario,
    checked,
    config,
    in_ranks,
    losses_of,
    my_rank,
    of_all_ranks,
    own_share,
    refused,
    update,
)
from torch import nn

import unishard
from unishard.config import Sharding
from unishard.contract.kit.replicated import find_replicated
from unishard.testing.features.conditional import CONDITIONAL_MODELS
from unishard.testing.models import MODELS, batch, batch_of, llama
from unishard.tools.plan.model import PlannedModel

NAMES = ["norm", "head"]


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


CELLS = tuple(
    (backend, strategy, precision)
    for backend, precisions in zip(BACKENDS, (("fp32", "bf16"), ("bf16", "fp32")), strict=True)
    for strategy, precision in zip(("shard_grad_op", "full_shard"), precisions, strict=True)
)


@in_ranks(cells=CELLS)
def test_they_are_whole_between_all_calls_and_the_same_on_all_ranks(backend, strategy, precision):
    found, two = [], {"gradient_accumulation_steps": 2}
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
        mine = [named[name].detach().clone() for name in ("head.weight", "blocks.0.norm.bias")]
        everyones = of_all_ranks(mine)
    assert found == []
    assert {each.dtype for each in mine} == {{"fp32": torch.float32, "bf16": torch.bfloat16}[precision]}
    assert all(torch.equal(one, other) for one, other in zip(*everyones, strict=True))


@in_ranks(cells=EACH)
def test_their_gradients_are_the_means_over_the_ranks(backend):
    """As the module shows them after the last backward of a window, and as they are read; one that is written counts."""
    model = MODELS["mlp"].build()
    for rank in range(2):
        model(**batch("mlp", 2 * rank, 2)).loss.div(2).backward()
    wanted = model.head.bias.grad
    with unishard.prepare(MODELS["mlp"].build(), cfg_of(backend)) as engine:
        engine.backward(engine(**own_share(1)[0]).loss)
        shown = dict(engine.module.named_parameters())["head.bias"].grad.float().clone()
        read, norm = engine.gradients.read("head.bias"), engine.gradients.norms()["head.bias"]
        engine.gradients.write("head.bias", torch.zeros(11))
        before = engine.weights.read("head.bias")
        engine.step()
        after = engine.weights.read("head.bias")
    assert max(float((each - wanted).abs().max() / wanted.abs().max()) for each in (shown, read)) < 1e-6
    assert norm > 0
    assert torch.equal(before, after)


@in_ranks(cells=EACH)
def test_a_loss_may_be_sent_back_in_parts(backend):
    norms = []
    for parts in ((1.0,), (0.25, 0.75)):
        training = {"gradient_accumulation_steps": 2, "backward_calls": len(parts)}
        with unishard.prepare(MODELS["mlp"].build(), cfg_of(backend, training=training)) as engine:
            for micro_batch in own_share(4):
                for weight in parts:
                    engine.backward(weight * engine(**micro_batch).loss)
                if (norm := engine.step().grad_norm) is not None:
                    norms.append(norm)
    assert norms[2:] == pytest.approx(norms[:2], rel=1e-5)


@in_ranks(cells=EACH)
def test_a_skipped_update_changes_none_of_them(backend):
    """In fp16 with a scale that no gradient bears."""
    cfg = cfg_of(backend, precision={"compute": "fp16", "initial_loss_scale": 2.0**60})
    with unishard.prepare(MODELS["mlp"].build(), cfg) as engine:
        before = engine.weights.read("head.weight")
        skipped = [update(engine, micro_batch).skipped for micro_batch in own_share(2)]
        found, after = whole(engine), engine.weights.read("head.weight")
    assert skipped == [True, True]
    assert found == []
    assert torch.equal(before, after)


@in_ranks(cells=EACH)
def test_ranks_may_skip_a_replicated_tower_which_has_no_units(backend):
    """With the comparison of calls; rank 0 alone runs the tower."""
    test = CONDITIONAL_MODELS["pictures"]
    cfg = checked(backend, {"strategy": "full_shard", "replicate": ["tower"]})
    with unishard.prepare(test.build(), cfg) as engine:
        units = engine.weights.placement().units
        for turn in range(3):
            micro_batch = batch_of(test, 2 * turn + 40 * my_rank(), 2)
            micro_batch["picture"] = torch.tensor([int(my_rank() == 0), 0])
            norm = update(engine, micro_batch).grad_norm
        first, second = of_all_ranks((units, norm, engine.weights.read("tower.layers.0.up.weight").sum().item()))
    assert first == second
    assert not [name for name in units if name.startswith("tower")]


class Bare(nn.Module):
    """Units that are bare layers, beside a tower that a rank may skip."""

    def __init__(self):
        super().__init__()
        self.inp, self.out = nn.Linear(4, 8), nn.Linear(8, 5)
        self.tower = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x, use):
        x = self.inp(x)
        return self.out(x + self.tower(x) if use else x).square().mean()


def skipping(turn, rank):
    """Rank 1 skips the tower from the second update on."""
    drawn = torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * turn + rank))
    return {"x": drawn, "use": torch.tensor(rank == 0 or not turn)}


BARE = Scenario(Bare, data=skipping, loss=lambda model, batch: model(**batch), micro_batches=3)


@in_ranks(cells=EACH)
def test_ranks_may_skip_a_replicated_tower_beside_bare_layers(backend):
    """Without the comparison of calls."""
    BARE.judge(config(backend, {"strategy": "full_shard", "replicate": ["tower"]}))


@in_ranks(cells=EACH)
def test_one_that_is_frozen_for_a_window_keeps_its_values(backend):
    with unishard.prepare(MODELS["mlp"].build(), cfg_of(backend, precision="bf16")) as engine:
        update(engine, own_share(1)[0])
        weights = []
        for trains in (False, True):
            engine.weights.set_trainable("head", trains)
            weights.append(engine.weights.read("head.weight"))
            update(engine, own_share(1)[0])
        weights.append(engine.weights.read("head.weight"))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])


@in_ranks(cells=EACH)
def test_a_model_that_does_not_train_has_them_too(backend):
    with unishard.prepare(MODELS["mlp"].build(), cfg_of(backend), train=False) as engine:
        found, logits = whole(engine), engine(**batch("mlp", 0, 2)).logits
        engine.weights.write("head.bias", torch.zeros(11))
        found += whole(engine)
    assert found == []
    assert float((logits - MODELS["mlp"].build()(**batch("mlp", 0, 2)).logits).abs().max()) < 1e-6


@in_ranks(world=4, cells=EACH)
def test_smaller_groups_after_forward_train_the_same(backend):
    found = []
    for names in ([], ["norm", "head"]):
        sharding = {"strategy": "full_shard", "reshard_after_forward": 2, "replicate": names}
        with unishard.prepare(MODELS["mlp"].build(), config(backend, sharding)) as engine:
            found.append(losses_of(engine, own_share(4)))
    assert found[1] == pytest.approx(found[0], rel=1e-6)


@in_ranks(cells=EACH)
def test_a_run_moves_to_the_other_engine_which_shards_them(backend, root):
    """Losses and averages of a run that is saved, and goes on there, are those of one that does not stop."""
    found, data = [], own_share(4)
    sections = {"precision": "bf16", "optimizer": {"name": "adamw", "lr": 1e-2}}
    for second, names in ((backend, NAMES), (OTHER[backend], [])):
        with unishard.prepare(MODELS["mlp"].build(), cfg_of(backend, **sections)) as engine:
            engine.weights.average(0.5)
            losses_of(engine, data[:2])
            engine.save(f"{root}/{second}")
        cfg = config(second, {"strategy": "full_shard", "replicate": names}, **sections)
        with unishard.prepare(MODELS["mlp"].build(), cfg) as engine:
            average = engine.weights.average(0.5)
            engine.load(f"{root}/{second}")
            loaded = average.read("head.weight")
            losses = losses_of(engine, data[2:])
            found.append([*losses, *(float(each.double().norm()) for each in (loaded, average.read("head.weight")))])
    assert found[1] == pytest.approx(found[0], rel=4e-4)


# -- refusals --------------------------------------------------------------------------------------


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


@in_ranks
def test_the_ranks_raise_it():
    cfg = config("fsdp", {"strategy": "full_shard", "replicate": ["haed"]})
    assert "did you mean 'head'?" in refused(unishard.prepare, MODELS["mlp"].build(), cfg)


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
