"""Habits of real scripts: what they save and where, and schedules that change more than rates."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

sys.path.append(str(Path(__file__).parents[1] / "ranks"))
from harness import DEEP, my_rank, play, refused, values

from unishard.testing.cells import BACKENDS

pytest.importorskip("accelerate", reason="pip install 'unishard[trainer]'")
pytest.importorskip("transformers", reason="pip install 'unishard[trainer]'")

import transformers
from accelerate_programs import accelerator, model_and_data, parts
from test_on_accelerate import shared_folder
from test_on_trainer import ended, history, model, rows, trainer

CLOSE = {"rtol": 1e-6, "atol": 1e-7}


def saved(backend, adapted):
    """As transformers' scripts without a Trainer save at their end, and as they do with `get_state_dict`."""
    transformers.logging.set_verbosity_error()
    acc, made = accelerator(backend), model("plain")
    if adapted:
        import peft

        made = peft.get_peft_model(made, peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    optimizer = torch.optim.AdamW([each for each in made.parameters() if each.requires_grad], lr=1e-2)
    made, optimizer = acc.prepare(made, optimizer)
    row = {name: value[None] for name, value in rows(1)[0].items()}
    acc.backward(made(**row).loss)
    optimizer.step()
    folder, options = shared_folder(), {"is_main_process": acc.is_main_process, "save_function": acc.save}
    whole = acc.unwrap_model(made)
    whole.save_pretrained(f"{folder}/plain", **options)
    whole.save_pretrained(f"{folder}/given", **options, state_dict=acc.get_state_dict(made))
    acc.free_memory()
    if my_rank():
        return []
    from safetensors.torch import load_file

    file = "adapter_model.safetensors" if adapted else "model.safetensors"
    return [load_file(f"{folder}/{name}/{file}") for name in ("plain", "given")]


def again(backend):
    """Saved in one folder again and again, also by a later run, which then continues from there."""
    folder, found = shared_folder(), []
    for epochs in (2, 1):
        acc = accelerator(backend)
        model, optimizer, loader, _ = parts(acc)
        for _ in range(epochs):
            for batch in loader:
                acc.backward((model(batch["x"]) - batch["y"]).square().mean())
                optimizer.step()
            acc.save_state(folder)
        found.append(len([*Path(folder, "unishard_0").glob("step-*")]))
        acc.free_memory()
    acc = accelerator(backend)
    parts(acc)
    acc.load_state(folder)
    found.append(acc.engine.resumed.step)
    acc.free_memory()
    return found


def cycle(acc):
    """A schedule that changes betas too."""
    model, data = model_and_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-2, total_steps=60)
    return acc.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=2), scheduler)


def epoch(acc, model, optimizer, loader, scheduler):
    found = []
    for batch in loader:
        loss = (model(batch["x"]) - batch["y"]).square().mean()
        acc.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        found.append(acc.reduce(loss.detach(), "mean").item())
    return found


def cycled(backend, other):
    acc, folder = accelerator(backend), shared_folder()
    given = cycle(acc)
    epoch(acc, *given)
    acc.save_state(folder)
    whole = epoch(acc, *given)
    acc.free_memory()
    acc = accelerator(other)
    given = cycle(acc)
    acc.load_state(folder)
    found = epoch(acc, *given)
    acc.free_memory()
    return whole, found


def passed(folder, backend, **options):
    """A Trainer with an optimizer and a schedule of its script."""
    given = model("plain")
    made = trainer(backend, "full_shard", folder, given=given, **options)
    optimizer = torch.optim.AdamW(given.parameters(), lr=1e-2)
    made.optimizer, made.lr_scheduler = optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-2, total_steps=20)
    return made


def continued(backend):
    folder = shared_folder()
    made = passed(folder, backend, save_strategy="steps", save_steps=3)
    made.train()
    whole = history(made)
    ended(made)
    made = passed(shared_folder(), backend)
    made.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    found = history(made)
    ended(made)
    return whole, found


def clipped(backend):
    """By a list of parameters that is older than `prepare`, and after a forward that has gathered them."""
    acc = accelerator(backend)
    model, data = model_and_data()
    before = [*model.parameters()]
    model, optimizer = acc.prepare(model, torch.optim.SGD(before, lr=0.1))
    x = torch.stack([each["x"] for each in data[:4]])
    norms = []
    for given in (lambda: before, model.parameters):
        acc.backward(model(x).square().mean())
        model.eval()
        model(x)
        model.train()
        norms.append(float(acc.clip_grad_norm_(given(), 1.0)))
        problem = refused(acc.clip_grad_norm_, before[1:], 1.0)
        optimizer.zero_grad()
    acc.free_memory()
    return norms, problem


def refusals(backend):
    acc, folder = accelerator(backend), shared_folder()
    model, optimizer, loader, _ = parts(acc)
    acc.backward(model(next(iter(loader))["x"]).mean())
    found = [refused(acc.save_state, f"{folder}/new"), os.path.exists(f"{folder}/new")]
    found.append(refused(acc.join_uneven_inputs([model]).__enter__))
    optimizer.zero_grad()
    acc.save_state(f"{folder}/new")
    acc.free_memory()
    return found


IN_TURN = {
    run: BACKENDS if DEEP else BACKENDS[number % 2 :][:1]
    for number, run in enumerate((again, continued, clipped, refusals))
}
SAVED = tuple((backend, backend == "fsdp") for backend in BACKENDS)
SAVED += tuple((backend, not adapted) for backend, adapted in SAVED if DEEP)
CYCLED = (BACKENDS, BACKENDS[::-1]) if DEEP else (BACKENDS,)
SCENARIOS = (
    *((saved, each) for each in SAVED),
    *((cycled, each) for each in CYCLED),
    *((run, (backend,)) for run, backends in IN_TURN.items() for backend in backends),
)


def of(scenario, *arguments):
    return values(play(SCENARIOS)[scenario, arguments])


@pytest.mark.parametrize(("backend", "adapted"), SAVED)
def test_a_model_saves_itself(backend, adapted):
    plain, given = of(saved, backend, adapted)[0]
    assert_close(plain, given, rtol=0, atol=0)
    assert any("lm_head" in name for name in plain)


@pytest.mark.parametrize("backend", IN_TURN[again])
def test_a_folder_holds_the_last_state_alone(backend):
    assert of(again, backend)[0] == [1, 1, 7]


@pytest.mark.parametrize("cell", CYCLED, ids="-".join)
def test_a_schedule_of_more_than_rates_continues(cell):
    for whole, found in of(cycled, *cell):
        assert_close(found, whole, **CLOSE)


@pytest.mark.parametrize("backend", IN_TURN[continued])
def test_a_trainer_continues_with_an_optimizer_of_the_script(backend):
    for whole, found in of(continued, backend):
        assert_close(found, whole, **CLOSE)


@pytest.mark.parametrize("backend", IN_TURN[clipped])
def test_parameters_are_known_by_what_they_were(backend):
    for (before, now), problem in of(clipped, backend):
        assert before == pytest.approx(now, rel=1e-6)
        assert "pass model.parameters()" in problem


@pytest.mark.parametrize("backend", IN_TURN[refusals])
def test_what_cannot_be_had_is_said(backend):
    for window, there, uneven in of(refusals, backend):
        assert "save_state was called between backward and optimizer.step()" in window
        assert not there
        assert "leave even_batches on" in uneven
