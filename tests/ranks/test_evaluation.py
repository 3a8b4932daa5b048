"""Evaluation: no graph, loops of different length, generation, and metrics without the samples that fill up."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from harness import error, play, values
from harness.training import BACKENDS, MICRO_BATCHES, STRATEGIES, checked, config, configured, own_share, prepare, train

import unishard
from unishard.testing.models import batch, llama

CELLS = tuple((backend, strategy) for backend in BACKENDS for strategy in STRATEGIES)
everywhere = pytest.mark.parametrize("cell", CELLS, ids="-".join)


def played(scenario, cell, cells=CELLS, world=2):
    return values(play(tuple((scenario, each) for each in cells), world)[scenario, cell])


# -- no graph --------------------------------------------------------------------------------------


def evaluated(backend, strategy):
    """A validation forward between forward and backward, and one after each update."""
    graphs, kept = set(), set()
    with prepare(configured(backend, strategy)) as engine:
        for micro_batch in engine.batches(own_share(MICRO_BATCHES)):
            loss = engine(**micro_batch).loss
            graphs.add(engine.eval()(**micro_batch).loss.requires_grad)
            engine.train().backward(loss)
            engine.step()
            before = engine.placement().param_bytes
            engine.eval()(**micro_batch)
            kept.add(engine.placement().param_bytes - before)
            engine.train()
    return graphs, kept


@everywhere
def test_evaluation_needs_no_no_grad_and_leaves_no_graph(cell):
    """That it disturbs no training is a feature of the conformance suite."""
    for graphs, kept in played(evaluated, cell):
        assert graphs == {False}
        if cell[1] == "full_shard":
            assert max(kept) <= 0 or cell[0] == "fsdp"


# -- loops of different length ---------------------------------------------------------------------

LENGTHS = (3, 0, 1)


def uneven(backend, strategy):
    """Trains, evaluates another number of batches on each rank, and trains on."""
    with prepare(configured(backend, strategy)) as engine:
        train(engine, own_share(2))
        rank = dist.get_rank()
        engine.eval()
        torch.manual_seed(rank)
        with engine.lockstep():
            losses = [engine(**micro_batch).loss.item() for micro_batch in engine.batches(own_share(LENGTHS[rank]))]
        random = torch.rand(1).item()
        expected = [engine(**batch("mlp", first, 2)).loss.item() for first in range(0, 18, 2)]
        engine.train()
        return losses, [expected[turn * dist.get_world_size() + rank] for turn in range(LENGTHS[rank])], random


@everywhere
def test_lockstep_takes_another_number_of_batches_on_each_rank(cell):
    for rank, (found, expected, random) in enumerate(played(uneven, cell, world=3)):
        assert found == pytest.approx(expected, rel=1e-6)
        assert len(found) == LENGTHS[rank]
        torch.manual_seed(rank)
        assert random == torch.rand(1).item()


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


def generated(backend, strategy, model):
    with unishard.prepare(GENERATING[model](), config(backend, strategy)) as engine:
        rank = dist.get_rank()
        tokens = prompt(rank)
        engine.eval()
        own = vars(engine.module).get("generate")
        once = [
            generate(input_ids=tokens, max_new_tokens=NEW_TOKENS[rank], do_sample=False).tolist()
            for generate in (engine.generate, engine.module.generate)
        ]
        with engine.lockstep():
            often = [
                engine.generate(tokens, max_new_tokens=NEW_TOKENS[rank], do_sample=False).tolist()
                for _ in range(2 * rank)
            ]
        engine.train()
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        return once, often, engine.step().updated, vars(engine.module).get("generate") is not own


GENERATED = tuple(
    (*cell, model) for cell in CELLS for model in GENERATING if model != "adapted" or cell[1] == "full_shard"
)


@pytest.mark.parametrize("cell", GENERATED, ids="-".join)
def test_generate_gives_the_sequences_of_the_plain_model(cell):
    for rank, (once, often, updated, replaced) in enumerate(played(generated, cell, GENERATED)):
        with torch.no_grad():
            wanted = (
                GENERATING[cell[2]]()
                .eval()
                .generate(prompt(rank), max_new_tokens=NEW_TOKENS[rank], do_sample=False)
                .tolist()
            )
        assert [*once, *often] == [wanted] * (2 + 2 * rank)
        assert updated
        assert not replaced


# -- metrics ---------------------------------------------------------------------------------------

SAMPLES = 7


def gathered(backend, filled):
    """Seven samples in micro-batches of two, on any number of ranks."""
    cfg = config(backend, "full_shard")
    data = [
        {name: value[0] for name, value in batch("mlp", index, 1).items()} | {"index": torch.tensor(index)}
        for index in range(SAMPLES)
    ]
    found = []
    with prepare(cfg) as engine:
        if not filled:
            engine.train()
        else:
            engine.eval()
        for micro_batch in engine.batches(unishard.dataloader(data, cfg, shuffle=False)):
            index = micro_batch.pop("index")
            output = engine(**micro_batch)
            found.append(
                engine.gather_for_metrics(
                    {
                        "index": index,
                        "pair": (output.logits, [f"sample {number}" for number in index.tolist()]),
                        "right": index > 2,
                        "loss": output.loss,
                    }
                )
            )
            if not filled:
                engine.backward(output.loss)
                engine.step()
    return [
        (
            entry["index"].tolist(),
            entry["pair"][0].shape,
            entry["pair"][1],
            entry["right"].tolist(),
            entry["loss"].shape,
        )
        for entry in found
    ]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_metrics_come_in_the_order_of_the_dataset_without_the_samples_that_fill_up(world):
    scenarios = tuple((gathered, (backend, filled)) for backend in BACKENDS for filled in (True, False))
    for scenario, outcomes in play(scenarios, world).items():
        for entries in values(outcomes):
            kept = SAMPLES if scenario[1][1] else -(-SAMPLES // (2 * world)) * 2 * world
            wanted = [index % SAMPLES for index in range(kept)]
            assert [number for numbers, *_ in entries for number in numbers] == wanted
            assert [text for *_, texts, _, _ in entries for text in texts] == [f"sample {index}" for index in wanted]
            assert [right for *_, rights, _ in entries for right in rights] == [index > 2 for index in wanted]
            assert {tuple(loss) for *_, loss in entries} == {(world,)}
            assert all(shape[0] == len(numbers) for numbers, shape, *_ in entries)


def unequal_rows(backend):
    with prepare(config(backend)) as engine:
        rank = dist.get_rank()
        rows = torch.full((2 * rank, 2 + rank), float(rank), dtype=torch.bfloat16)
        return engine.gather_for_metrics(rows, pad=-1).tolist(), engine.gather_for_metrics([f"{rank}"] * rank)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_may_have_different_numbers_of_rows_and_lengths(backend):
    scenario = (unequal_rows, (backend,))
    rows = [[1, 1, 1, -1], [1, 1, 1, -1], *[[2, 2, 2, 2]] * 4]
    assert values(play((scenario,), 3)[scenario]) == [(rows, ["1", "2", "2"])] * 3


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


def backward_in_evaluation(engine):
    engine.backward(engine.eval()(**own_share(1)[0]).loss)


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
    backward_in_evaluation: "ContractError: backward was called in evaluation mode, where engine(...) builds no graph; "
    "call engine.train()",
    generate_without: "ContractError: the model has no method generate",
    other_structure: "rank 1 is in engine.gather_for_metrics (update 1, micro-batch 1 of 1, logits: float32[*, 4])",
    not_one_row_a_sample: "ContractError: gather_for_metrics cannot drop the samples that fill up",
    not_a_tensor: "ContractError: gather_for_metrics takes tensors and lists of strings or numbers, in dicts, lists "
    "and tuples, but",
}


def misused(name, backend):
    with prepare(checked(backend)) as engine:
        next(misuse for misuse in MISUSE if misuse.__name__ == name)(engine)


@pytest.mark.parametrize("misuse", MISUSE, ids=lambda misuse: misuse.__name__)
@pytest.mark.parametrize("backend", BACKENDS)
def test_misuse_is_one_clear_error_on_every_rank(backend, misuse):
    scenarios = tuple((misused, (each.__name__, backend)) for each in MISUSE)
    assert MISUSE[misuse] in error(play(scenarios)[misused, (misuse.__name__, backend)])


def kinds_differ(backend):
    with unishard.prepare(llama(), config(backend, "full_shard")) as engine, engine.eval().lockstep():
        tokens = prompt(0)
        if dist.get_rank():
            engine(input_ids=tokens)
        else:
            engine.generate(tokens, max_new_tokens=2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_forward_and_a_generate_in_one_turn_are_refused(backend):
    scenario = (kinds_differ, (backend,))
    assert "in turn 1 of engine.lockstep ranks [1] call the model and ranks [0] call generate" in error(
        play((scenario,))[scenario]
    )
