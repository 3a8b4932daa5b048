"""`engine.weights.average`: the average of plain torch, on every engine, number of ranks and strategy, in evaluation, checkpoints
and exports."""

from __future__ import annotations

import pytest
import torch
from harness import EACH, heard, in_ranks, on_ranks, play, refused, values
from harness.training import ADAMW, BACKENDS, DEEP, OTHER, config, own_share, prepare, train
from safetensors.torch import load_file

from unishard.testing.models import mlp

DECAY = 0.8
UPDATES = 2
MIXED, PURE = "bf16", "pure bf16"
SPANNING = (
    ("no_shard", "fp32"),
    ("no_shard", MIXED),
    ("shard_optimizer", MIXED),
    ("shard_grad_op", "fp32"),
    ("shard_grad_op", "offload"),
    ("full_shard", MIXED),
    ("full_shard", PURE),
    ("full_shard", "offload"),
)


def configured(backend, strategy, how="fp32", **sections):
    precision = {"compute": "bf16", "master": "bf16"} if how == PURE else MIXED if how == MIXED else "fp32"
    offload = {"optimizer": "cpu"} if how == "offload" else "none"
    return config(backend, strategy, precision=precision, offload=offload, optimizer=ADAMW, **sections)


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors]).tolist()


def read(engine, ema):
    return flat(ema.read(name) for name, _ in engine.module.named_parameters())


def masters(engine):
    return flat(engine.weights.read(name) for name, _ in engine.module.named_parameters())


def averaged(backend, strategy, how):
    """The average, that of the weights that a user reads after each update, and both in evaluation."""
    batches = own_share(UPDATES + 2)
    with prepare(configured(backend, strategy, how)) as engine:
        ema = engine.weights.average(DECAY)
        wanted = torch.tensor(
            flat(parameter.bfloat16() if how == PURE else parameter for parameter in mlp().parameters())
        )
        for batch in batches[:UPDATES]:
            train(engine, [batch])
            own = masters(engine)
            wanted = wanted.lerp(torch.tensor(own), 1 - DECAY)
        before = read(engine, ema)
        with ema.weights():
            inside = masters(engine), engine.mean(engine.eval()(**batches[0]).loss)
        untouched = masters(engine) == own and read(engine, ema) == before
        went_on = [engine.mean(loss) for loss, _ in train(engine.train(), batches[UPDATES:])]
    with prepare(configured(backend, strategy, how)) as engine:
        train(engine, batches[:UPDATES])
        straight = [engine.mean(loss) for loss, _ in train(engine, batches[UPDATES:])]
    return {
        "average": before,
        "wanted": wanted.tolist(),
        "inside": inside,
        "loss": plain_loss(inside[0], batches[0], how),
        "untouched": untouched,
        "went on": (went_on, straight),
    }


def plain_loss(weights, batch, how):
    """The loss of a plain model with these weights."""
    model = mlp()
    torch.nn.utils.vector_to_parameters(torch.tensor(weights), model.parameters())
    if how in (MIXED, PURE):
        batch = {name: value.bfloat16() if value.is_floating_point() else value for name, value in batch.items()}
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    return model(**batch).loss.item()


CELLS = tuple(
    (backend, *cell)
    for turn, backend in enumerate(BACKENDS)
    for number, cell in enumerate((("full_shard", "fp32"), *SPANNING))
    if DEEP or number == 0 or (turn + number) % 2
)
"""The engines take turns."""


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_every_strategy_averages_its_master_weights_and_evaluates_with_them(cell):
    outcomes, how = values(play(tuple((averaged, each) for each in CELLS))[averaged, cell]), cell[2]
    for found in outcomes:
        assert found["average"] == pytest.approx(found["wanted"], rel=1e-6, abs=1e-7)
        rounded = torch.tensor(found["average"]).bfloat16().tolist() if how == PURE else found["average"]
        assert found["inside"][0] == rounded
        assert found["untouched"]
        assert found["went on"][0] == found["went on"][1]
    mean = sum(found["loss"] for found in outcomes) / len(outcomes)
    assert outcomes[0]["inside"][1] == pytest.approx(mean, rel=1e-5 if how in ("fp32", "offload") else 1e-2)


# -- checkpoints and exports -----------------------------------------------------------------------


def saved(backend, strategy, folder):
    """What is saved after two updates, and the average after the third."""
    with prepare(configured(backend, strategy, checkpoint={"dir": f"{folder}/run"})) as engine:
        ema = engine.weights.average(DECAY)
        train(engine, own_share(UPDATES))
        engine.save()
        with ema.weights():
            engine.export(f"{folder}/averages")
        return read(engine, ema)


def resumed(backend, strategy, folder, keeps):
    """The average after a load, and what the log says."""
    with heard() as lines, prepare(configured(backend, strategy, checkpoint={"dir": f"{folder}/run"})) as engine:
        ema = engine.weights.average(DECAY) if keeps == "before" else None
        engine.load(verify="bits")
        ema = engine.weights.average(DECAY) if keeps == "after" else ema
        found = read(engine, ema) if ema else masters(engine)
        train(engine, own_share(1))
        return found, masters(engine) != found, [line for line in lines if "moving average" in line]


def saved_without(backend, folder):
    with prepare(configured(backend, "full_shard", checkpoint={"dir": f"{folder}/run"})) as engine:
        train(engine, own_share(1))
        engine.save()
        return masters(engine)


@pytest.mark.parametrize(
    ("there", "here", "world"),
    [
        (("fsdp", "full_shard"), ("deepspeed", "shard_grad_op"), 1),
        (("deepspeed", "full_shard"), ("fsdp", "shard_optimizer"), 1),
        pytest.param(("deepspeed", "shard_optimizer"), ("deepspeed", "full_shard"), 2, marks=pytest.mark.deep),
        (("fsdp", "no_shard"), ("fsdp", "full_shard"), 2),
    ],
)
def test_a_checkpoint_and_an_export_hold_the_average_for_any_engine(there, here, world, tmp_path):
    wanted = on_ranks(saved, *there, str(tmp_path))[0]
    exported = load_file(tmp_path / "averages/model.safetensors")
    assert flat(exported[name] for name, _ in mlp().named_parameters()) == wanted
    again = [(resumed, (*here, str(tmp_path), when)) for when in ("before", "after")]
    without = (resumed, (*here, str(tmp_path), ""))
    played = play((*again, without), world)
    for found, trained, said in [*values(played[again[0]]), *values(played[again[1]])]:
        assert (found, trained, said) == (wanted, True, [])
    said = [lines for _, _, lines in values(played[without])]
    assert [len(lines) for lines in said] == [1] + [0] * (world - 1)
    assert said[0][0].endswith(
        "is not resumed; to resume it, call engine.weights.average(decay) before the first training forward, and before a save"
    )


def interrupted(backend, folder, batches, *, stops):
    """The average of a run that `prepare` resumes, over some batches; saved at a stop."""
    checkpoint = {"dir": folder, "on_existing": "resume"}
    with prepare(configured(backend, "full_shard", checkpoint=checkpoint)) as engine:
        ema = engine.weights.average(DECAY)
        train(engine, batches)
        if stops:
            engine.save()
        return read(engine, ema)


@in_ranks(cells=EACH, in_turn=True)
def test_a_run_that_prepare_resumes_continues_its_average(backend, root):
    """The second part of the run on the other engine too."""
    batches = own_share(2 * UPDATES)
    interrupted(backend, f"{root}/run", batches[:UPDATES], stops=True)
    same, other = (
        interrupted(each, f"{root}/run", batches[UPDATES:], stops=False) for each in (backend, OTHER[backend])
    )
    whole = interrupted(backend, f"{root}/whole", batches, stops=False)
    assert same == whole
    assert other == pytest.approx(whole, rel=1e-5, abs=1e-6)


def test_a_checkpoint_without_an_average_starts_one_at_its_weights(tmp_path):
    wanted = on_ranks(saved_without, "fsdp", str(tmp_path))[0]
    ((found, _, said),) = on_ranks(resumed, "deepspeed", "full_shard", str(tmp_path), "before", world=1)
    assert found == wanted
    assert [line.partition(": ")[2] for line in said] == [
        "it lacks a moving average of the weights; they start at the loaded weights"
    ]


# -- refusals --------------------------------------------------------------------------------------

MISUSE = {
    "decay": "ContractError: weights.average: decay must be a number from 0 to 1, such as 0.999, got 1.5",
    "twice": "ContractError: weights.average was called before; keep what it returned",
    "in a window": "ContractError: weights.average was called inside an accumulation window...",
    "save inside": "ContractError: save was called inside average.weights(), where the model has averaged weights; call it "
    "after the block",
    "edit inside": "ContractError: weights.write was called inside average.weights()...",
    "train inside": "ContractError: forward was called in training mode inside average.weights(); call engine.eval() "
    "first, or train...",
    "closed": "ContractError: weights.average was called on a closed engine; build a new model and prepare it",
    "no such name": "ContractError: average.read: 'nothing' is not the first name of a parameter that was trainable "
    "in prepare",
}


@in_ranks(cells=EACH, in_turn=True)
def test_misuse_is_one_clear_error(backend):
    def says(what, call, *arguments, **named):
        assert refused(call, *arguments, **named).startswith(MISUSE[what].partition("...")[0]), what

    with prepare(configured(backend, "full_shard", training={"gradient_accumulation_steps": 2})) as engine:
        says("decay", engine.weights.average, 1.5)
        engine.backward(engine(**own_share(1)[0]).loss)
        says("in a window", engine.weights.average, 0.5)
        engine.discard()
        ema = engine.weights.average(0.5)
        says("twice", engine.weights.average, 0.5)
        says("no such name", ema.read, "nothing")
        with ema.weights():
            says("save inside", engine.save, "nowhere")
            says("edit inside", engine.weights.write, "head.bias", torch.zeros(11))
            says("train inside", engine, **own_share(1)[0])
        engine.close()
        says("closed", engine.weights.average)
