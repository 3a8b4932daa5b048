"""The line of a shell script that starts a training."""

from __future__ import annotations

from typing import Any

import pytest

from unishard.config.topology import Topology
from unishard.formats.launch_line import LaunchLine, launch_lines, script_arguments, value_of_word
from unishard.formats.launching import launch_of


def only(text: str) -> LaunchLine:
    (line,) = launch_lines(text)
    return line


def arguments(text: str) -> dict[str, Any]:
    return dict(script_arguments(only(text).arguments).values)


@pytest.mark.parametrize(
    ("line", "launcher"),
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
        ("OMP_NUM_THREADS=8 exec torchrun train.py --a 1", "torchrun"),
        ("srun --ntasks 2 python -u train.py --a 1", "python"),
        ("srun -N 2 bash -c 'torchrun --nnodes 2 train.py --a 1'", "torchrun"),
        ("nohup deepspeed train.py --a 1 > log 2>&1 &", "deepspeed"),
        ("CUDA_VISIBLE_DEVICES=0 python train.py --a 1", "python"),
        ("if [ -z $X ]; then torchrun train.py --a 1; fi", "torchrun"),
        ("llamafactory-cli train --a 1", "llamafactory-cli"),
        ("llamafactory-cli train --a 1 || exit 1", "llamafactory-cli"),
        ("trl sft --a 1 | tee log", "trl"),
        ("$PYTHON train.py --a 1", "python"),
        ("torchrun $RANKS $ROOT/train.py --a 1", "torchrun"),
        ("deepspeed --num_gpus 2 ${ROOT}/train.py --a 1", "deepspeed"),
        ('torchrun $(dirname "$0")/train.py --a 1', "torchrun"),
        ("SCRIPT=pkg/train.py; accelerate launch --num_processes 2 $SCRIPT --a 1", "accelerate"),
        ("uv run torchrun train.py --a 1", "torchrun"),
        ("uv run python queue.py --gpus 8 -- accelerate launch --num_processes 8 train.py --a 1", "accelerate"),
        ("conda run -n x deepspeed train.py --a 1", "deepspeed"),
        ("srun env A=1 torchrun train.py --a 1", "torchrun"),
    ],
)
def test_launchers(line: str, launcher: str) -> None:
    found = only(f"#!/bin/bash\nset -e\npip install deepspeed\necho torchrun train.py --a 2\n{line}\n")
    assert found.launcher == launcher
    assert found.line == 5
    assert dict(script_arguments(found.arguments).values) == {"a": 1}


SCRIPT = r"""# torchrun old.py --a 0
cat <<EOF > ds.json
{"it's": "not a command"}
EOF
NAME=x
deepspeed train.py --one "two words" \
  --three='$4' --path ${OUT}/ckpt `# why` \
  --rate $LR --batch $((A / 2)) --files $(ls *.py) \
  --betas 0.9 0.95 --max_steps -1 --flag --no_flag --empty "" \
  --mapping '{"a": 1}' --a-b true # and more
"""


def test_words_keep_their_quotes_lines_and_variables() -> None:
    found = script_arguments(only(SCRIPT).arguments)
    assert found.values == {
        "one": "two words",
        "three": "${4}",
        "path": "${OUT}/ckpt",
        "rate": "${LR}",
        "batch": "${A / 2}",
        "files": "${ls *.py}",
        "betas": [0.9, 0.95],
        "max_steps": -1,
        "flag": True,
        "no_flag": True,
        "empty": "",
        "mapping": {"a": 1},
        "a_b": True,
    }
    assert (found.lines["one"], found.lines["rate"], found.lines["a_b"]) == (6, 8, 10)


OPTIONS = """
DISTRIBUTED_ARGS="
    --nproc_per_node 4 \\
    --master_port $PORT
"
ARGS=(
    --a 1   # why
    --b "two words"
)
ARGS+=(--c)
MODEL=llama
export LAUNCHER="torchrun $DISTRIBUTED_ARGS"
$LAUNCHER train.py "${ARGS[@]}" --model $MODEL
"""


def test_variables_that_hold_options_are_put_in() -> None:
    line = only(OPTIONS)
    assert dict(script_arguments(line.arguments).values) == {"a": 1, "b": "two words", "c": True, "model": "${MODEL}"}
    assert script_arguments(line.arguments).lines["b"] == 8
    assert launch_of(line)[0] == Topology(4, 4)
    assert launch_of(line)[1].port == "$PORT"


@pytest.mark.parametrize("rest", ['"$@"', "$@", "${@:2}", '"$*"'])
def test_what_the_shell_script_itself_is_given_is_no_value(rest: str) -> None:
    assert arguments(f"torchrun train.py --a 1 {rest}") == {"a": 1}
    assert arguments(f"torchrun train.py --a 1 --b {rest}") == {"a": 1, "b": True}


@pytest.mark.parametrize(
    "more", ["$MORE", "${MORE}", "${R:+--resume $R}", '$([ -n "$R" ] && echo --x)', "`cat options`"]
)
def test_what_may_hold_options_is_no_second_value(more: str) -> None:
    for line in (f"torchrun train.py --a 1 {more} --b 2", f"torchrun train.py --a=1 {more} --b 2"):
        found = arguments(line)
        assert (found.pop("a"), found.pop("b")) == (1, 2)
        assert len(found) == 1


def test_variables_that_are_values_stay_values() -> None:
    found = arguments("torchrun train.py --a $A $B --c 1 2 --d x $DIR/y")
    assert found == {"a": ["${A}", "${B}"], "c": [1, 2], "d": ["x", "${DIR}/y"]}


@pytest.mark.parametrize(
    "start",
    [
        'srun bash -c "$LAUNCHER $CMD"',
        "eval $WHOLE",
        'eval "$WHOLE" | tee log',
        "$LAUNCHER $CMD",
        "uv run $LAUNCHER $CMD",
    ],
)
def test_a_command_in_variables(start: str) -> None:
    text = (
        'export LAUNCHER="LEVEL=info torchrun --nproc_per_node 4"\nexport CMD=" \\\n  train.py --a 1 '
        f'"\nWHOLE="$LAUNCHER $CMD"\n{start}\n'
    )
    line = only(text)
    assert dict(script_arguments(line.arguments).values) == {"a": 1}
    assert launch_of(line)[0] == Topology(4, 4)


def test_what_only_names_a_launcher_starts_nothing() -> None:
    assert not launch_lines(
        "uv pip install deepspeed\nwhich torchrun\necho accelerate launch x.py\nconda install deepspeed\n"
    )


def test_a_variable_that_is_set_in_two_places_stays() -> None:
    text = "if $A; then\n  ARGS='--a 1'\nelse\n  ARGS='--a 2'\nfi\ntorchrun train.py $ARGS --b 3\n"
    assert arguments(text) == {"b": 3}


@pytest.mark.parametrize(
    ("line", "ranks", "torchrun"),
    [
        ("torchrun train.py", Topology(1, 1), "torchrun --nproc-per-node 1 train.py"),
        ("torchrun --nnodes 2 --nproc_per_node 4 --node_rank $RANK train.py", Topology(8, 4), None),
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
        ("accelerate launch --num_processes $N train.py", None, None),
        ("mpirun -np 4 python train.py", Topology(4, 4), None),
        ("NPROC_PER_NODE=4 llamafactory-cli train --stage sft", Topology(4, 4), None),
    ],
)
def test_ranks(line: str, ranks: Topology | None, torchrun: str | None) -> None:
    found, launch = launch_of(only(line))
    assert found == ranks
    assert torchrun is None or launch.torchrun() == torchrun


def test_a_job_says_how_many_tasks_srun_starts() -> None:
    text = (
        "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4   # a rank each\nsrun --label python train.py "
        "--a 1\n"
    )
    assert launch_of(only(text), text)[0] == Topology(8, 4)
    assert launch_of(only("python train.py"))[0] is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "'",
        '"',
        "a=(",
        "$(",
        "<<",
        "cat <<EOF\nx",
        "\\",
        "deepspeed",
        "torchrun",
        "accelerate launch",
        "srun",
        "bash -c",
        "`",
        "&>",
    ],
)
def test_what_is_cut_off_is_no_traceback(text: str) -> None:
    launch_lines(text)
    launch_lines(f"torchrun train.py --a {text}")


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
