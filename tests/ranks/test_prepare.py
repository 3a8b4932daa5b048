"""What runs after `prepare` is what was asked."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import curve, error, my_rank, own_share, play, prepare, train, values
from harness.training import BACKENDS, SPANNING, STRATEGIES, config, everyones
from torch import nn

import unishard
from unishard.contract import registry
from unishard.testing import oracle
from unishard.testing.models import Mlp, mlp

# -- what trains -----------------------------------------------------------------------------------


def another_seed_on_each_rank(backend, strategy):
    model = mlp(seed=7 + my_rank())
    model.center += my_rank()
    with unishard.prepare(model, config(backend, strategy)) as engine:
        return curve(train(engine, own_share(4)))


class Watched(nn.Linear):
    """Notes the formats in which it runs."""

    seen = ()

    def forward(self, x):
        out = super().forward(x)
        self.seen = tuple(str(tensor.dtype).removeprefix("torch.") for tensor in (x, self.weight, self.bias, out))
        return out


class Watching(Mlp):
    """With a buffer that bf16 cannot hold, and one of integers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("fine", torch.tensor([1.0 + 2**-20, 3.0]))
        self.register_buffer("count", torch.tensor(2**40 + 1))
        self.head = Watched(23, 11)


def formats(backend, strategy, precision):
    with unishard.prepare(Watching(), config(backend, strategy, precision=precision)) as engine:
        train(engine, own_share(2))
        placement, module = engine.placement(), engine.module
        return {
            "masters": placement.master_dtypes,
            "computed in": module.head.seen,
            "buffers": {
                name: (str(buffer.dtype), buffer.flatten()[0].item()) for name, buffer in module.named_buffers()
            },
        }


TRAINED = (*((another_seed_on_each_rank, (strategy,)) for strategy in STRATEGIES),)


def trained(backend, function, *arguments):
    in_formats = tuple((formats, cell) for cell in SPANNING if cell[0] == backend)
    return values(
        play((*((name, (backend, *given)) for name, given in TRAINED), *in_formats))[function, (backend, *arguments)]
    )


def assert_curve(found, wanted):
    assert found.losses == pytest.approx(wanted.losses, rel=2e-6)
    assert found.norms == pytest.approx(wanted.norms, rel=2e-5)


def windows(model="mlp"):
    return [everyones(turn, turn + 1, world=2, model=model) for turn in range(4)]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rank_0s_model_and_buffers_are_trained_whatever_the_other_ranks_drew(backend, strategy):
    wanted = oracle.train(mlp(seed=7), windows(), config(backend), world=2)
    for found in trained(backend, another_seed_on_each_rank, strategy):
        assert_curve(found, wanted)


@pytest.mark.parametrize(("backend", "strategy", "precision"), SPANNING)
def test_it_computes_in_the_asked_format_over_fp32_masters_and_buffers_keep_theirs(backend, strategy, precision):
    computed = {"fp32": "float32", "bf16": "bfloat16"}[precision]
    for found in trained(backend, formats, strategy, precision):
        assert found["masters"] == {"float32"}
        assert found["computed in"] == (computed,) * 4
        assert found["buffers"] == {
            "center": ("torch.float32", torch.tensor(-0.3).item()),
            "fine": ("torch.float32", 1.0 + 2**-20),
            "count": ("torch.int64", 2**40 + 1),
        }


# -- the check after prepare -----------------------------------------------------------------------


LEFT_OPEN = []


class Lying:
    """A backend whose engine says it holds something else."""

    def __init__(self, backend, **lie):
        self._backend = backend
        self._lie = lie

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def build(self, *args):
        engine = self._backend.build(*args)
        told, close = engine.placement()._replace(**self._lie), engine.close
        engine.placement = lambda: told
        engine.close = lambda: (LEFT_OPEN.remove(engine), close())
        LEFT_OPEN.append(engine)
        return engine


LIES = {
    "engine": ({"engine": "Imposter"}, "engine: expected", "got Imposter"),
    "units": (
        {"units": ("blocks.0", "blocks.2")},
        "sharded units: expected inp, blocks.0, blocks.1, blocks.2, head",
        "got blocks.0, blocks.2",
    ),
    "no units": ({"units": ()}, "sharded units: expected inp, blocks.0, blocks.1, blocks.2, head", "got none"),
    "masters": (
        {"master_dtypes": frozenset({"bfloat16"})},
        "dtype of the master weights: expected float32",
        "got bfloat16",
    ),
    "whole": ({"master_numel": 6013}, "master weights on this rank: expected at most", "got 6,013"),
    "whole parameters": ({"param_bytes": 4 * 6013}, "parameters on this rank: expected at most", "got 24,052"),
    "nothing": ({"master_numel": 0}, "master weights on all ranks: expected at least", "got 0"),
}


def lying(backend, lie, ranks):
    honest, told = registry.get(backend), LIES[lie][0]
    original = registry.get
    registry.get = lambda name: Lying(honest, **told) if my_rank() in ranks else honest
    try:
        prepare(config(backend))
    finally:
        registry.get = original


def lying_is_closed(backend):
    with contextlib.suppress(unishard.EngineMismatchError):
        lying(backend, "masters", (0, 1))
    return len(LEFT_OPEN)


LYING = (*((lying, (lie, (0, 1))) for lie in LIES), (lying, ("masters", (1,))), (lying_is_closed, ()))


def lied(backend):
    return play(tuple((name, (backend, *given)) for name, given in LYING))


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_engine_that_does_not_run_what_was_asked_is_refused(backend, lie):
    raised = error(lied(backend)[lying, (backend, lie, (0, 1))])
    assert raised.startswith("EngineMismatchError: ")
    for part in LIES[lie][1:]:
        assert part in raised


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_difference_on_one_rank_is_an_error_on_every_rank(backend):
    raised = error(lied(backend)[lying, (backend, "masters", (1,))])
    assert raised.startswith("EngineMismatchError: ")
    assert "got bfloat16" in raised


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_engine_that_is_refused_is_closed(backend):
    assert values(lied(backend)[lying_is_closed, (backend,)]) == [0, 0]


# -- a plain script --------------------------------------------------------------------------------

SCRIPT = """
import sys
from pathlib import Path
import torch
import unishard
from unishard.testing.models import batch, mlp

cfg = unishard.Config.model_validate({"backend": sys.argv[1], "sharding": sys.argv[2], "precision": sys.argv[3]})
engine = unishard.prepare(mlp(), cfg)
for batch in engine.batches([batch("mlp", index, 1) for index in range(3)]):
    loss = engine(**batch).loss
    engine.backward(loss)
    step = engine.step()
print("updated", step.updated, "on", torch.distributed.get_world_size())
"""


PLAIN = (
    ("fsdp", "no_shard", "fp32"),
    ("fsdp", "full_shard", "bf16"),
    ("deepspeed", "shard_optimizer", "bf16"),
    ("deepspeed", "full_shard", "fp32"),
)
EACH_IN_A_FORK = """
import json
import os
import sys
import deepspeed
import torch._inductor.compile_fx
import unishard.engine.prepare

script, *cases = sys.argv[1:]
codes = []
for number, case in enumerate(cases):
    process = os.fork()
    if process == 0:
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{script}.{number}.{name}", os.O_WRONLY | os.O_CREAT), stream)
        sys.argv = [script, *case.split()]
        exec(compile(open(script).read(), script, "exec"), {"__name__": "__main__"})
        break  # this fork ends as any interpreter does
    codes.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
else:
    print(json.dumps(codes))
"""


@pytest.fixture(scope="module")
def plain_scripts(tmp_path_factory):
    """Exit code, stdout and stderr of the script by cell; in forks, since importing costs more than the rest."""
    folder = tmp_path_factory.mktemp("plain")
    script = folder / "train.py"
    script.write_text(SCRIPT)
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR")
    environment = {name: value for name, value in os.environ.items() if name not in launchers} | {
        "OMP_NUM_THREADS": "1"
    }
    cases = [" ".join(cell) for cell in PLAIN]
    command = [sys.executable, "-c", EACH_IN_A_FORK, str(script), *cases]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout.splitlines()[-1])
    texts = [
        tuple(Path(f"{script}.{number}.{name}").read_text() for name in ("out", "err")) for number in range(len(cases))
    ]
    return {cell: (code, *said) for cell, code, said in zip(PLAIN, codes, texts, strict=True)}


@pytest.mark.parametrize("cell", PLAIN, ids="-".join)
def test_a_plain_script_trains_as_one_rank_and_ends_cleanly_without_closing(cell, plain_scripts):
    code, printed, errors = plain_scripts[cell]
    assert code == 0, errors
    assert printed.splitlines()[-1] == "updated True on 1"
    assert "terminate called" not in errors
    assert "Traceback" not in errors
    assert "Warning" not in errors
