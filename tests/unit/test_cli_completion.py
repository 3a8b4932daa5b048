"""What the shell is offered: typer's own scripts, and the commands, backends, fields and values behind them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from running import ROOT
from typer.testing import CliRunner

import unishard
from unishard.cli import _COMMANDS, app
from unishard.config import leaves

SCRIPTS = {
    "bash": "complete -o default -F _unishard_completion unishard",
    "zsh": "compdef _unishard_completion unishard",
}


def offered(line: str) -> list[str]:
    """What typer's script for bash gets for a line, whose last word is not complete."""
    words = line.split(" ")
    env = {"_UNISHARD_COMPLETE": "complete_bash", "COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
    result = CliRunner().invoke(app, [], prog_name="unishard", env=env)
    assert result.exit_code == 0, result.output
    return result.stdout.split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_show_completion(shell: str) -> None:
    """typer looks at which shell started it, but for this variable of its own tests: not every shell is installed
    everywhere."""
    result = subprocess.run(
        [sys.executable, "-m", "unishard", "--show-completion", shell],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
        env={**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert f"_UNISHARD_COMPLETE=complete_{shell}" in result.stdout
    assert SCRIPTS.get(shell, "complete --command unishard") in result.stdout


def test_bash_itself_completes_a_backend() -> None:
    script = f"""
unishard() {{ {sys.executable} -m unishard "$@"; }}
export -f unishard
eval "$(unishard --show-completion)"
_run() {{ COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); }}
_run unishard explain c.yaml d
COMPREPLY=( $( COMP_WORDS="${{COMP_WORDS[*]}}" COMP_CWORD=$COMP_CWORD _UNISHARD_COMPLETE=complete_bash unishard ) )
echo "${{COMPREPLY[@]}}"
"""
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert (result.stdout, result.stderr) == ("deepspeed\n", "")


def test_commands() -> None:
    assert set(offered("unishard ")) == set(_COMMANDS)
    assert offered("unishard checkp") == ["checkpoint"]
    assert offered("unishard checkpoint ve") == ["verify"]
    assert "--all" in offered("unishard explain --")


def test_backends_and_formats() -> None:
    assert offered("unishard explain c.yaml ") == list(unishard.available())
    assert offered("unishard explain c.yaml d") == ["deepspeed"]
    assert offered("unishard translate c.yaml --from ll") == ["llamafactory"]
    assert offered("unishard translate c.yaml --to ll") == ["llamafactory"]
    assert offered("unishard translate . --to unis") == ["unishard"]


def test_lists_with_commas_and_devices() -> None:
    assert offered("unishard compare c.yaml --backends ") == list(unishard.available())
    assert offered("unishard compare c.yaml --backends fsdp,d") == ["fsdp,deepspeed"]
    assert offered("unishard compare c.yaml --strategies full_shard,hybrid_shard_") == [
        "full_shard,hybrid_shard_grad_op"
    ]
    assert offered("unishard plan c.yaml --device h100") == ["h100-80g"]


@pytest.mark.parametrize("command", ["plan", "launch", "compare"])
def test_options_of_the_commands_around_a_run(command: str) -> None:
    options = offered(f"unishard {command} c.yaml --")
    assert {"--set", "--json"} <= set(options)
    assert offered(f"unishard {command} c.yaml --set training.s") == ["training.seed=0"]


@pytest.mark.parametrize("command", ["check c.yaml --set", "explain c.yaml --set", "init --set"])
def test_fields_and_their_values(command: str) -> None:
    assert offered(f"unishard {command} ") == [f"{path}=" for path, _ in leaves(unishard.Config)]
    assert offered(f"unishard {command} training.s") == ["training.seed=0"]
    assert offered(f"unishard {command} backend=") == ["backend=deepspeed", "backend=fsdp"]
    assert offered(f"unishard {command} sharding.strategy=hy") == [
        "sharding.strategy=hybrid_shard",
        "sharding.strategy=hybrid_shard_grad_op",
    ]
    assert offered(f"unishard {command} communication.desync_c") == [
        "communication.desync_check=true",
        "communication.desync_check=false",
    ]
    assert offered(f"unishard {command} optimizer.bet") == ["optimizer.betas="]
    assert offered(f"unishard {command} nothing") == []


def test_values_where_the_shell_cuts_words_at_the_sign() -> None:
    assert offered("unishard explain c.yaml --set backend =") == ["deepspeed", "fsdp"]
    assert offered("unishard explain c.yaml --set training.seed=1 --set backend =") == ["deepspeed", "fsdp"]


def test_a_field_comes_with_a_few_words_on_one_line() -> None:
    env = {
        "_UNISHARD_COMPLETE": "complete_fish",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "_TYPER_COMPLETE_ARGS": "unishard explain c --set ",
    }
    lines = CliRunner().invoke(app, [], prog_name="unishard", env=env).stdout.splitlines()
    assert len(lines) == len(list(leaves(unishard.Config)))
    assert all(len(line.split("\t")) == 2 for line in lines)
