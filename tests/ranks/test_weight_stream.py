"""`engine.weights.stream` has the tensors that `save_pretrained` writes, one collective for a bucket of them, and a
server in another process loads them while training goes on."""

from __future__ import annotations

import warnings
import weakref
from multiprocessing.connection import Client, Listener
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from harness import BACKENDS, PAIRS, checked, in_ranks, my_rank, own_share, play, share, train, values
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

import unishard
from unishard.testing import run_ranks
from unishard.testing.models import llama

SIZES = {
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
}


def mixtral():
    """Holds the experts of a layer in one tensor; its files hold each alone."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(1)
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=3))


def tied():
    return llama(tie_word_embeddings=True)


MODELS = {"mixtral": mixtral, "tied": tied}


def adapted(model):
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=3, lora_alpha=8, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        torch.manual_seed(5)
        return get_peft_model(model, adapters)


def saved_by_transformers(model, root, name):
    """The tensors of its file."""
    folder = f"{root}/{name}"
    if my_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    return load_file(f"{folder}/model.safetensors")


def compared(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert_close(found[name], value, **tolerance, msg=name)


EXACT = {"rtol": 0, "atol": 0}


@in_ranks(cells=tuple((model, *pair) for model in MODELS for pair in PAIRS))
def test_names_shapes_and_values_are_those_of_save_pretrained(model, backend, strategy, root):
    make = MODELS[model]
    with unishard.prepare(make(), checked(backend, strategy)) as engine:
        found = [dict(engine.weights.stream(dtype=dtype, bucket_bytes=4096)) for dtype in (None, "bf16")]
        own = dict(engine.weights.stream(names="model"))
        expected = [saved_by_transformers(plain, root, str(plain.dtype)) for plain in (make(), make().bfloat16())]
    for each, wanted in zip(found, expected, strict=True):
        compared(each, wanted, **EXACT)
    compared(own, {name: parameter.detach() for name, parameter in make().named_parameters()}, **EXACT)


@in_ranks(cells=tuple((model, *pair) for model in MODELS for pair in PAIRS if pair[1] == "full_shard"))
def test_merged_adapters_are_those_of_peft(model, backend, strategy, root):
    make = MODELS[model]
    with unishard.prepare(adapted(make()), checked(backend, strategy)) as engine:
        found = dict(engine.weights.stream(merged=True, bucket_bytes=4096))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            merged = adapted(make()).merge_and_unload()
        expected = saved_by_transformers(merged, root, "merged")
        together = dict(engine.weights.stream())
    compared(found, expected, rtol=1e-5, atol=1e-6)
    assert any("lora_A" in name for name in together)


class Watched:
    """The buffers that collectives make full, and how many bytes of them are in use at once."""

    def __init__(self, monkeypatch):
        self.collectives, self.most = 0, 0
        self._views = []
        self._all_reduce = dist.all_reduce
        monkeypatch.setattr(dist, "all_reduce", self._watch)

    def saw(self, tensor):
        self._views.append((weakref.ref(tensor), tensor.untyped_storage()._cdata, tensor.untyped_storage().nbytes()))

    def _watch(self, buffer, *rest, **named):
        if buffer.dtype == torch.uint8:
            self.collectives += 1
            in_use = {storage: size for view, storage, size in self._views if view() is not None}
            self.most = max(self.most, buffer.nbytes + sum(in_use.values()))
        return self._all_reduce(buffer, *rest, **named)


def count(backend, most):
    with pytest.MonkeyPatch.context() as monkeypatch, prepared(mixtral(), backend) as engine:
        watched, sizes = Watched(monkeypatch), []
        for _, tensor in engine.weights.stream(bucket_bytes=most):
            watched.saw(tensor)
            sizes.append(tensor.nbytes)
            del tensor
    return watched.collectives, watched.most, sizes


def prepared(model, backend):
    return unishard.prepare(model, checked(backend, "full_shard"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_collective_reads_a_bucket_and_no_rank_holds_more_than_that(backend):
    for most in (1 << 15, 1 << 20):
        for collectives, held, sizes in values(play(COUNTS)[count, (backend, most)]):
            assert max(sizes) < most / 2
            assert held <= most
            assert sum(sizes) / most <= collectives <= 4 * sum(sizes) / most + 1 < len(sizes)


COUNTS = tuple((count, (backend, most)) for backend in BACKENDS for most in (1 << 15, 1 << 20))


def serve(address, folder, ready, losses):
    """A process of its own: loads the weights that it is sent as a server does, and computes with them."""
    model = mixtral()
    model.config.save_pretrained(folder)
    with Listener(address) as listener:
        ready.set()
        trainer, state = listener.accept(), {}
        while message := trainer.recv():
            state[message[0]] = message[1].clone()
        save_file(state, f"{folder}/model.safetensors")
        served = type(model).from_pretrained(folder)
        losses.put(served(**share(1, rank=0, world=2, model="llama")[0]).loss.item())


def train_and_send(backend, address):
    """Sends in the middle of training, and trains on while the server loads."""
    data = own_share(3, "llama")
    with prepared(mixtral(), backend) as engine:
        train(engine, data[:2])
        engine.eval()
        with torch.no_grad():
            expected = engine(**data[0]).loss.item()
        engine.train()
        server = Client(address) if engine.is_main else None
        for named in engine.weights.stream(bucket_bytes=1 << 15):
            if server is not None:
                server.send_bytes(ForkingPickler.dumps(named))
        if server is not None:
            server.send(None)
        train(engine, data[2:])
    return expected


@pytest.mark.parametrize("backend", ["fsdp", pytest.param("deepspeed", marks=pytest.mark.deep)])
def test_a_server_in_another_process_loads_them_while_training_goes_on(backend, tmp_path):
    processes = torch.multiprocessing.get_context("spawn")
    address, ready, losses = str(tmp_path / "socket"), processes.Event(), processes.SimpleQueue()
    server = processes.Process(target=serve, args=(address, str(tmp_path), ready, losses), daemon=True)
    server.start()
    ready.wait()
    try:
        expected = run_ranks(2, train_and_send, backend, address)[0]
        assert_close(losses.get(), expected, rtol=1e-6, atol=0)
    finally:
        server.kill()
