"""What people do with transformers' Trainer in one process that no launcher has started, as in a notebook."""

from __future__ import annotations

import copy
import os
import socket
import sys
import tempfile
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "ranks"))
from forking import in_a_fork
from harness import in_turn
from test_on_trainer import arguments, collate, ended, history, model, rows

from unishard.testing.cells import BACKENDS

pytest.importorskip("accelerate", reason="pip install 'unishard[trainer]'")
transformers = pytest.importorskip("transformers", reason="pip install 'unishard[trainer]'")

DATA = {"train_dataset": rows(12), "eval_dataset": rows(3), "data_collator": collate}


def made(backend, folder, given=None, cfg=None, **options):
    args = arguments(folder, num_train_epochs=1, **options)
    given = given or model("plain")
    if backend == "plain":
        return transformers.Trainer(given, args, **DATA)
    from unishard.integrations.transformers import UnishardTrainer

    own = {"backend": backend, "sharding": "full_shard"} if cfg is None else cfg
    return UnishardTrainer(given, args, **DATA, unishard=own)


def weights(of):
    return {name: value.detach().clone() for name, value in of.state_dict().items()}


def every(of):
    return [name for name, _ in of.named_parameters()]


def habits(backend):
    """Everything in one process, as in a notebook."""
    found, folder = {}, tempfile.mkdtemp()
    trainer = made(backend, folder, save_strategy="steps", save_steps=3, fp16_full_eval=backend != "plain")
    trainer.train()
    found["history"] = history(trainer)
    found["weights"] = weights(trainer.model)
    found["optimizer"] = trainer.optimizer.state_dict()["state"][0]["exp_avg"].clone()
    found["copy"] = weights(copy.deepcopy(trainer.model))
    trainer.model.save_pretrained(f"{folder}/saved")
    found["saved"] = weights(transformers.LlamaForCausalLM.from_pretrained(f"{folder}/saved"))
    found["eval"] = trainer.evaluate()["eval_loss"]
    found["flag"] = trainer.args.fp16_full_eval
    second = made(backend, folder, trainer.model, save_strategy="steps", save_steps=3)
    second.get_decay_parameter_names = every  # the group without weight decay is empty
    second.train()
    found["again"] = history(second)
    third = made(backend, tempfile.mkdtemp())
    third.get_decay_parameter_names = every
    third.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    found["resumed"] = weights(third.model)
    if backend != "plain":
        ended(second)
        ended(third)
    return found


def told(backend):
    """A config in TrainingArguments, by its file; and one whose model is not a plain one even here."""
    from unishard.integrations.transformers import UnishardTrainer, UnishardTrainingArguments

    folder = Path(tempfile.mkdtemp())
    (folder / "train.yaml").write_text(f"backend: {backend}\nsharding: full_shard\nprecision: bf16\n")
    args = UnishardTrainingArguments(
        str(folder), unishard=str(folder / "train.yaml"), max_steps=1, report_to="none", use_cpu=True
    )
    trainer = UnishardTrainer(model("plain"), args, **DATA)
    trainer.train()
    cfg = trainer.accelerator.config
    ended(trainer)
    return cfg.backend, cfg.sharding.strategy


def of_deepspeed_itself():
    """Trained by DeepSpeed under transformers, and continued on both engines, started as by torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    folder, stage = tempfile.mkdtemp(), {"zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True}
    sizes = dict.fromkeys(
        ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
    )
    own = {"deepspeed": stage | sizes, "use_cpu": False, "save_strategy": "steps", "save_steps": 2}
    before = made("plain", folder, **own)
    before.train()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED")  # of Accelerate itself
    found = []
    for backend in BACKENDS:
        trainer = made(backend, tempfile.mkdtemp())
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
        found.append(history(trainer))
        ended(trainer)
    return history(before), found


@pytest.fixture(scope="module")
def plain():
    return in_a_fork(habits, "plain")


@pytest.mark.ranks
@in_turn
def test_a_process_of_its_own_trains_as_without_unishard(backend, plain):
    found = in_a_fork(habits, backend)
    for name in ("history", "again", "eval"):
        assert found[name] == pytest.approx(plain[name], rel=1e-6, abs=1e-7), name
    for name in ("weights", "copy", "saved", "resumed", "optimizer"):
        torch.testing.assert_close(found[name], plain[name], rtol=1e-5, atol=1e-6)
    assert found["flag"]  # whose evaluation was that of the plain run, in fp32


@pytest.mark.ranks
@in_turn
def test_training_arguments_name_the_config(backend):
    assert in_a_fork(told, backend) == (backend, "full_shard")


@pytest.mark.deep  # DeepSpeed itself compiles an operator for the CPU, for minutes
@pytest.mark.ranks
def test_a_run_of_deepspeed_under_transformers_continues_on_either_engine():
    whole, found = in_a_fork(of_deepspeed_itself)
    for other in found:
        assert other == pytest.approx(whole, rel=1e-6, abs=1e-7)
