"""Data that ranks read twice, not at all, or in other amounts than the config says; and launchers that cannot be read."""

from __future__ import annotations

from mistakes.mistake import Mistakes
from unishard import Topology
from unishard.config.topology import rendezvous

DATA = Mistakes("Data and launchers")


_ENVIRONMENTS = {
    "open-mpi": {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
    "mpich": {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"},
    "pmix": {"PMIX_RANK": "1"},
    "accelerate": {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
    "srun": {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "2", "WORLD_SIZE": "8"},
}


@DATA.raises(
    "`WORLD_SIZE` set in a job script to another number than srun starts",
    "ConfigError: WORLD_SIZE is 8, but srun has started 2 ranks; unset WORLD_SIZE",
    "srun",
)
@DATA.raises(
    "`accelerate launch --cpu --num_processes 2 train.py`",
    "ConfigError: accelerate launch has set MASTER_ADDR but no RANK: on the CPU it starts one process whatever --num_processes says; start "
    "with torchrun --nproc-per-node N, or for a single rank with python",
    "accelerate",
)
@DATA.raises(
    "a launcher that only numbers its processes, such as `prterun`",
    "ConfigError: PMIX_RANK=1 says that a launcher has started this process, but not how many there are; set RANK, WORLD_SIZE, LOCAL_RANK, "
    "MASTER_ADDR and MASTER_PORT for each process, or start with torchrun or srun...",
    "pmix",
)
@DATA.raises(
    "the same with MPICH or Intel MPI",
    "ConfigError: mpirun (MPICH or Intel MPI) has started 4 ranks, which cannot find each other without MASTER_ADDR and MASTER_PORT...: "
    "mpirun -genv MASTER_ADDR HOST -genv MASTER_PORT 29500 -n 4 python train.py",
    "mpich",
)
@DATA.raises(
    "`mpirun -n 4 python train.py` without an address",
    "ConfigError: mpirun (Open MPI) has started 4 ranks, which cannot find each other without MASTER_ADDR and MASTER_PORT; pass on the "
    "host of rank 0 and a free port there: mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 -n 4 python train.py",
    "open-mpi",
)
def unreadable_launcher(backend, launcher):
    environ = _ENVIRONMENTS[launcher]
    rendezvous(Topology.from_environment(environ), environ)
