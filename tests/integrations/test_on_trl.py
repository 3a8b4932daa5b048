"""TRL's trainers on unishard's engines: losses and norms are those of TRL's own run with DDP."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

sys.path.append(str(Path(__file__).parents[1] / "ranks"))
from harness import DEEP, my_rank, play, values
from test_on_accelerate import shared_folder
from test_on_trainer import CELLS, CROSSED, PLAIN, SMALL, ended

pytest.importorskip("trl", reason="pip install trl datasets")
CLOSE = {"rtol": 1e-6, "atol": 1e-6}
WORDS = [f"w{number}" for number in range(60)]
KINDS = {
    "sft": CELLS if DEEP else CROSSED[1:],
    "dpo": CROSSED[1:],
    "dpo-peft": CROSSED[:1],
    "grpo": CROSSED[:1],
}
"""The second engine where the first has shown what unishard is asked: the other kinds are TRL's own work."""
if DEEP:
    KINDS |= {"sft-peft": CROSSED[:1], "reward": CROSSED[1:], "dpo-sync": (("deepspeed", "full_shard"),)}
RUNS = tuple((kind, cell) for kind, cells in KINDS.items() for cell in cells)


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<eos>", "<unk>", "<bos>", *WORDS]
    words = Tokenizer(models.WordLevel({name: place for place, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>", "bos_token": "<bos>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def arguments(kind, folder, **options):
    given = {
        "output_dir": folder,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "max_grad_norm": 0.5,
        "bf16": False,
        "lr_scheduler_type": "linear",
        "activation_checkpointing": False,
    }
    return kind(**given | options)


def parts(kind, folder, **options):
    """A trainer's class, its arguments, and what else it takes."""
    import trl
    from datasets import Dataset

    drawn = random.Random(0)

    def words(count):
        return " ".join(drawn.choice(WORDS) for _ in range(count))

    if kind == "sft":
        data = [{"text": words(4 + index % 6)} for index in range(20)]
        return trl.SFTTrainer, arguments(trl.SFTConfig, folder, max_length=32), data and Dataset.from_list(data), {}
    if kind == "grpo":
        data = [{"prompt": words(4)} for _ in range(8)]
        args = arguments(trl.GRPOConfig, folder, max_completion_length=6, num_generations=2, beta=0.04)
        reward = {"reward_funcs": lambda completions, **_: [float(len(set(text.split()))) for text in completions]}
        return trl.GRPOTrainer, args, Dataset.from_list(data), reward
    pairs = [
        {"prompt": words(4), "chosen": " " + words(3 + index % 3), "rejected": " " + words(2 + index % 4)}
        for index in range(16)
    ]
    if kind == "dpo":
        return trl.DPOTrainer, arguments(trl.DPOConfig, folder, max_length=32, **options), Dataset.from_list(pairs), {}
    rows = [{name: row["prompt"] + row[name] for name in ("chosen", "rejected")} for row in pairs]
    return trl.RewardTrainer, arguments(trl.RewardConfig, folder, max_length=32), Dataset.from_list(rows), {}


def model(kind, folder):
    """A model whose reference TRL reads from a folder."""
    import transformers

    transformers.set_seed(0)
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 3}
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **ids))
    if kind == "reward":
        made = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SMALL, **ids, num_labels=1))
    if my_rank() == 0:
        made.save_pretrained(folder)
    torch.distributed.barrier()
    made.config._name_or_path = folder
    return made


def trained(kind, backend, strategy):
    import datasets
    import transformers
    from accelerate.state import AcceleratorState

    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    AcceleratorState._reset_state(True)
    folder = shared_folder()
    kind, _, adapted = kind.partition("-")
    made = model(kind, f"{folder}/model")
    syncs = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.6}
    base, args, data, extra = parts(kind, folder, **syncs if adapted == "sync" else {})
    if adapted == "peft":
        from peft import LoraConfig

        extra["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    if backend != "plain":
        from unishard.integrations.transformers import UnishardMixin

        base = type("OnUnishard", (UnishardMixin, base), {})
        extra["unishard"] = {"backend": backend, "sharding": strategy}
    trainer = base(model=made, args=args, train_dataset=data, processing_class=tokenizer(), **extra)
    transformers.set_seed(1)
    trainer.train()
    ended(trainer)
    names = ("loss", "grad_norm", "rewards/margins", "mean_token_accuracy", "entropy", "reward", "kl", "accuracy")
    return [float(entry[name]) for entry in trainer.state.log_history for name in names if name in entry]


SCENARIOS = (*((trained, (kind, *PLAIN)) for kind in KINDS), *((trained, (kind, *cell)) for kind, cell in RUNS))


@pytest.mark.parametrize(("kind", "cell"), RUNS)
def test_a_trainer_of_trl_trains_as_with_ddp(kind, cell):
    played = play(SCENARIOS)
    found, expected = (values(played[trained, (kind, *each)]) for each in (cell, PLAIN))
    assert len(expected[0]) > 4
    assert_close(torch.tensor(found), torch.tensor(expected), **CLOSE)
