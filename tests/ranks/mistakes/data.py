"""Data that ranks read twice, not at all, or in other amounts than the config says; and launchers that cannot be
read."""

from __future__ import annotations

import itertools
import warnings
from contextlib import contextmanager

from harness import checked as config
from harness import my_rank, prepare
from torch.utils.data import DataLoader
from tqdm import tqdm

import unishard
from mistakes.mistake import elsewhere, mistake
from unishard import Topology
from unishard.config.rendezvous import rendezvous
from unishard.testing.models import batch

_ENVIRONMENTS = {
    "open-mpi": {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
    "mpich": {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"},
    "pmix": {"PMIX_RANK": "1"},
    "accelerate": {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
    "srun": {
        "SLURM_PROCID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "WORLD_SIZE": "8",
    },
}


@mistake("`WORLD_SIZE` set in a job script to another number than srun starts", "srun")
@mistake("`accelerate launch --cpu --num_processes 2 train.py`", "accelerate")
@mistake("a launcher that only numbers its processes, such as `prterun`", "pmix")
@mistake("`mpirun -n 4 python train.py` of MPICH or Intel MPI without an address", "mpich")
@mistake("`mpirun -n 4 python train.py` without an address", "open-mpi")
def unreadable_launcher(backend, launcher):
    environ = _ENVIRONMENTS[launcher]
    rendezvous(Topology.from_environment(environ), environ)


# -- unishard.dataloader ---------------------------------------------------------------------------


def samples(count):
    """The model's samples, each with its number."""
    return [
        {name: value[0] for name, value in batch("mlp", index, 1).items()} | {"index": index} for index in range(count)
    ]


@contextmanager
def warnings_raised():
    """Raise what only warns, so that a row holds its text."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def read(engine, loader):
    """The numbers of the samples that this rank reads in a pass, in their order; each is trained on."""
    return trained(engine, engine.batches(loader))


def trained(engine, micro_batches):
    """The same of a loop."""
    indices = []
    for micro_batch in micro_batches:
        indices += micro_batch.pop("index").tolist()
        engine.backward(engine(**micro_batch).loss)
        engine.step()
    return indices


@mistake("`engine.batches(unishard.dataloader(dataset, cfg))` inside the epoch loop: a new loader in each epoch")
def loader_in_the_epoch_loop(backend):
    cfg, data = config(backend, "no_shard"), samples(12)
    with prepare(cfg) as engine:
        got = [index for _ in range(3) for index in read(engine, unishard.dataloader(data, cfg))]
    with prepare(cfg) as engine:
        loader = unishard.dataloader(data, cfg)
        right = [index for _ in range(3) for index in read(engine, loader)]
    return got, right


@mistake("a new dataset in each epoch, `unishard.dataloader(TensorDataset(x, y), cfg)`")
def dataset_in_the_epoch_loop(backend):
    cfg = config(backend, "no_shard")
    with prepare(cfg) as engine, warnings_raised():
        for _ in range(2):
            read(engine, unishard.dataloader(samples(12), cfg))


@mistake("fewer samples than one micro-batch on each rank")
def more_than_the_dataset_in_a_micro_batch(backend):
    cfg = config(backend, "no_shard", training={"micro_batch_size": 64})
    with prepare(cfg) as engine:
        read(engine, unishard.dataloader(samples(16), cfg))


@mistake("`unishard.dataloader` over a dataset that is split by rank already, or shuffled without a seed")
def split_before_the_loader(backend):
    cfg = config(backend, "no_shard")
    with prepare(cfg) as engine, warnings_raised():
        read(engine, unishard.dataloader(samples(16)[my_rank() :: 2], cfg))


# -- the loop --------------------------------------------------------------------------------------

AROUND = {
    "enumerate": lambda loader: (each for _, each in enumerate(loader)),
    "islice": lambda loader: itertools.islice(loader, 4),
}


@mistake("`engine.batches(itertools.islice(loader, n))`", "islice")
@mistake("`engine.batches(...)` of a generator that reads a loader", "enumerate")
def hidden_loader(backend, around):
    cfg = config(backend, "no_shard")
    with prepare(cfg) as engine, warnings_raised():
        read(engine, AROUND[around](unishard.dataloader(samples(16), cfg)))


@mistake("`it = engine.batches(loader)` once before the epoch loop, and `engine.batches(tqdm(loader))`")
def iterated_again(backend):
    cfg, data = config(backend, "no_shard"), samples(12)
    with prepare(cfg) as engine, warnings_raised():
        it = engine.batches(tqdm(unishard.dataloader(data, cfg), disable=True))
        got = [index for _ in range(3) for index in trained(engine, it)]
    with prepare(cfg) as engine:
        loader = unishard.dataloader(data, cfg)
        right = [index for _ in range(3) for index in read(engine, loader)]
    return got, right


@mistake("a validation without `engine.eval()` inside the training loop", 1)
@mistake("a validation without `engine.eval()` inside an accumulation window", 2)
def validation_in_training_mode(backend, accumulate):
    cfg, data = config(backend, "no_shard", training={"gradient_accumulation_steps": accumulate}), samples(16)
    with prepare(cfg) as engine, warnings_raised():
        for each in engine.batches(unishard.dataloader(data, cfg)):
            each.pop("index")
            engine.backward(engine(**each).loss)
            engine.step()
            for other in engine.batches(unishard.dataloader(data[:8], cfg)):
                other.pop("index")
                engine(**other)


elsewhere(
    "`engine.load(saved)` inside a loop over `engine.batches` of a list, a generator or an iterable dataset",
    "tests/ranks/test_rollback.py::test_a_loop_that_cannot_go_back_says_so",
)


@mistake("`for batch in loader:` over a `unishard.dataloader`, without `engine.batches`")
def ours_without_batches(backend):
    cfg = config(backend, "no_shard")
    with prepare(cfg) as engine, warnings_raised():
        trained(engine, unishard.dataloader(samples(16), cfg))


@mistake("`for batch in loader:` over a `DataLoader` that gives each rank the same batches")
def theirs_without_batches(backend):
    with prepare(config(backend, "no_shard")) as engine, warnings_raised():
        trained(engine, DataLoader(samples(16), batch_size=2))


@mistake("`next(iter(engine.batches(loader)))`, a look at one batch before the loop")
def look_at_a_batch(backend):
    """The batch, and the numbers of all that follow, with and without a look at their first."""
    found = []
    for looks in (True, False):
        cfg = config(backend, "no_shard", training={"micro_batch_size": 2})
        with prepare(cfg) as engine:
            loader = unishard.dataloader(samples(16), cfg)
            if looks:
                next(iter(engine.batches(loader)))
                next(engine.batches(loader))
            read = []
            for _ in range(2):
                for each in engine.batches(loader):
                    read += each.pop("index").tolist()
                    engine.backward(engine(**each).loss)
                    engine.step()
            found.append([*read, loader.epoch])
    return found[0], found[1]


@mistake("`engine.gather_for_metrics` in `for batch in loader:` over a `unishard.dataloader`")
def gathering_in_an_own_loop(backend):
    cfg = config(backend, "no_shard", training={"micro_batch_size": 2})
    with prepare(cfg) as engine:
        engine.eval()
        for each in unishard.dataloader(samples(7), cfg):
            engine.gather_for_metrics(each["index"])


@mistake("a `unishard.dataloader` of another config, where `training.global_batch_size` is set")
def loader_of_another_config(backend):
    cfg = config(backend, "no_shard", training={"micro_batch_size": 2, "global_batch_size": 4})
    other = config(backend, "no_shard", training={"micro_batch_size": 3})
    with prepare(cfg) as engine:
        for loader in (unishard.dataloader(samples(16), cfg), unishard.dataloader(samples(18), other)):
            for each in engine.batches(loader):
                each.pop("index")
                engine.backward(engine(**each).loss)
                engine.step()
