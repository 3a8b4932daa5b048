"""Data that ranks read twice, not at all, or in other amounts than the config says; and launchers that cannot be
read."""

from __future__ import annotations

import itertools
import warnings
from contextlib import contextmanager

from playing import checked as config
from playing import my_rank, prepare
from torch.utils.data import DataLoader
from tqdm import tqdm

import unishard
from mistakes.mistake import Mistakes
from unishard import Topology
from unishard.config.topology import rendezvous
from unishard.testing.models import batch

DATA = Mistakes("Data and launchers")


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


@DATA.raises(
    "`WORLD_SIZE` set in a job script to another number than srun starts",
    "ConfigError: WORLD_SIZE is 8, but srun has started 2 ranks; unset WORLD_SIZE",
    "srun",
)
@DATA.raises(
    "`accelerate launch --cpu --num_processes 2 train.py`",
    "ConfigError: accelerate launch has set MASTER_ADDR but no RANK: on the CPU it starts one process whatever "
    "--num_processes says; start with torchrun --nproc-per-node N, or for a single rank with python",
    "accelerate",
)
@DATA.raises(
    "a launcher that only numbers its processes, such as `prterun`",
    "ConfigError: PMIX_RANK=1 says that a launcher has started this process, but not how many there are; set RANK, "
    "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each process, or start with torchrun or srun...",
    "pmix",
)
@DATA.raises(
    "the same with MPICH or Intel MPI",
    "ConfigError: mpirun (MPICH or Intel MPI) has started 4 ranks, which cannot find each other without MASTER_ADDR "
    "and MASTER_PORT...: mpirun -genv MASTER_ADDR HOST -genv MASTER_PORT 29500 -n 4 python train.py",
    "mpich",
)
@DATA.raises(
    "`mpirun -n 4 python train.py` without an address",
    "ConfigError: mpirun (Open MPI) has started 4 ranks, which cannot find each other without MASTER_ADDR and "
    "MASTER_PORT; pass on the "
    "host of rank 0 and a free port there: mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 -n 4 python train.py",
    "open-mpi",
)
def unreadable_launcher(backend, launcher):
    environ = _ENVIRONMENTS[launcher]
    rendezvous(Topology.from_environment(environ), environ)


# -- unishard.dataloader
# ---------------------------------------------------------------------------------------------------


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


@DATA.harmless(
    "`engine.batches(unishard.dataloader(dataset, cfg))` inside the epoch loop: a new loader in each epoch",
    "a new loader over the same dataset continues with the next epoch and its order",
)
def loader_in_the_epoch_loop(backend):
    cfg, data = config(backend), samples(12)
    with prepare(cfg) as engine:
        got = [index for _ in range(3) for index in read(engine, unishard.dataloader(data, cfg))]
    with prepare(cfg) as engine:
        loader = unishard.dataloader(data, cfg)
        right = [index for _ in range(3) for index in read(engine, loader)]
    return got, right


@DATA.raises(
    "a new dataset in each epoch, `unishard.dataloader(TensorDataset(x, y), cfg)`",
    "UserWarning: a new list with the same samples as the last one starts again at epoch 0, in the same order; build "
    "the dataset once, before the loop over epochs",
)
def dataset_in_the_epoch_loop(backend):
    cfg = config(backend)
    with prepare(cfg) as engine, warnings_raised():
        for _ in range(2):
            read(engine, unishard.dataloader(samples(12), cfg))


@DATA.raises(
    "fewer samples than one micro-batch on each rank",
    "DataError: the dataset has 16 samples, but a micro-batch on each rank takes 128 (training.micro_batch_size 64 x "
    "2 ranks), so every update would repeat samples; set training.micro_batch_size to at most 8, or use more data",
)
def more_than_the_dataset_in_a_micro_batch(backend):
    cfg = config(backend, training={"micro_batch_size": 64})
    with prepare(cfg) as engine:
        read(engine, unishard.dataloader(samples(16), cfg))


@DATA.raises(
    "`unishard.dataloader` over a dataset that is split by rank already, or shuffled without a seed",
    "UserWarning: the ranks pass different datasets to unishard.dataloader, which gives each rank its share of one "
    "dataset; pass the same on every rank: not one that is split by rank, or shuffled or drawn without a seed",
)
def split_before_the_loader(backend):
    cfg = config(backend)
    with prepare(cfg) as engine, warnings_raised():
        read(engine, unishard.dataloader(samples(16)[my_rank() :: 2], cfg))


# -- the loop
# ----------------------------------------------------------------------------------------------------------------

_HIDES = (
    "UserWarning: {} hides the position of the loader that it reads, so a checkpoint has none, and a resumed run reads "
    "the data from their beginning; {}"
)
AROUND = {
    "enumerate": lambda loader: (each for _, each in enumerate(loader)),
    "islice": lambda loader: itertools.islice(loader, 4),
}


@DATA.raises(
    "`engine.batches(itertools.islice(loader, n))`",
    _HIDES.format("islice", "write itertools.islice(engine.batches(loader), n)"),
    "islice",
)
@DATA.raises(
    "`engine.batches(...)` of a generator that reads a loader",
    _HIDES.format("generator", "pass the loader itself, engine.batches(loader), and wrap what that yields"),
    "enumerate",
)
def hidden_loader(backend, around):
    cfg = config(backend)
    with prepare(cfg) as engine, warnings_raised():
        read(engine, AROUND[around](unishard.dataloader(samples(16), cfg)))


@DATA.harmless(
    "`it = engine.batches(loader)` once before the epoch loop, and `engine.batches(tqdm(loader))`",
    "each iteration is the next epoch; the position is in the checkpoint",
)
def iterated_again(backend):
    cfg, data = config(backend), samples(12)
    with prepare(cfg) as engine, warnings_raised():
        it = engine.batches(tqdm(unishard.dataloader(data, cfg), disable=True))
        got = [index for _ in range(3) for index in trained(engine, it)]
    with prepare(cfg) as engine:
        loader = unishard.dataloader(data, cfg)
        right = [index for _ in range(3) for index in read(engine, loader)]
    return got, right


@DATA.raises(
    "a validation without `engine.eval()` inside the training loop",
    "UserWarning: a loop over engine.batches() inside the training loop ran the model in training mode and made no "
    "update; for a validation, call engine.eval() before and engine.train() after it",
    1,
)
@DATA.raises(
    "the same inside an accumulation window",
    "ContractError: a loop over engine.batches() in training mode began inside an accumulation window of the loop "
    "around it; for a validation, call engine.eval() before and engine.train() after it",
    2,
)
def validation_in_training_mode(backend, accumulate):
    cfg, data = config(backend, training={"gradient_accumulation_steps": accumulate}), samples(16)
    with prepare(cfg) as engine, warnings_raised():
        for each in engine.batches(unishard.dataloader(data, cfg)):
            each.pop("index")
            engine.backward(engine(**each).loss)
            engine.step()
            for other in engine.batches(unishard.dataloader(data[:8], cfg)):
                other.pop("index")
                engine(**other)


@DATA.raises(
    "`for batch in loader:` over a `unishard.dataloader`, without `engine.batches`",
    "UserWarning: a unishard.dataloader is read without engine.batches(), so...write `for batch in "
    "engine.batches(loader):`",
)
def ours_without_batches(backend):
    cfg = config(backend)
    with prepare(cfg) as engine, warnings_raised():
        trained(engine, unishard.dataloader(samples(16), cfg))


@DATA.raises(
    "`for batch in loader:` over a `DataLoader` that gives each rank the same batches",
    "UserWarning: ranks 0 and 1 train on the same batches, so the other ranks add nothing; read the data with `for "
    "batch in engine.batches(unishard.dataloader(dataset, cfg)):`, which gives each rank its own share",
)
def theirs_without_batches(backend):
    with prepare(config(backend)) as engine, warnings_raised():
        trained(engine, DataLoader(samples(16), batch_size=2))
