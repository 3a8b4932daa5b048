"""transformers' Trainer on unishard's engines: losses and norms are those of its own run with DDP."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

sys.path.append(str(Path(__file__).parents[1] / "ranks"))
from harness import DEEP, OTHER, my_rank, play, refused, values
from test_on_accelerate import shared_folder

from unishard import formats
from unishard.checkpoint import manifest
from unishard.testing.cells import BACKENDS

pytest.importorskip("accelerate", reason="pip install 'unishard[trainer]'")
transformers = pytest.importorskip("transformers", reason="pip install 'unishard[trainer]'")

STRATEGIES = ("full_shard", "shard_grad_op")
CELLS = tuple((backend, strategy) for backend in BACKENDS for strategy in STRATEGIES)
PLAIN = ("plain", "")
CROSSED = (CELLS[0], CELLS[3])
"""Each engine, and each strategy."""
CLOSE = {"rtol": 1e-6, "atol": 1e-7}
SMALL = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
BEST = {
    "load_best_model_at_end": True,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "save_total_limit": 2,
}
VARIANTS = {
    "chunked": {},
    "plain": {},
    "smooth": {"label_smoothing_factor": 0.1},
    "unclipped": {"max_grad_norm": 0.0},
    "means": {"average_tokens_across_devices": False},
    "recomputed": {"activation_checkpointing": True},
    "tied": {},
    "peft": {},
    "best": BEST | {"activation_checkpointing": True},
    "peft-best": BEST,
    "weights-best": BEST | {"save_only_model": True},
}


REPEATED = ("unclipped", "tied", "recomputed", "weights-best")
"""Of which others, or the conformance suite, have each part."""
if not DEEP:
    VARIANTS = {variant: options for variant, options in VARIANTS.items() if variant not in REPEATED}


def rows(count=28):
    made = torch.Generator().manual_seed(0)
    ids = [torch.randint(1, 64, (4 + index % 5,), generator=made) for index in range(count)]
    return [{"input_ids": each, "labels": each.clone(), "attention_mask": torch.ones_like(each)} for each in ids]


def collate(given):
    longest = max(len(row["input_ids"]) for row in given)
    empty = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    pad = torch.nn.functional.pad
    return {
        name: torch.stack([pad(row[name], (0, longest - len(row[name])), value=value) for row in given])
        for name, value in empty.items()
    }


def model(variant):
    transformers.set_seed(0)
    config = transformers.LlamaConfig(**SMALL, tie_word_embeddings=variant == "tied")
    made = transformers.LlamaForCausalLM(config)
    if variant.startswith("peft"):
        import peft

        return peft.get_peft_model(made, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_alpha=8))
    return made


def arguments(folder, **options):
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    given = {
        "output_dir": folder,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "num_train_epochs": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "weight_decay": 0.1,
    }
    return transformers.TrainingArguments(**given | options)


def trainer(backend, strategy, folder, variant="plain", *, base=None, given=None, told=0, **options):
    transformers.logging.set_verbosity_error()
    args = arguments(folder, **VARIANTS[variant] | options)
    data = {"train_dataset": rows(), "eval_dataset": rows(7), "data_collator": collate}
    base, given = base or transformers.Trainer, given or model(variant)
    if backend == "plain":
        return base(given, args, **data)
    from unishard.integrations.transformers import UnishardMixin

    kind = type("OnUnishard", (UnishardMixin, base), {})
    config = {"backend": backend, "sharding": strategy} if backend else None
    if told:
        overrides = f"backend={backend}", f"sharding.strategy={strategy}", f"scheduler.total_steps={told}"
        config = formats.translate(args.to_dict(), "unishard", from_="hf", overrides=overrides).document
    if config and variant == "chunked":
        config["training"] = {"loss_chunk_tokens": 5}
    return kind(given, args, **data, unishard=config)


class Looks(transformers.TrainerCallback):
    """What a callback sees before the update: the norm of the gradients."""

    def __init__(self):
        self.norms = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **others):
        seen = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
        full = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in seen]
        self.norms.append(torch.stack(full).norm().item())


def history(made):
    """Losses, norms and rates that the Trainer has logged."""
    names = ("loss", "eval_loss", "grad_norm", "learning_rate", "total_flos")
    return [float(entry[name]) for entry in made.state.log_history for name in names if name in entry]


def ended(made):
    if hasattr(made.accelerator, "engine_of"):
        made.accelerator.close()


def trained(variant, backend, strategy):
    folder = shared_folder()
    epochs = 2 if variant == "plain" else 1
    told = 4 * epochs if variant in ("plain", "best") else 0
    made = trainer(backend, strategy, folder, variant, num_train_epochs=epochs, told=told)
    looks = Looks()
    if variant == "plain":
        made.add_callback(looks)
    made.train()
    found = history(made) + looks.norms
    found.append(made.evaluate()["eval_loss"])
    made.save_model(f"{folder}/final")
    files = sorted(os.listdir(f"{folder}/final")) if my_rank() == 0 else []
    again = transformers.LlamaForCausalLM.from_pretrained if not variant.startswith("peft") else None
    total = 0.0
    if my_rank() == 0 and again is not None:
        total = sum(value.double().abs().sum().item() for value in again(f"{folder}/final").state_dict().values())
    ended(made)
    return found, files, total


def twice(backend, strategy):
    """Evaluated, trained, evaluated, trained again."""
    made = trainer(backend, strategy, shared_folder(), num_train_epochs=1)
    found = [made.evaluate()["eval_loss"]]
    if backend == "plain":  # the Trainer does not synchronize gradients of a model that it has evaluated before
        made = trainer(backend, strategy, shared_folder(), num_train_epochs=1)
    made.train()
    found += [*history(made), made.evaluate()["eval_loss"]]
    made.train()
    found += [*history(made), made.evaluate()["eval_loss"]]
    ended(made)
    return found


def resumed(backend, strategy):
    """Stopped in the middle of an epoch on one engine, continued on the other one."""
    folder = shared_folder()
    made = trainer(backend, strategy, folder, save_strategy="steps", save_steps=3)
    made.train()
    whole = history(made)
    ended(made)
    made = trainer(OTHER[backend], strategy, shared_folder())
    made.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    found = history(made)
    ended(made)
    return whole, found


def reads_late(folder, read=manifest.read):
    """When rank 0 may have gone on, to remove what it has converted."""
    time.sleep(0.2)
    return read(folder)


def native():
    """Stopped in the middle of an epoch without unishard, continued on both engines."""
    folder = shared_folder()
    made = trainer(*PLAIN, folder, save_strategy="steps", save_steps=3)
    made.train()
    whole, found = history(made), []
    for backend, strategy in CROSSED:
        made = trainer(backend, strategy, shared_folder())
        with pytest.MonkeyPatch.context() as patch:
            if my_rank():
                patch.setattr(manifest, "read", reads_late)
            made.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
        found.append(history(made))
        ended(made)
    made = trainer(*CROSSED[0], shared_folder(), weight_decay=0.0)
    made.create_optimizer = lambda: setattr(made, "optimizer", torch.optim.AdamW(made.model.parameters()))
    others = refused(made.train, resume_from_checkpoint=f"{folder}/checkpoint-3")
    ended(made)
    return whole, found, others


def again(backend, strategy):
    """A Trainer that gets the model of another one, and its folder."""
    folder = shared_folder()
    first = trainer(backend, strategy, folder, num_train_epochs=1, save_strategy="steps", save_steps=3)
    first.train()
    second = trainer(
        backend, strategy, folder, num_train_epochs=1, save_strategy="steps", save_steps=3, given=first.model
    )
    second.train()
    ended(second)
    third = trainer(backend, strategy, shared_folder(), num_train_epochs=2)
    third.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    ended(third)
    return history(first), history(second), history(third)


def sequences(backend, strategy):
    """Seq2SeqTrainer, which generates in its evaluation."""
    transformers.set_seed(0)
    small = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(**small, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, dropout_rate=0.0)
    args = arguments(shared_folder())
    options = {k: v for k, v in vars(args).items() if k in ("output_dir", "per_device_train_batch_size")}
    args = transformers.Seq2SeqTrainingArguments(
        **options,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        learning_rate=1e-2,
        max_steps=4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        predict_with_generate=True,
        generation_max_length=6,
    )
    kind, extra = transformers.Seq2SeqTrainer, {}
    if backend != "plain":
        from unishard.integrations.transformers import UnishardMixin

        kind = type("OnUnishard", (UnishardMixin, kind), {})
        extra = {"unishard": {"backend": backend, "sharding": strategy}}
    data = {"train_dataset": rows(), "eval_dataset": rows(7), "data_collator": collate}
    made = kind(transformers.T5ForConditionalGeneration(config), args, **data, **extra)
    made.train()
    generated = made.predict(rows(7)).predictions
    ended(made)
    return [*history(made), float(generated.sum()), float(generated.shape[0])]


def of_deepspeed(**others):
    """TrainingArguments with a config of DeepSpeed that has a schedule and an optimizer of its own."""
    adam = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    warmup = {"warmup_min_lr": 0.0, "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}
    written = {
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": adam},
        "scheduler": {"type": "WarmupDecayLR", "params": {**warmup, "warmup_type": "linear"}},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }
    return {"deepspeed": written | others, "max_steps": 5}


def of_its_arguments():
    """Trained as a config of DeepSpeed says."""
    made = trainer("", "", shared_folder(), **of_deepspeed())
    made.train()
    groups = [(len(group["params"]), group["weight_decay"]) for group in made.accelerator.engine.optimizer.param_groups]
    rates = [entry["learning_rate"] for entry in made.state.log_history if "learning_rate" in entry]
    ended(made)
    return groups, rates


def translated():
    """`fsdp` of TrainingArguments, and what contradicts."""
    from unishard.integrations.transformers import UnishardTrainer

    def make(unishard=None, **options):
        return UnishardTrainer(model("plain"), arguments(shared_folder(), **options), unishard=unishard)

    wrapped = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    cfg = make(fsdp=True, fsdp_config=wrapped, bf16=True).accelerator.config
    found = cfg.backend, cfg.sharding.strategy, [*cfg.sharding.units], cfg.precision.compute
    own = {"backend": "fsdp"}
    found += (make(**of_deepspeed()).accelerator.config.sharding.strategy,)
    return found, [
        refused(make),
        refused(make, own, fsdp=True, fsdp_config=wrapped),
        refused(make, **of_deepspeed(gradient_clipping=2.0)),
        refused(make, {**own, "training": {"gradient_clipping": 2.0}}),
        refused(make, {**own, "precision": "fp32"}, bf16=True),
        refused(make, {**own, "training": {"loss_chunk_tokens": 8}}, label_smoothing_factor=0.1),
        refused(make, {**own, **OTHERWISE}, optim="adafactor"),
        refused(make, {**own, "activation_checkpointing": "selective"}, activation_checkpointing=True),
        refused(make, {**own, "checkpoint": {"dir": "runs/x", "on_existing": "resume"}}),
        refused(trainer("fsdp", "no_shard", shared_folder(), told=7).train),
    ]


OTHERWISE = {
    "training": {"micro_batch_size": 4, "seed": 1, "nonfinite": "raise"},
    "optimizer": {"name": "adamw", "lr": 0.1, "weight_decay": 0.1},
    "scheduler": {"name": "linear", "total_steps": 10},
}
"""Than the arguments, but for the weight decay."""


ON_BOTH = ("plain", "best")
"""The other variants change what the Trainer does, and not what the engine is asked."""


def cells_of(variant):
    if DEEP:
        return CELLS
    return CROSSED if variant in ON_BOTH else CROSSED[len(variant) % 2 :][:1]


ALONE = {twice: CROSSED if DEEP else CROSSED[:1], sequences: CROSSED if DEEP else CROSSED[1:]}
RUNS = tuple((variant, cell) for variant in VARIANTS for cell in cells_of(variant))
SCENARIOS = (
    *((trained, (variant, *PLAIN)) for variant in VARIANTS),
    *((trained, (variant, *cell)) for variant, cell in RUNS),
    *((run, cell) for run in ALONE for cell in (PLAIN, *ALONE[run])),
    *((run, cell) for run in (resumed, again) for cell in CROSSED),
    (of_its_arguments, ()),
    (native, ()),
    (translated, ()),
)


def of(scenario, *given):
    return values(play(SCENARIOS)[scenario, given])


def alike(found, expected):
    assert_close(torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64), **CLOSE)


@pytest.mark.parametrize(("variant", "cell"), RUNS)
def test_the_trainer_trains_as_with_ddp(variant, cell):
    for (found, files, total), (expected, expected_files, expected_total) in zip(
        of(trained, variant, *cell), of(trained, variant, *PLAIN), strict=True
    ):
        alike(found, expected)
        assert files == expected_files
        assert total == pytest.approx(expected_total, rel=1e-6)


@pytest.mark.parametrize(("run", "cell"), [(run, cell) for run, cells in ALONE.items() for cell in cells])
def test_the_trainer_evaluates_and_trains_again(run, cell):
    for found, expected in zip(of(run, *cell), of(run, *PLAIN), strict=True):
        alike(found, expected)


@pytest.mark.parametrize("cell", CROSSED, ids="-".join)
def test_a_run_continues_on_the_other_engine(cell):
    for whole, found in of(resumed, *cell):
        alike(found, whole)


def test_a_run_without_unishard_continues_on_either_engine():
    for whole, found, others in of(native):
        for other in found:
            alike(other, whole)
        assert "has groups of" in others


def test_a_trainer_gets_the_model_and_the_folder_of_another_one():
    fsdp, deepspeed = (of(again, *cell) for cell in CROSSED)
    for found, expected in zip(fsdp, deepspeed, strict=True):
        first, second, third = found
        for each, other in zip(found, expected, strict=True):
            alike(each, other)
        assert second[0] < first[0]  # the weights
        assert third[: len(second) // 2] == second[: len(second) // 2]  # the folder


def test_a_config_of_deepspeed_says_the_optimizer_and_the_schedule():
    for groups, rates in of(of_its_arguments):
        assert [decay for _, decay in groups] == [0.1]  # of all parameters, as DeepSpeed's does
        assert rates == pytest.approx([0.0, 0.0, 0.005, 0.01, 0.02 / 3])  # those of its WarmupDecayLR


def test_the_arguments_of_the_trainer_are_translated_or_contradict():
    for found, messages in of(translated):
        none, both, contradicted, clipping, precision, smoothed, otherwise, recomputed, resumes, longer = messages
        assert found == ("fsdp", "full_shard", ["LlamaDecoderLayer"], "bf16", "shard_grad_op")
        assert "no config" in none
        assert "TrainingArguments.fsdp: is set beside a config of unishard" in both
        assert "TrainingArguments.deepspeed: contradicts other arguments: - ds gradient_clipping=2.0" in contradicted
        assert "training.gradient_clipping: is 2.0, but TrainingArguments.max_grad_norm says 0.5" in clipping
        assert "precision.compute: is fp32, but the framework's arguments say bf16" in precision
        assert "leave it or training.loss_chunk_tokens out" in smoothed
        for line in (
            "training.micro_batch_size: is 4, but TrainingArguments.per_device_train_batch_size says 2",
            "training.seed: is 1, but TrainingArguments.seed says 42",
            "optimizer.name: is adamw, but TrainingArguments.optim says adafactor",
            "optimizer.lr: is 0.1, but TrainingArguments.learning_rate says 0.01",
            "scheduler.name: is linear, but TrainingArguments.lr_scheduler_type says cosine",
        ):
            assert line in otherwise
        assert "weight_decay" not in otherwise
        assert "nonfinite" not in otherwise
        assert "activation_checkpointing: is selective, but TrainingArguments says full" in recomputed
        assert "pass resume_from_checkpoint" in resumes
        assert "scheduler.total_steps: is 7, but TrainingArguments says 8" in longer
