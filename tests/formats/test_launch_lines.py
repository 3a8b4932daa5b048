"""One command that starts a training, word by word."""

from __future__ import annotations

from typing import Any

import pytest

from unishard.config.topology import Topology
from unishard.errors import ConfigError
from unishard.formats.launch.line import launch_line, script_arguments, value_of_word
from unishard.formats.launch.processes import launch_of


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        ("deepspeed --num_gpus 2 train.py --a 1", "deepspeed"),
        ("deepspeed --include=localhost:0,1 --master_port 29500 train.py --a 1", "deepspeed"),
        ("torchrun --standalone --nproc-per-node=2 train.py --a 1", "torchrun"),
        ("torchrun --nproc_per_node 2 -m pkg.train --a 1", "torchrun"),
        ("python -u -m torch.distributed.run --nproc_per_node 2 train.py --a 1", "torchrun"),
        ("python3 -m torch.distributed.launch --nproc_per_node=2 --use_env train.py --a 1", "torchrun"),
        ("accelerate launch --config_file acc.yaml --multi_gpu --num_processes 2 train.py --a 1", "accelerate"),
        ("/opt/conda/bin/accelerate launch train.py --a 1", "accelerate"),
        ("python -m accelerate.commands.launch --num_processes 2 train.py --a 1", "accelerate"),
        ("CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node 2 train.py --a 1", "torchrun"),
        ("uv run torchrun train.py --a 1", "torchrun"),
        ("torchrun --nproc_per_node 2 \\\n  train.py \\\n  --a 1\n", "torchrun"),
        ("llamafactory-cli train --a 1", "llamafactory-cli"),
        ("trl sft --a 1", "trl"),
        ("python train.py --a 1", "python"),
    ],
)
def test_launchers(command: str, launcher: str) -> None:
    line = launch_line(command)
    assert line.launcher == launcher
    assert script_arguments(line.arguments) == {"a": 1}


def test_words_keep_their_quotes() -> None:
    command = (
        "deepspeed train.py --one 'two; $words' --three=4 --betas 0.9 0.95 --max_steps -1 --flag --no_flag "
        '--empty "" --mapping \'{"a": 1}\' --sentence "a | b" --a-b true'
    )
    assert script_arguments(launch_line(command).arguments) == {
        "one": "two; $words",
        "three": 4,
        "betas": [0.9, 0.95],
        "max_steps": -1,
        "flag": True,
        "no_flag": True,
        "empty": "",
        "mapping": {"a": 1},
        "sentence": "a | b",
        "a_b": True,
    }


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("torchrun train.py --lr $LR", "$LR"),
        ('torchrun train.py --lr "${LR}"', "${LR"),
        ("torchrun train.py --lr $(cat lr)", "$("),
        ("torchrun train.py --lr `cat lr`", "`"),
        ("torchrun train.py | tee log", "|"),
        ("torchrun train.py > log", ">"),
        ("cd x && torchrun train.py", "&&"),
        ("cd x; torchrun train.py", ";"),
        ("torchrun train.py <<EOF", "<"),
        ("for x in 1 2", "for"),
        ("cd x\ntorchrun train.py", "a second line"),
    ],
)
def test_what_only_a_shell_reads_is_refused(command: str, found: str) -> None:
    with pytest.raises(ConfigError) as error:
        launch_line(command)
    assert found in str(error.value)
    assert "write the one command that trains, with its values" in str(error.value)


@pytest.mark.parametrize("command", ["", "accelerate", "accelerate launcher", "cat train.py", "--lr 1"])
def test_what_starts_no_training_is_refused(command: str) -> None:
    with pytest.raises(ConfigError, match=r"starts no training .*write one that begins with one of accelerate launch"):
        launch_line(command)


@pytest.mark.parametrize(
    ("command", "ranks", "torchrun"),
    [
        ("torchrun train.py", Topology(1, 1), "torchrun --nproc-per-node 1 train.py"),
        ("torchrun --nnodes 2 --nproc_per_node 4 --node_rank 1 train.py", Topology(8, 4), None),
        ("torchrun --nproc_per_node=gpu train.py", None, "torchrun --nproc-per-node gpu train.py"),
        ("torchrun --nnodes=1:4 --nproc_per_node=8 train.py", None, None),
        ("deepspeed train.py", None, "torchrun --nproc-per-node gpu train.py"),
        ("deepspeed --num_nodes 2 --num_gpus 8 train.py", Topology(16, 8), None),
        (
            "deepspeed --include localhost:1,3 train.py",
            Topology(2, 2),
            "CUDA_VISIBLE_DEVICES=1,3 torchrun --nproc-per-node 2 train.py",
        ),
        ("deepspeed --hostfile hosts train.py", None, None),
        ("CUDA_VISIBLE_DEVICES=0,1,2 deepspeed train.py", Topology(3, 3), None),
        ("accelerate launch --num_processes 8 --num_machines 2 train.py", Topology(8, 4), None),
        ("NPROC_PER_NODE=4 llamafactory-cli train sft.yaml", Topology(4, 4), None),
    ],
)
def test_ranks(command: str, ranks: Topology | None, torchrun: str | None) -> None:
    found, launch = launch_of(launch_line(command))
    assert found == ranks
    assert torchrun is None or launch.torchrun() == torchrun


@pytest.mark.parametrize("text", ["'", '"', "a=(", "$(", "<<", "\\", "deepspeed", "srun", "`", "&>", "--", "="])
def test_what_is_cut_off_is_no_traceback(text: str) -> None:
    for command in (text, f"torchrun train.py --a {text}", f"torchrun {text}"):
        try:
            launch_line(command)
        except ConfigError:
            continue


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("1", 1),
        ("1e-5", 1e-5),
        ("True", True),
        ("false", False),
        ("no", "no"),
        ("None", "None"),
        ("{x", "{x"),
        ("full_shard auto_wrap",) * 2,
    ],
)
def test_values(word: str, value: Any) -> None:
    assert value_of_word(word) == value
    assert type(value_of_word(word)) is type(value)
