"""What surrounds a step: groups of the caller's, one visible device for each rank, loaders, two engines."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cells import BACKENDS, races
from harness import config, curve, my_rank, own_share, prepare, train

import unishard
from unishard.distributed import agreement, devices
from unishard.testing import run_ranks
from unishard.testing.models import MODELS, batch

PLAIN = {"CUDA_VISIBLE_DEVICES": ""}
SCRIPT = """
import sys, torch
from harness import config, curve, own_share, prepare, train
with prepare(config(sys.argv[1])) as engine:
    found = curve(train(engine, own_share(2)))
    print("found", engine.device, torch.cuda.device_count(), list(found.losses))
from simulated_cuda import device
assert device.races() == []
"""


def losses(backend: str) -> tuple[list[float], list[str]]:
    with prepare(config(backend)) as engine:
        return list(curve(train(engine, own_share(2))).losses), races()


@pytest.fixture(scope="module")
def wanted() -> dict[str, list[float]]:
    """The losses on the CPU."""
    return {backend: run_ranks(2, losses, backend, env=PLAIN)[0][0] for backend in BACKENDS}


def only_nccl(backend: str) -> tuple[list[float], list[str]]:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    return losses(backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_group_of_the_callers_with_nccl_alone(backend, wanted):
    for found, raced in run_ranks(2, only_nccl, backend, timeout=200):
        assert found == pytest.approx(wanted[backend], rel=1e-6)
        assert raced == []


def in_a_thread() -> str:
    """Ranks compare a fact in a background thread, whose current device is 0."""
    from concurrent.futures import ThreadPoolExecutor

    devices.use(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(agreement.agree, {"fact": 1}, "facts").result()
        return pool.submit(lambda: str(devices.of_numbers())).result()


def test_ranks_agree_in_a_background_thread_on_their_own_devices():
    assert run_ranks(2, in_a_thread) == ["cuda:0", "cuda:1"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_visible_device_for_each_rank(backend, wanted, tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    Path(tmp_path, "script.py").write_text(SCRIPT)
    ranks = []
    for rank in "01":
        own = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "CUDA_VISIBLE_DEVICES": rank,
        }
        environment = os.environ | own | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, str(tmp_path / "script.py"), backend]
        ranks.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    for rank in ranks:
        said, _ = rank.communicate(timeout=200)
        assert rank.returncode == 0, said
        (line,) = (line for line in said.splitlines() if line.startswith("found "))
        _, where, count, found = line.split(" ", 3)
        assert (where, count) == ("cuda:0", "1")
        assert [float(each) for each in found.strip("[]").split(",")] == pytest.approx(wanted[backend], rel=1e-6)


def from_a_pinned_loader() -> tuple[list[float], list[str]]:
    loader = torch.utils.data.DataLoader(own_share(6), batch_size=None, pin_memory=True, num_workers=1)
    with prepare(config("fsdp")) as engine:
        return list(curve(train(engine, loader)).losses), races()  # type: ignore[arg-type]


def from_a_list() -> tuple[list[float], list[str]]:
    with prepare(config("fsdp")) as engine:
        return list(curve(train(engine, own_share(6))).losses), races()


def test_batches_of_a_pinned_loader_arrive_as_they_are():
    loaded, raced = run_ranks(1, from_a_pinned_loader)[0]
    assert raced == []
    assert loaded == run_ranks(1, from_a_list, env=PLAIN)[0][0]


def two_engines() -> tuple[list[float], list[str]]:
    """Both engines train in turns, in one process."""
    found = []
    with prepare(config("fsdp")) as one, prepare(config("deepspeed")) as other:
        for engine in (one, other):
            found += curve(train(engine, own_share(2))).losses
    return found, races()


def test_two_engines_in_one_process(wanted):
    for found, raced in run_ranks(2, two_engines, timeout=200):
        assert found == pytest.approx([*wanted["fsdp"], *wanted["deepspeed"]], rel=1e-6)
        assert raced == []


def batches_of_the_host() -> tuple[list[float], list[str]]:
    """Both engines are given what a loader yields, in a loop without `engine.batches`."""
    found = []
    for backend in BACKENDS:
        with prepare(config(backend)) as engine:
            for micro_batch in own_share(2):
                loss = engine(**micro_batch).loss
                engine.backward(loss)
                engine.step()
                found.append(engine.mean(loss))
    return found, races()


def test_each_engine_moves_a_batch_of_the_host(wanted):
    for found, raced in run_ranks(2, batches_of_the_host, timeout=200):
        assert found == pytest.approx([*wanted["fsdp"], *wanted["deepspeed"]], rel=1e-6)
        assert raced == []


def prompt(rank: int) -> torch.Tensor:
    return batch("llama", rank, 2)["input_ids"][:, : 3 + rank]


def generated() -> tuple[list[list[list[int]]], list[str]]:
    """Both engines go on from a prompt of the host, on each rank with another length."""
    found = []
    for backend in BACKENDS:
        with prepare(config(backend), "llama") as engine:
            engine.eval()
            tokens = prompt(my_rank())
            made = engine.generate(
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=2 + my_rank(), do_sample=False
            )
            found.append(made.tolist())
    return found, races()


def test_each_engine_generates_from_a_prompt_of_the_host():
    for rank, (found, raced) in enumerate(run_ranks(2, generated, timeout=200)):
        plain = MODELS["llama"].build().eval().generate(prompt(rank), max_new_tokens=2 + rank, do_sample=False).tolist()
        assert found == [plain, plain]
        assert raced == []


class Continuing(torch.nn.Module):
    """With a `generate` of its own, which leaves its inputs where they are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed, self.head = torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))  # type: ignore[no-any-return]

    def generate(self, tokens: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], 1)
        return tokens


TOKENS = torch.tensor([[1, 2], [3, 4]])


def generated_by_the_model() -> list[list[list[int]]]:
    found = []
    for backend in BACKENDS:
        with unishard.prepare(Continuing(), config(backend)) as engine:
            found += [generate(TOKENS).tolist() for generate in (engine.eval().generate, engine.module.generate)]
    return found


def test_each_engine_moves_the_inputs_of_a_generate_of_the_models_own():
    assert run_ranks(2, generated_by_the_model, timeout=200) == [[Continuing().generate(TOKENS).tolist()] * 4] * 2


def written(backend: str) -> tuple[list[float], list[str]]:
    """Writes a weight before each forward, and evaluates an average between updates; then writes it without
    training."""
    found = []
    with prepare(config(backend)) as engine:
        ema, weight = engine.weights.average(0.5), engine.weights.read("head.weight") * 2
        for micro_batch in engine.batches(own_share(3)):
            engine.weights.write("head.weight", weight)
            engine.backward(engine(**micro_batch).loss)
            engine.step()
            with ema.weights():
                found.append(engine.eval()(**micro_batch).loss)
            engine.train()
        found = [engine.mean(loss) for loss in found]
    with unishard.prepare(MODELS["mlp"].build(), config(backend), train=False) as engine:
        for turn, micro_batch in enumerate(own_share(3)):
            engine.weights.write("head.weight", weight * turn)
            found.append(engine(**micro_batch).loss)
        return [*found[:3], *map(engine.mean, found[3:])], races()


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_that_are_written_and_averaged_are_computed_with(backend):
    device, cpu = (run_ranks(2, written, backend, timeout=200, env=env) for env in ({}, PLAIN))
    for (found, raced), (same, _) in zip(device, cpu, strict=True):
        assert found == pytest.approx(same, rel=1e-6)
        assert raced == []
