"""What `prepare` refuses of a config, `unishard check` refuses before, in the same words."""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from typer.testing import CliRunner

import unishard
from unishard.cli import app
from unishard.testing import run_ranks

REFUSED = {
    "unsupported": "precision: {compute: bf16, accumulate: bf16}\n",
    "disk": "offload: {optimizer: nvme, nvme_path: /dev/shm}\n",
    "approximate": "strict: true\nbackend: deepspeed\nnative: {deepspeed: {zero_optimization: {zero_quantized_weights: "
    "true}}}\n",
    "package": "optimizer: lion\n",
    "compiler": "compile: {mode: full, backend: nothing}\n",
    "batch": "training: {global_batch_size: 6, micro_batch_size: 4}\n",
    "groups": "sharding: {strategy: hybrid_shard, group_size: 4}\n",
    "native": "native: {fsdp: {nothing: 1}}\n",
    "engine": "backend: horovod\n",
    "value": "training: {seed: -1}\n",
}


def said_of_both(texts):
    """What check and prepare say of each config on one rank; prepare's problems have no lines."""
    from unishard.engine.optim import optimizers

    optimizers.find_spec = lambda name: None
    said = {}
    with TemporaryDirectory() as folder:
        for name, text in texts.items():
            path = Path(folder) / f"{name}.yaml"
            path.write_text(text)
            checked = CliRunner().invoke(app, ["check", str(path), "--world-size", "1"])
            try:
                with unishard.prepare(torch.nn.Linear(2, 2), unishard.load(path)):
                    prepared = "nothing"
            except unishard.ConfigError as error:
                prepared = "\n".join(f"{each.path}: {each.what}" for each in error.problems)
            except unishard.BackendError as error:
                prepared = f"backend: {error}"
            said[name] = (
                checked.exit_code,
                re.sub(r"^\S+:\d+: ", "", checked.stderr, flags=re.MULTILINE).strip(),
                prepared,
            )
    return said


def test_check_says_before_what_prepare_says():
    (said,) = run_ranks(1, said_of_both, REFUSED)
    for name, (exit_code, checked, prepared) in said.items():
        assert (exit_code, checked) == (1, prepared), name
    assert len(said) == len(REFUSED)
