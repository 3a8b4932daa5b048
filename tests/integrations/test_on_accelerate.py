"""A script of Accelerate on unishard's engines: its losses and norms are those of Accelerate's own run with DDP."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

sys.path.append(str(Path(__file__).parents[1] / "ranks"))
from harness import heard, play, refused, values
from harness.training import DEEP, LEFT_OUT

from unishard.testing.cells import BACKENDS

pytest.importorskip("accelerate", reason="pip install 'unishard[accelerate]'")

import accelerate
from accelerate_programs import accelerator, accumulated, epoch, made, model_and_data, parts, weights

STRATEGIES = ("full_shard", "shard_grad_op", "no_shard")
CELLS = tuple(cell for cell in product(BACKENDS, STRATEGIES) if cell not in LEFT_OUT)
PLAIN = ("plain", "")
FILE = "ACCELERATE_UNISHARD_CONFIG"
KINDS = {"fsdp": "FSDP", "deepspeed": "DEEPSPEED"}
CLOSE = {"rtol": 1e-6, "atol": 1e-7}


def by_hand(*cell):
    """Divided and counted by the script, with the next forward in place of a step; nothing clips."""
    acc = accelerator(*cell)
    model, optimizer, loader, _ = parts(acc)
    found = []
    for _ in range(2):
        for turn, batch in enumerate(loader):
            loss = (model(batch["x"]) - batch["y"]).square().mean() / 3
            acc.backward(loss, retain_graph=True)
            found.append(acc.reduce(loss.detach(), "mean").item())
            if (turn + 1) % 3 == 0 or turn + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
    state = weights(acc, model)
    acc.free_memory()
    return found, state


def without_sync(*cell):
    """`no_sync` by the script, and the order forward, zero_grad, backward."""
    acc = accelerator(*cell)
    model, optimizer, loader, _ = parts(acc)
    acc.backward(model(torch.ones(2, 4)).mean())
    optimizer.zero_grad()  # the script thinks better of that loss
    found = []
    for turn, batch in enumerate(loader):
        ends = turn % 3 == 2
        with nullcontext() if ends else acc.no_sync(model):
            loss = (model(batch["x"]) - batch["y"]).square().mean()
            if turn % 3 == 0:
                optimizer.zero_grad()
            acc.backward(loss)
        found.append(acc.reduce(loss.detach(), "mean").item())
        if ends:
            optimizer.step()
    optimizer.zero_grad()
    state = weights(acc, model)
    acc.free_memory()
    return found, state


def shared_folder():
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    return folders[0]


def resumed(backend, strategy):
    """Saved on one engine, continued on both."""
    acc = accelerator(backend, strategy, gradient_accumulation_steps=2)
    each = parts(acc)
    epoch(acc, *each)
    folder = shared_folder()
    acc.save_state(folder)
    further = epoch(acc, *each)
    acc.save_model(each[0], f"{folder}/model")
    acc.free_memory()
    found = []
    for other in BACKENDS:
        acc = accelerator(other, strategy, gradient_accumulation_steps=2)
        each = parts(acc)
        acc.load_state(folder)
        found.append(epoch(acc, *each))
        acc.free_memory()
    acc = accelerator(backend, strategy)
    parts(acc)
    problem = refused(acc.load_state, f"{folder}/model")
    acc.free_memory()
    return further, found, problem, sorted(os.listdir(f"{folder}/model"))


def adapters(*cell):
    """PEFT, with a frozen base."""
    from unishard.testing.features.lora import lora

    acc = accelerator(*cell)
    model = lora()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    rows = torch.randint(0, 16, (8, 8), generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader([{"input_ids": row, "labels": row} for row in rows], batch_size=2)
    model, optimizer, loader = acc.prepare(model, optimizer, loader)
    found = []
    for batch in loader:
        loss = model(**batch).loss
        acc.backward(loss)
        found += [acc.reduce(loss.detach(), "mean").item(), float(acc.clip_grad_norm_(model.parameters(), 0.5))]
        optimizer.step()
        optimizer.zero_grad()
    acc.free_memory()
    return found, {}


def evaluated(backend):
    """A model for evaluation only, beside one that trains; a name and a class stay."""
    acc = accelerator(backend)
    teacher, _ = model_and_data()
    x = torch.ones(2, 4)
    expected = teacher(x).sum().item()
    prepared = acc.prepare_model(teacher, evaluation_mode=True)
    model, *_ = parts(acc)
    found = prepared(x).sum().item()
    names = type(acc.unwrap_model(model)).__name__, isinstance(model, nn.Sequential)
    trains = acc.engine.module is model
    acc.free_memory()
    return found, expected, names, trains


def wrong(backend):
    """What is refused, in words of Accelerate."""
    acc = accelerator(backend)
    model, optimizer, loader, _ = parts(acc)
    batch = next(iter(loader))
    found = {"value": refused(acc.clip_grad_value_, model.parameters(), 1.0)}
    with acc.no_sync(model):
        acc.backward(model(batch["x"]).square().mean())
        found["local"] = refused(optimizer.step)
        assert acc.clip_grad_norm_(model.parameters(), 1.0) is None
    loss = model(batch["x"]).square().mean()
    found["graph"] = refused(acc.backward, loss, create_graph=True)
    acc.backward(loss)
    found["kind"] = refused(acc.clip_grad_norm_, model.parameters(), 1.0, 1)
    found["part"] = refused(acc.clip_grad_norm_, model[0].parameters(), 1.0)
    found["state"] = refused(optimizer.state_dict)
    found["closure"] = refused(optimizer.step, lambda: 0)
    optimizer.train()  # as scripts and the Trainer do for all optimizers
    optimizer.optimizer.train = optimizer.optimizer.eval = lambda: None  # as those of schedulefree have it
    found["schedulefree"] = [refused(optimizer.train), refused(optimizer.eval)]
    del optimizer.optimizer.train, optimizer.optimizer.eval
    optimizer.step()
    second = torch.optim.SGD(model.parameters(), lr=0.1)
    found["second"] = refused(acc.prepare, second)
    acc.free_memory()
    return found


def early(backend):
    """A schedule that is too short for `num_processes` steps an update."""
    acc = accelerator(backend)
    model, data = model_and_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 7))
    model, optimizer, loader, scheduler = acc.prepare(model, optimizer, loader, scheduler)
    with heard() as lines:
        for batch in loader:
            acc.backward(model(batch["x"]).square().mean())
            optimizer.step()
            scheduler.step()
    acc.free_memory()
    return sum("the schedule has ended" in line for line in lines)


AUTO = {
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"},
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "bf16": {"enabled": "auto"},
}
"""As a config of DeepSpeed comes with a model."""


@contextmanager
def launched_with(folder, name):
    """As `accelerate launch` does with a file of DeepSpeed."""
    file = str(Path(folder, f"{name}.json"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", file)
        patch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
        yield


def configured(backend, folder):
    """By a file of unishard or of Accelerate, the environment, or the environment of `accelerate launch`."""
    kind = KINDS[backend]
    own, other = Path(folder, "own.yaml"), Path(folder, "other.yaml")
    launched = {
        "fsdp": {"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"},
        "deepspeed": {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
    }[backend] | {f"ACCELERATE_USE_{kind}": "true", "ACCELERATE_MIXED_PRECISION": "bf16"}
    found = []
    handed = {"UNISHARD_CONFIG": str(own), "UNISHARD_OVERRIDES": '["sharding=full_shard"]'}
    for source, environment in ((own, {}), (other, {}), (None, {FILE: str(own)}), (None, handed), (None, launched)):
        os.environ.update(environment)
        acc = made(source)
        found.append((acc.config.backend, acc.config.sharding.strategy, acc.config.precision.compute))
        found.append((acc.mixed_precision, acc.distributed_type.value))
        for name in environment:
            os.environ.pop(name, None)
    problems = [refused(made, None), refused(made, own, mixed_precision="fp16"), refused(made, own, fsdp_plugin=1)]
    os.environ[f"ACCELERATE_USE_{kind}"] = "true"
    problems.append(refused(made, own))
    del os.environ[f"ACCELERATE_USE_{kind}"]
    steps = {"backend": backend, "training": {"gradient_accumulation_steps": 3}}
    problems.append(refused(made, steps, gradient_accumulation_steps=2))
    problems.append(refused(made, own, dynamo_backend="inductor"))
    with launched_with(folder, "open"):
        acc = made(None, gradient_accumulation_steps=2, mixed_precision="bf16")
    acc.prepare(torch.utils.data.DataLoader([0] * 12, batch_size=3))
    training = acc.config.training
    found.append((training.micro_batch_size, training.gradient_accumulation_steps, acc.config.precision.compute))
    with launched_with(folder, "open"):
        found.append(made(None).config.precision.compute)
    for name in ("off", "unclear"):
        with launched_with(folder, name):
            problems.append(refused(made, None, mixed_precision="bf16"))
    for hook in ("no", "fp16"):
        with heard() as lines:
            made(own, kwargs_handlers=[accelerate.DistributedDataParallelKwargs(comm_hook=hook)])
        problems.append(" ".join(lines))
    return found, problems, made(steps).gradient_accumulation_steps


CROSSED = CELLS if DEEP else (("fsdp", "full_shard"), ("deepspeed", "shard_grad_op"))
"""Each engine."""
RUNS = {accumulated: CELLS, by_hand: CROSSED, without_sync: CROSSED, adapters: CROSSED}
RESUMED = tuple(cell for cell in CROSSED if cell[1] != "no_shard")
ALONE = (evaluated, wrong, early)
SCENARIOS = (
    *((run, cell) for run, cells in RUNS.items() for cell in (PLAIN, *cells)),
    *((resumed, cell) for cell in RESUMED),
    *((alone, (backend,)) for alone in ALONE for backend in BACKENDS),
)


def of(scenario, *arguments):
    return values(play(SCENARIOS)[scenario, arguments])


@pytest.mark.parametrize(("run", "cell"), [(run, cell) for run, cells in RUNS.items() for cell in cells])
def test_a_script_trains_as_with_ddp(run, cell):
    for (found, state), (expected, expected_state) in zip(of(run, *cell), of(run, *PLAIN), strict=True):
        assert_close(torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64), **CLOSE)
        assert_close(state, expected_state, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cell", RESUMED, ids="-".join)
def test_a_run_continues_on_either_engine(cell):
    for further, found, problem, files in of(resumed, *cell):
        for other in found:
            assert_close(other, further, **CLOSE)
        assert "was not saved by unishard's Accelerator" in problem
        assert files == ["model.safetensors"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_for_evaluation_has_an_engine_of_its_own(backend):
    for found, expected, names, trains in of(evaluated, backend):
        assert found == pytest.approx(expected, rel=1e-6)
        assert names == ("Sequential", True)
        assert trains


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_the_engines_cannot_do_is_one_error(backend):
    for found in of(wrong, backend):
        assert "call clip_grad_norm_" in found["value"]
        assert "remove no_sync or LocalSGD" in found["local"]
        assert "norm_type=1" in found["kind"]
        assert "create_graph=" in found["graph"]
        assert "pass model.parameters()" in found["part"]
        assert "no closure" in found["closure"]
        assert all("AdamW writes other weights into the parameters" in each for each in found["schedulefree"])
        assert "ContractError" in found["state"]
        assert "give each model one optimizer" in found["second"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_schedule_that_ends_early_is_said_once(backend):
    assert of(early, backend) == [1, 1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_config_comes_from_many_places(backend, tmp_path):
    engine = {
        "fsdp": "fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true}",
        "deepspeed": "deepspeed_config: {zero_stage: 3}",
    }[backend]
    Path(tmp_path, "own.yaml").write_text(f"backend: {backend}\nsharding: shard_grad_op\nprecision: bf16\n")
    Path(tmp_path, "other.yaml").write_text(f"distributed_type: {KINDS[backend]}\nmixed_precision: bf16\n{engine}\n")
    for name, more in (("open", {}), ("off", {"bf16": {"enabled": False}}), ("unclear", {"gradient_clipping": "yes"})):
        Path(tmp_path, f"{name}.json").write_text(json.dumps(AUTO | more))
    (found, problems, steps), other = values(
        play(((configured, (backend, str(tmp_path))),))[configured, (backend, str(tmp_path))]
    )
    assert (found, problems, steps) == other
    assert found.pop() == "fp32"
    assert found.pop() == (3, 2, "bf16")
    full = (backend, "full_shard", "bf16")
    assert found[::2] == [(backend, "shard_grad_op", "bf16"), full, (backend, "shard_grad_op", "bf16"), full, full]
    assert found[1::2] == [("bf16", "MULTI_CPU")] * 5
    none, precision, plugin, launched, accumulation, compiled, off, unclear, harmless, handler = problems
    assert "precision.compute: is fp32, but the framework's arguments say bf16" in off
    assert "unclear.json" in unclear
    assert "gradient_clipping" in unclear
    assert f"set {FILE}=train.yaml" in none
    assert "precision.compute: is bf16, but the framework's arguments say fp16" in precision
    assert "fsdp_plugin: is not for unishard's Accelerator" in plugin
    assert "start the script without FSDP and DeepSpeed" in launched
    assert "training.gradient_accumulation_steps: is 3, but the framework's arguments say 2" in accumulation
    assert "set compile in the config" in compiled
    assert harmless == ""
    assert "no use for ddp_handler" in handler
    assert steps == 3
