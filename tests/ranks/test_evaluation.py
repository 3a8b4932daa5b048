"""Evaluation: no graph, loops of different length, generation, and metrics without the samples that fill up."""

from __future__ import annotations

import warnings
from itertools import product

import pytest
import torch
import torch.distributed as dist
from harness import checked, error, in_ranks, my_rank, own_share, play, prepare, refused, train, values
from harness.training import BACKENDS, DEEP, EACH, FEWER, MICRO_BATCHES, config, configured

import unishard
from unishard.testing.models import batch, llama

CELLS = FEWER

# -- no graph --------------------------------------------------------------------------------------


@in_ranks(cells=CELLS)
def test_evaluation_needs_no_no_grad_and_leaves_no_graph(backend, strategy):
    """A validation forward between forward and backward, and one after each update. That it disturbs no training is a
    feature of the conformance suite."""
    graphs, kept = set(), set()
    with prepare(configured(backend, strategy)) as engine:
        for micro_batch in engine.batches(own_share(MICRO_BATCHES)):
            loss = engine(**micro_batch).loss
            graphs.add(engine.eval()(**micro_batch).loss.requires_grad)
            engine.train().backward(loss)
            engine.step()
            before = engine.weights.placement().param_bytes
            engine.eval()(**micro_batch)
            kept.add(engine.weights.placement().param_bytes - before)
            engine.train()
    assert graphs == {False}
    assert strategy != "full_shard" or max(kept) <= 0 or backend == "fsdp"


# -- loops of different length ---------------------------------------------------------------------

LENGTHS = (3, 0, 1)


@in_ranks(cells=CELLS, world=3)
def test_lockstep_takes_another_number_of_batches_on_each_rank(backend, strategy):
    """Trains, evaluates another number of batches on each rank, and trains on."""
    with prepare(configured(backend, strategy)) as engine:
        train(engine, own_share(2))
        rank = dist.get_rank()
        engine.eval()
        torch.manual_seed(rank)
        with engine.lockstep():
            losses = [engine(**micro_batch).loss.item() for micro_batch in engine.batches(own_share(LENGTHS[rank]))]
        random = torch.rand(1)
        expected = [engine(**batch("mlp", first, 2)).loss.item() for first in range(0, 18, 2)]
        engine.train()
    assert losses == pytest.approx([expected[turn * 3 + rank] for turn in range(LENGTHS[rank])], rel=1e-6)
    torch.manual_seed(rank)
    assert random == torch.rand(1)


# -- generation ------------------------------------------------------------------------------------

NEW_TOKENS = (3, 9)


def prompt(rank):
    return batch("llama", rank, 2)["input_ids"][:, : 4 + rank].contiguous()


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(7)
    sizes = {
        "vocab_size": 97,
        "d_model": 16,
        "d_kv": 4,
        "d_ff": 20,
        "num_layers": 2,
        "num_heads": 3,
        "decoder_start_token_id": 0,
    }
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, pad_token_id=0, eos_token_id=1)).eval()


def adapted():
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        # peft 0.21.2 asks transformers 5.23 by an old name (peft/peft_model.py).
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        torch.manual_seed(5)
        return get_peft_model(
            llama(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        ).eval()


GENERATING = {"llama": llama, "t5": t5, "adapted": adapted}


GENERATED = tuple(
    (*cell, model)
    for number, cell in enumerate(CELLS)
    for place, model in enumerate(GENERATING)
    if (place == 0 or (place + number) % 2 or DEEP) and (model != "adapted" or cell[1] == "full_shard")
)


@in_ranks(cells=GENERATED)
def test_generate_gives_the_sequences_of_the_plain_model(backend, strategy, model):
    rank = my_rank()
    tokens, options = prompt(rank), {"max_new_tokens": NEW_TOKENS[rank], "do_sample": False}
    with torch.no_grad():
        wanted = GENERATING[model]().eval().generate(tokens, **options).tolist()
    with unishard.prepare(GENERATING[model](), config(backend, strategy)) as engine:
        engine.eval()
        own = vars(engine.module).get("generate")
        calls = (engine.generate, engine.module.generate)
        found = [generate(input_ids=tokens, **options).tolist() for generate in calls]
        with engine.lockstep():
            found += [engine.generate(tokens, **options).tolist() for _ in range(2 * rank)]
        engine.train()
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        step = engine.step()
        replaced = vars(engine.module).get("generate") is not own
    assert found == [wanted] * (2 + 2 * rank)
    assert step.updated
    assert not replaced


# -- metrics ---------------------------------------------------------------------------------------

SAMPLES = 7


FILLED = tuple(product(BACKENDS, (True, False)) if DEEP else zip(BACKENDS, (True, False), strict=True))


def metrics_come_in_the_order_of_the_dataset(backend, filled):
    """Seven samples in micro-batches of two, on any number of ranks."""
    cfg, found = config(backend, "full_shard"), []
    data = [
        {name: value[0] for name, value in batch("mlp", index, 1).items()} | {"index": torch.tensor(index)}
        for index in range(SAMPLES)
    ]
    with prepare(cfg) as engine:
        if filled:
            engine.eval()
        for micro_batch in engine.batches(unishard.dataloader(data, cfg, shuffle=False)):
            index = micro_batch.pop("index")
            output = engine(**micro_batch)
            texts = [f"sample {number}" for number in index.tolist()]
            values = {"index": index, "pair": (output.logits, texts), "right": index > 2, "loss": output.loss}
            found.append(engine.gather_for_metrics(values))
            if not filled:
                engine.backward(output.loss)
                engine.step()
        world = engine.world_size
    kept = SAMPLES if filled else -(-SAMPLES // (2 * world)) * 2 * world
    wanted = [index % SAMPLES for index in range(kept)]
    assert [number for entry in found for number in entry["index"].tolist()] == wanted
    assert [text for entry in found for text in entry["pair"][1]] == [f"sample {index}" for index in wanted]
    assert [right for entry in found for right in entry["right"].tolist()] == [index > 2 for index in wanted]
    assert {tuple(entry["loss"].shape) for entry in found} == {(world,)}
    assert all(len(entry["pair"][0]) == len(entry["index"]) for entry in found)


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.deep), 2, 3])
def test_metrics_come_in_the_order_of_the_dataset_without_the_samples_that_fill_up(world):
    for outcomes in play(tuple((metrics_come_in_the_order_of_the_dataset, cell) for cell in FILLED), world).values():
        values(outcomes)


@in_ranks(cells=EACH, world=3, in_turn=True)
def test_ranks_may_have_different_numbers_of_rows_and_lengths(backend):
    with prepare(config(backend)) as engine:
        rank = dist.get_rank()
        rows = torch.full((2 * rank, 2 + rank), float(rank), dtype=torch.bfloat16)
        found = engine.gather_for_metrics(rows, pad=-1).tolist(), engine.gather_for_metrics([f"{rank}"] * rank)
    assert found == ([[1, 1, 1, -1], [1, 1, 1, -1], *[[2, 2, 2, 2]] * 4], ["1", "2", "2"])


# -- misuse ----------------------------------------------------------------------------------------


def lockstep_in_training(engine):
    with engine.lockstep():
        pass


def nested_lockstep(engine):
    with engine.eval().lockstep(), engine.lockstep():
        pass


def training_in_lockstep(engine):
    with engine.eval().lockstep():
        engine.train()(**own_share(1)[0])


def generate_without(engine):
    engine.eval().generate(torch.ones(1, 2))


def other_structure(engine):
    engine.gather_for_metrics({"logits": torch.ones(2, 3 + dist.get_rank())})


def not_one_row_a_sample(engine):
    data = unishard.dataloader([{"index": torch.tensor(index)} for index in range(7)], config("fsdp"), shuffle=False)
    for micro_batch in engine.eval().batches(data):
        engine.gather_for_metrics(micro_batch["index"].repeat(3))


def not_a_tensor(engine):
    engine.gather_for_metrics({"when": {"now": object()}})


MISUSE = {
    lockstep_in_training: "ContractError: lockstep is only for evaluation",
    nested_lockstep: "ContractError: lockstep was entered inside lockstep",
    training_in_lockstep: "ContractError: the model was put in training mode inside engine.lockstep()",
    generate_without: "ContractError: the model has no method generate",
    other_structure: "rank 1 is in engine.gather_for_metrics (update 1, micro-batch 1 of 1, logits: float32[*, 4])",
    not_one_row_a_sample: "ContractError: gather_for_metrics cannot drop the samples that fill up",
    not_a_tensor: "ContractError: gather_for_metrics takes tensors and lists of strings or numbers, in dicts, lists "
    "and tuples, but",
}


def misused(name, backend):
    with prepare(checked(backend)) as engine:
        next(misuse for misuse in MISUSE if misuse.__name__ == name)(engine)


MISUSED = tuple((misused, (misuse.__name__, BACKENDS[turn % 2])) for turn, misuse in enumerate(MISUSE))
"""Of what no engine decides, on the engines in turn."""


@pytest.mark.parametrize(
    ("misuse", "scenario"), [*zip(MISUSE, MISUSED, strict=True)], ids=lambda each: getattr(each, "__name__", "")
)
def test_misuse_is_one_clear_error_on_every_rank(misuse, scenario):
    assert MISUSE[misuse] in error(play(MISUSED)[scenario])


@in_ranks(cells=EACH, in_turn=True)
def test_a_forward_and_a_generate_in_one_turn_are_refused(backend):
    def one_of_both(engine):
        with engine.eval().lockstep():
            if dist.get_rank():
                engine(input_ids=prompt(0))
            else:
                engine.generate(prompt(0), max_new_tokens=2)

    with unishard.prepare(llama(), config(backend, "full_shard")) as engine:
        said = refused(one_of_both, engine)
    assert "in turn 1 of engine.lockstep ranks [1] call the model and ranks [0] call generate" in said
