"""Frameworks whose ranks share samples: losses, norms and weights are those of plain torch in one process."""

from __future__ import annotations

import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "ranks"))
from harness import DEEP, in_ranks, my_rank, refused

from unishard.testing.cells import BACKENDS

pytest.importorskip("accelerate", reason="pip install 'unishard[trainer]'")
pytest.importorskip("transformers", reason="pip install 'unishard[trainer]'")

import transformers
from hybrid_models import hybrid
from sequence_programs import (
    LENGTH,
    ROWS,
    SMALL,
    UPDATES,
    WINDOW,
    collate,
    equal,
    model,
    plain,
    sample,
    samples,
    summed,
)
from test_on_accelerate import shared_folder


def arguments(folder, kind=transformers.TrainingArguments, **options):
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    given = {
        "output_dir": folder,
        "per_device_train_batch_size": ROWS,
        "per_device_eval_batch_size": ROWS,
        "gradient_accumulation_steps": WINDOW,
        "max_grad_norm": 0.5,
        "learning_rate": 0.1,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_steps": UPDATES,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
    }
    return kind(**given | options)


def configured(backend, size=2, method="auto", **sections):
    sequence = {"size": size} | ({} if method == "auto" else {"method": method})
    parallel = {"tensor": size} if method == "tensor" else {"sequence": sequence}
    return {"backend": backend, "sharding": "no_shard", "parallel": parallel} | sections


def trainer(cfg, folder, *, given=None, **options):
    from unishard.integrations.transformers import UnishardTrainer

    transformers.logging.set_verbosity_error()
    args = arguments(folder, **options)
    data = {"train_dataset": samples(), "eval_dataset": samples(7), "data_collator": collate}
    return UnishardTrainer(given or model(), args, **data, unishard=cfg)


def history(made):
    names = {"losses": "loss", "norms": "grad_norm"}
    return {key: [entry[name] for entry in made.state.log_history if name in entry] for key, name in names.items()}


def trained(cfg, readers, *, expected=None, **options):
    losses, norms, weights, _ = plain(readers, **(expected or {}))
    made = trainer(cfg, shared_folder(), **options)
    made.train()
    found = history(made)
    state = made.accelerator.engine.weights.state_dict()
    made.accelerator.close()
    equal(found, {"losses": losses, "norms": norms}, weights, state)


with_trl = pytest.mark.skipif(find_spec("trl") is None, reason="pip install trl datasets")
with_peft = pytest.mark.skipif(find_spec("peft") is None, reason="pip install peft")
VARIANTS = {
    "tokens": ({}, {}),
    "means": ({"average_tokens_across_devices": False}, {"mean": "readers"}),
    "smooth": ({"label_smoothing_factor": 0.1}, {"smoothing": 0.1}),
}


ALONE = ("tensor", "ulysses", "allgather")


@in_ranks(
    cells=tuple((each, method) for at, each in enumerate(BACKENDS) for method in (ALONE if DEEP else ALONE[: 2 + at])),
    in_turn=True,
)
def test_the_trainer_trains_as_one_process(backend, method):
    trained(configured(backend, method=method, sharding="full_shard"), 1)


@in_ranks(cells=tuple((BACKENDS[number % 2], variant) for number, variant in enumerate(VARIANTS) if number))
def test_the_trainers_own_losses(backend, variant):
    options, expected = VARIANTS[variant]
    trained(configured(backend), 1, expected=expected, **options)


FOUR = (("deepspeed", "tokens"), ("fsdp", "means"), *((("fsdp", "tokens"), ("deepspeed", "smooth")) if DEEP else ()))


@in_ranks(world=4, cells=FOUR)
def test_the_trainer_beside_data_parallelism(backend, variant):
    options, expected = VARIANTS[variant]
    trained(configured(backend), 2, expected=expected, **options)


def mean_of_logits(outputs, labels, num_items_in_batch=None):
    loss = torch.nn.functional.cross_entropy(
        outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
    )
    return loss / num_items_in_batch


@in_ranks(cells=(("fsdp",),))
def test_a_loss_of_the_scripts_own_gets_whole_logits(backend):
    from unishard.integrations.transformers import UnishardTrainer

    losses, norms, weights, _ = plain(1)
    data = {"train_dataset": samples(), "data_collator": collate, "compute_loss_func": mean_of_logits}
    made = UnishardTrainer(model(), arguments(shared_folder()), **data, unishard=configured(backend))
    made.train()
    state = made.accelerator.engine.weights.state_dict()
    found = history(made)
    made.accelerator.close()
    equal(found, {"losses": losses, "norms": norms}, weights, state)


def evaluated(made, data):
    """The loss that the Trainer shows, and the logits of each sample, of plain torch."""
    made.eval()
    losses, logits = [], []
    with torch.no_grad():
        for first in range(0, len(data), ROWS):
            rows = data[first : first + ROWS]
            inputs = {name: value for name, value in collate(rows).items() if name != "labels"}
            logits += made(**inputs).logits
            loss, items = summed(made, collate((rows + data)[:ROWS]))  # the last batch is filled up
            losses += [loss / items] * len(rows)
    return torch.stack(losses).mean().item(), logits


@in_ranks(cells=tuple((backend,) for backend in BACKENDS), in_turn=True)
def test_what_saves_memory_changes_nothing_in_the_trainer(backend):
    losses, norms, weights, made = plain(1)
    saving = {"training": {"loss_chunk_tokens": 3}, "offload": {"activations": "cpu"}}
    ours = trainer(configured(backend, **saving), shared_folder(), prediction_loss_only=True)
    ours.train()
    curve, state = history(ours), ours.accelerator.engine.weights.state_dict()
    ours.args.average_tokens_across_devices = False
    loss = ours.evaluate(samples(3 * ROWS))["eval_loss"]
    ours.accelerator.close()
    equal(curve, {"losses": losses, "norms": norms}, weights, state)
    assert loss == pytest.approx(evaluated(made, samples(3 * ROWS))[0], rel=1e-6)


def adapted():
    """A hybrid model with LoRA on state spaces, attention and head, of which every weight reaches the loss."""
    import peft

    targets = ["in_proj", "out_proj", "q_proj", "v_proj", "lm_head"]
    made = peft.get_peft_model(hybrid("Bamba", vocab_size=48), peft.LoraConfig(r=4, target_modules=targets))
    torch.manual_seed(2)
    for name, value in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.1)
    return made


@with_peft
@in_ranks(cells=tuple((backend,) for backend in (BACKENDS if DEEP else BACKENDS[1:])))
def test_lora_trains_on_long_sequences_with_the_loss_in_chunks(backend):
    losses, norms, weights, _ = plain(1, made=adapted())
    chunks = {"training": {"loss_chunk_tokens": 3}}
    ours = trainer(configured(backend, **chunks), shared_folder(), given=adapted(), prediction_loss_only=True)
    ours.train()
    found, state = history(ours), ours.accelerator.engine.weights.state_dict()
    ours.accelerator.close()
    equal(found, {"losses": losses, "norms": norms}, weights, state)


@in_ranks(world=4, cells=tuple((backend,) for backend in BACKENDS), in_turn=True)
def test_the_trainer_evaluates_and_predicts_whole_samples_once(backend):
    *_, made = plain(2)
    data = samples(7)
    loss, logits = evaluated(made, data)
    ours = trainer(configured(backend), shared_folder(), average_tokens_across_devices=False)
    before = ours.evaluate()["eval_loss"]
    ours = trainer(configured(backend), shared_folder())
    ours.train()
    ours.args.average_tokens_across_devices = False
    after = ours.evaluate()["eval_loss"]
    predicted = ours.predict(samples(7))
    ours.accelerator.close()
    assert before != pytest.approx(after, rel=1e-3)
    assert after == pytest.approx(loss, rel=1e-6)
    assert predicted.predictions.shape == (7, collate(data)["labels"].shape[1], 48)
    kept = collate(data)["attention_mask"].bool()
    torch.testing.assert_close(torch.tensor(predicted.predictions)[kept], torch.stack(logits)[kept], rtol=0, atol=1e-5)
    assert (torch.tensor(predicted.label_ids) == collate(data)["labels"]).all()


@in_ranks(cells=(("fsdp", "full_shard"), ("deepspeed", "no_shard")))
def test_the_trainer_generates_of_whole_samples(backend, strategy):
    from unishard.integrations.transformers import UnishardMixin

    base = type("OnUnishard", (UnishardMixin, transformers.Seq2SeqTrainer), {})
    given = {"predict_with_generate": True, "generation_max_length": LENGTH + 4, "max_steps": 1}
    args = arguments(shared_folder(), kind=transformers.Seq2SeqTrainingArguments, **given)
    cfg = configured(backend) | {"sharding": strategy}
    ours = base(model(), args, train_dataset=samples(), data_collator=collate, unishard=cfg)
    ours.train()
    predicted = ours.predict(samples(7)).predictions
    made = model()
    made.load_state_dict(ours.accelerator.engine.weights.state_dict(all_ranks=True))
    ours.accelerator.close()
    prompts = {name: value for name, value in collate(samples(7)).items() if name != "labels"}
    expected = made.eval().generate(**prompts, max_length=LENGTH + 4)
    assert predicted[:, LENGTH : LENGTH + 4].tolist() == expected[:, LENGTH:].tolist()


@in_ranks(cells=(BACKENDS, BACKENDS[::-1])[: 1 + DEEP])
def test_the_trainer_resumes_with_and_without_shared_samples(backend, other):
    losses, *_ = plain(1, updates=5)
    folder = shared_folder()
    made = trainer(configured(backend), folder, max_steps=3, save_strategy="steps", save_steps=3)
    made.train()
    made.accelerator.close()
    for cfg, rows in ((configured(other, method="allgather"), ROWS), ({"backend": other}, ROWS // 2)):
        again = trainer(cfg, folder, max_steps=5, per_device_train_batch_size=rows)
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
        found = history(again)["losses"]
        again.accelerator.close()
        assert found == pytest.approx(losses, rel=1e-6)


def accelerator(backend, size=2, method="auto", **options):
    import accelerate

    from unishard.integrations.accelerate import Accelerator

    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    return Accelerator(configured(backend, size, method), **options)


def looped(acc, of_logits=False, shuffled=False):
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(samples(), batch_size=ROWS, collate_fn=collate, shuffle=shuffled)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 100 else 0.0)
    made, optimizer, loader, scheduler = acc.prepare(made, optimizer, loader, scheduler)
    losses, norms, of_window, seen = [], [], [], []
    for batch in loader:
        seen.append(batch["input_ids"][:, :4].tolist())
        with acc.accumulate(made):
            if of_logits:
                loss, items = summed(made, batch)
                loss = loss / items
            else:
                loss = made(**batch).loss
            acc.backward(loss)
            of_window.append(acc.reduce(loss.detach(), "mean").item())
            if acc.sync_gradients:
                norms.append(float(acc.clip_grad_norm_(made.parameters(), 0.5)))
                losses.append(sum(of_window) / len(of_window))
                of_window = []
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if len(losses) == UPDATES:
            break
    state = acc.get_state_dict(made)
    made.eval()
    batches = torch.utils.data.DataLoader(samples(7), batch_size=ROWS, collate_fn=collate)
    batches = acc.prepare_data_loader(batches)
    rows = []
    with torch.no_grad():
        for batch in batches:
            rows.append(acc.gather_for_metrics((made(**batch).logits, batch["labels"])))
    names = acc.gather_for_metrics([f"rank {my_rank()}"])
    whole = [torch.cat(each) for each in zip(*rows, strict=True)]
    return losses, norms, state, whole, names, scheduler.scheduler.last_epoch, seen


@in_ranks(
    world=4,
    cells=(("fsdp", False, "auto"), ("deepspeed", True, "auto"), *((each, True, "tensor") for each in BACKENDS)),
)
def test_a_loop_of_accelerate(backend, of_logits, method):
    expected_losses, expected_norms, weights, made = plain(2, mean="batch")
    made.eval()
    with torch.no_grad():
        batch = collate(samples(7))
        logits = made(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    acc = accelerator(backend, method=method, gradient_accumulation_steps=WINDOW)
    losses, norms, state, whole, names, steps, _ = looped(acc, of_logits)
    acc.free_memory()
    found = {"losses": losses, "norms": norms}
    equal(found, {"losses": expected_losses, "norms": expected_norms}, weights, state)
    kept = batch["attention_mask"].bool()  # padding attends to itself only
    torch.testing.assert_close(whole[0][kept], logits[kept], rtol=0, atol=1e-5)
    assert (whole[1] == batch["labels"]).all()
    assert names == ["rank 0", "rank 2"]
    assert steps == 2 * UPDATES  # Accelerate steps a schedule once for each reader


@in_ranks(cells=(("fsdp",),))
def test_groups_of_accelerate_read_the_same_shuffled_samples(backend):
    torch.manual_seed(my_rank())
    acc = accelerator(backend, gradient_accumulation_steps=WINDOW)
    *_, seen = looped(acc, shuffled=True)
    everyones = [None] * 2
    torch.distributed.all_gather_object(everyones, seen)
    acc.free_memory()
    assert everyones[0] == everyones[1]


@in_ranks(cells=(("fsdp",), ("deepspeed",)), in_turn=True)
def test_logits_in_parts_are_refused_where_they_are_read(backend):
    acc = accelerator(backend)
    made = model()
    made, _ = acc.prepare(made, torch.optim.SGD(made.parameters(), lr=0.1))
    output = made(**collate(samples(2)))
    problem = refused(lambda: output.logits.argmax(-1))
    acc.backward(output.loss)
    different = collate(samples(2 + my_rank())[-2:])
    other = refused(made, **different)
    acc.free_memory()
    assert "call the model without labels" in problem
    assert "have read different ones" in other


@in_ranks(cells=(("fsdp",),))
def test_what_reads_on_one_rank_for_all_is_refused(backend):
    import accelerate

    options = accelerate.DataLoaderConfiguration(dispatch_batches=True)
    assert "does not know groups" in refused(accelerator, backend, dataloader_config=options)


def documents(count=24):
    """Of which the first tokens are a prompt."""
    rows = [sample(number) for number in range(count)]
    return [{name: row[name].tolist() for name in ("input_ids", "labels")} for row in rows]


def of_trl(kind, cfg, folder, data, *, judge=None, **options):
    import datasets
    import trl
    from test_on_trl import tokenizer

    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    base = getattr(trl, f"{kind}Trainer")
    given = {"bf16": False, "activation_checkpointing": False, "max_length": 16, **options}
    args = arguments(folder, kind=getattr(trl, f"{kind}Config"), **given)
    extra = {}
    if cfg is not None:
        from unishard.integrations.transformers import UnishardMixin

        base, extra = type(f"Unishard{kind}", (UnishardMixin, base), {}), {"unishard": cfg}
    made = judge or model()
    if my_rank() == 0:
        made.save_pretrained(f"{folder}/model")  # where TRL reads its reference from
    torch.distributed.barrier()
    made.config._name_or_path = f"{folder}/model"
    return base(
        model=made, args=args, train_dataset=datasets.Dataset.from_list(data), processing_class=tokenizer(), **extra
    )


def of_documents(rows):
    """The documents of packed rows, with the labels that count."""
    for row in rows:
        start = 0
        for length in row.get("seq_lengths") or [len(row["input_ids"])]:
            names = ("input_ids", "labels")
            yield {name: torch.tensor(row[name][start : start + length])[None] for name in names}
            start += length


HEAD_WHOLE = {f"model.layers.*.mlp.{each}": "colwise" for each in ("up_proj", "gate_proj")} | {
    "model.layers.*.mlp.down_proj": "rowwise"
}
SHARED = {"sequence": {"sequence": 2}, "tensor": {"tensor": {"size": 2, "plan": HEAD_WHOLE}}}


OF_SFT = (
    ("deepspeed", False, "sequence", "Llama"),
    ("fsdp", True, "sequence", "FalconH1"),
    ("fsdp", False, "tensor", "Llama"),
    ("fsdp", False, "sequence", "Qwen3_5"),
    ("deepspeed", True, "sequence", "Qwen3_5"),
    ("fsdp", True, "sequence", "Llama"),
    ("deepspeed", True, "tensor", "Llama"),
)


@with_trl
@in_ranks(cells=OF_SFT[: None if DEEP else 3])
def test_sft_of_trl(backend, packed, shared, name):
    """Packed documents are apart, also in state spaces without a kernel that can do it, which one process refuses."""
    build = model if name == "Llama" else partial(hybrid, name, vocab_size=SMALL["vocab_size"])
    cfg = configured(backend, parallel=SHARED[shared])
    made = of_trl("SFT", cfg, shared_folder(), documents(), packing=packed, judge=build())
    rows = [*made.train_dataset]
    reference, losses, right = build(), [], []
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for update in range(UPDATES):
        each = WINDOW * ROWS
        total, loss, correct = 0, 0.0, 0
        for document in of_documents(rows[update * each : (update + 1) * each]):
            logits, labels = reference(input_ids=document["input_ids"]).logits[0, :-1], document["labels"][0, 1:]
            loss = loss + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            total += (labels != -100).sum()
            correct += ((logits.argmax(-1) == labels) & (labels != -100)).sum()
        (loss / total).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss / total).item())
        right.append((correct / total).item())
    made.train()
    state = made.accelerator.engine.weights.state_dict()
    logs = [entry for entry in made.state.log_history if "loss" in entry]
    made.accelerator.close()
    found = {"losses": [entry["loss"] for entry in logs]}
    equal(found, {"losses": losses}, dict(reference.named_parameters()), state)
    assert len(logs) == UPDATES
    assert logs[0]["mean_token_accuracy"] <= 1.0


@with_trl
@in_ranks(cells=(("fsdp",),))
def test_sft_of_trl_balances_the_experts_of_a_hybrid_model_over_the_group(backend):
    """TRL asks for their loss itself, and computes it by Mixtral's function."""
    made = of_trl("SFT", configured(backend), shared_folder(), documents(), max_steps=1, judge=hybrid("Qwen3Next"))
    reference, loss, total, balance = hybrid("Qwen3Next"), 0.0, 0, 0.0
    rows = [{name: torch.tensor(row[name]) for name in ("input_ids", "labels")} for row in made.train_dataset]
    for number in range(WINDOW):
        batch = collate([row | {"attention_mask": row["labels"] > -200} for row in rows[ROWS * number :][:ROWS]])
        labels = batch.pop("labels")[:, 1:].flatten()
        output = reference(**batch, output_router_logits=True)
        loss = loss + torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels, reduction="sum")
        total, balance = total + (labels != -100).sum(), balance + output.aux_loss / WINDOW
    expected = loss / total + reference.config.router_aux_loss_coef * balance
    expected.backward()
    norm = torch.nn.utils.get_total_norm([each.grad for each in reference.parameters() if each.grad is not None])
    made.train()
    entry = made.state.log_history[0]
    made.accelerator.close()
    assert entry["loss"] == pytest.approx(expected.item(), rel=1e-6)
    assert entry["aux_loss"] == pytest.approx(balance.item(), rel=1e-6)
    assert entry["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)


PAIRS = [{"prompt": f"w{n} w3 w5", "chosen": f" w{n + 2} w7", "rejected": f" w{n + 1} w9 w2"} for n in range(24)]


@with_trl
@in_ranks(cells=tuple((backend,) for backend in BACKENDS), in_turn=True)
def test_dpo_of_trl_is_that_of_its_own_run(backend):
    found = []
    for cfg, rows in ((None, 1), (configured(backend), 2)):
        made = of_trl("DPO", cfg, shared_folder(), PAIRS, per_device_train_batch_size=rows)
        made.train()
        names = ("loss", "grad_norm", "rewards/margins", "logps/chosen", "entropy", "mean_token_accuracy")
        found.append([float(entry[name]) for entry in made.state.log_history for name in names if name in entry])
        if cfg is not None:
            made.accelerator.close()
    assert len(found[0]) == 6 * UPDATES
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(found[0]), rtol=1e-5, atol=1e-6)


JUDGED = [{"prompt": f"w{n} w3 w5", "completion": f" w{n + 2} w{n % 7}", "label": n % 3 > 0} for n in range(24)]


@with_trl
@in_ranks(cells=tuple((backend,) for backend in (BACKENDS if DEEP else BACKENDS[:1])))
def test_kto_of_trl_is_that_of_its_own_run(backend):
    twice = [row for first in range(0, len(JUDGED), ROWS) for row in JUDGED[first : first + ROWS] * 2]
    found = []
    for cfg, data in ((None, twice), (configured(backend), JUDGED)):
        made = of_trl("KTO", cfg, shared_folder(), data)
        made.train()
        names = ("loss", "grad_norm", "kl", "rewards/chosen", "logps/rejected", "logits/chosen", "entropy")
        found.append([float(entry[name]) for entry in made.state.log_history for name in names if name in entry])
        if cfg is not None:
            made.accelerator.close()
    assert len(found[0]) > 5 * UPDATES
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(found[0]), rtol=1e-5, atol=1e-6)


@with_trl
@in_ranks(cells=(("fsdp",),))
def test_a_reward_model_of_trl_is_refused_by_its_head(backend):
    pairs = [{name: row["prompt"] + row[name] for name in ("chosen", "rejected")} for row in PAIRS]
    judge = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SMALL, num_labels=1))
    made = of_trl("Reward", configured(backend), shared_folder(), pairs, judge=judge)
    problem = refused(made.train)
    made.accelerator.close()
    assert "LlamaForSequenceClassification mixes positions" in problem


@with_trl
@in_ranks(cells=(("fsdp",),))
def test_trainers_of_what_they_generate_are_refused(backend):
    import trl
    from test_on_trl import tokenizer

    class Generates(trl.SFTTrainer):
        num_generations = 2

    from unishard.integrations.transformers import UnishardMixin

    base = type("OnUnishard", (UnishardMixin, Generates), {})
    import datasets

    args = arguments(shared_folder(), kind=trl.SFTConfig, bf16=False, max_length=16)
    data = datasets.Dataset.from_list(documents())
    given = {"model": model(), "args": args, "train_dataset": data, "processing_class": tokenizer()}
    problem = refused(base, **given, unishard=configured(backend, method="tensor"))
    assert "parallel.tensor.size: is 2, but OnUnishard trains on what each rank generates" in problem


@with_trl
@in_ranks(cells=(("fsdp",),))
def test_a_forward_that_reads_the_head_needs_all_of_it(backend):
    made = of_trl("SFT", configured(backend, method="tensor"), shared_folder(), documents())
    problem = refused(made.train)
    made.accelerator.close()
    assert "parallel.tensor.size: is 2, but the forward that the trainer has put in place" in problem


@in_ranks(cells=(("fsdp",),))
def test_the_arguments_object_asks_for_it(backend):
    from accelerate import ParallelismConfig

    made = trainer({"backend": backend}, shared_folder(), parallelism_config=ParallelismConfig(cp_size=2))
    section = made.accelerator.config.parallel.sequence
    found = (section.size, section.method, made.accelerator.parallelism_config)
    wrong = ParallelismConfig(cp_size=2, dp_shard_size=2)
    problem = refused(trainer, {"backend": backend}, shared_folder(), parallelism_config=wrong)
    assert found == (2, "allgather", None)
    assert "TrainingArguments.parallelism_config: must multiply to the 2 ranks" in problem
