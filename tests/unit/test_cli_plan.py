"""`unishard plan` on a tiny model: the table, JSON, errors, and what it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from running import run

from unishard.contract.footprint import Collective
from unishard.tools.plan.activations import Activations, Segment
from unishard.tools.plan.model import PlannedModel

FACTORY = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def build():
    return Model(), lambda samples, tokens: {"x": torch.randn(samples, tokens, 16)}


def bare():
    return Model()


class InPlace(Block):
    def forward(self, x):
        return x + self.down(self.up(x).relu_())


def in_place():
    model, batch = build()
    model.blocks = nn.ModuleList(InPlace() for _ in range(2))
    return model, batch


class Logits(nn.Linear):
    def forward(self, x):
        return super().forward(x)


def logits():
    return Logits(16, 5), lambda samples, tokens: {"x": torch.randn(samples, 16)}


def with_loss():
    return (*logits(), lambda out: out.square().mean())


def adapted():
    from peft import LoraConfig, get_peft_model
    from unishard.testing.models import llama

    return get_peft_model(llama().bfloat16(), LoraConfig(r=3, target_modules=["q_proj", "v_proj"]))


def wrong():
    return 3
"""


@pytest.fixture
def project(config: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config and a factory, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    Path("cfg.yaml").write_text("backend: fsdp\nprecision: bf16  # as always\ntraining: {micro_batch_size: 2}\n")
    Path("factories.py").write_text(FACTORY)
    monkeypatch.delitem(sys.modules, "factories", raising=False)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    return config.parent


ASK = (
    "plan",
    "cfg.yaml",
    "--model",
    "factories:build",
    "--seq-len",
    "256",
    "--world-size",
    "16",
    "--gpus-per-node",
    "8",
)


def test_json_holds_the_same(project: Path) -> None:
    result = run(*ASK, "--memory", "1GiB", "--json")
    found = json.loads(result.stdout)
    assert found["model"] == {"name": "factories:build", "parameters": 6469, "trainable": 6469, "units": 3}
    assert list(found["activations"]) == ["none", "selective", "full"]
    assert found["activations"]["full"] < found["activations"]["none"]
    by_name = {(each["backend"], each["strategy"]): each for each in found["candidates"]}
    own = by_name["fsdp", "full_shard"]
    assert own["fits"] is True
    assert own["peak"]["phase"] in ("forward", "backward")
    assert own["bytes"]["parameters"]["device"] == 4 * (3 * (4 * 16 + 4 + 1 * 64 + 1) + 1 * 16 + 1)
    assert found["answers"]["ranks"] == 1


def test_the_speed_of_a_disk_says_how_long_an_update_takes(project: Path) -> None:
    with Path("cfg.yaml").open("a") as file:
        file.write("offload: {optimizer: nvme, nvme_path: .}\n")
    ask = (*ASK, "--no-activations", "--disk-speed", "10 kB/s")
    found = json.loads(run(*ask, "--json").stdout)["candidates"]
    own = next(each for each in found if (each["backend"], each["strategy"]) == ("fsdp", "full_shard"))
    state = own["bytes"]["optimizer_state"]["files"]
    assert state
    assert own["disk_seconds"] == state * 8 / 10_000  # 8 ranks share it
    assert f"in files; an update reads and writes 3.3 KiB: {own['disk_seconds']:.2f} s or more" in run(*ask).stdout
    assert "disk_seconds" not in run(*ASK, "--no-activations", "--json").stdout
    assert "--disk-speed: 'fast' is no size" in run(*ASK, "--disk-speed", "fast").stderr


def test_activations_on_the_host_have_a_line(project: Path) -> None:
    with Path("cfg.yaml").open("a") as file:
        file.write("offload: {activations: cpu}\n")
    found = run(*ASK)
    assert found.exit_code == 0, found.output
    assert "offload.activations: those of about two units are on the device" in found.stdout
    assert "selective" not in found.stdout  # it is refused beside them
    said = json.loads(run(*ASK, "--json").stdout)
    assert said["activations_on_host"] > 0
    without = json.loads(run(*ASK, "--set", "offload.activations=none", "--json").stdout)
    assert said["activations"]["none"] < without["activations"]["none"]
    assert without["activations_on_host"] == 0


def test_what_was_computed_is_not_computed_again(project: Path) -> None:
    first = run(*ASK, "--json")
    code = f"from unishard.cli import app\napp({[*ASK, '--json']!r}, standalone_mode=False)"
    code += "\nimport sys\nassert 'torch' not in sys.modules"
    again = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": "."}, capture_output=True, text=True, check=False
    )
    assert again.returncode == 0, again.stderr
    assert again.stdout == first.stdout


def test_a_forward_that_returns_no_loss_is_planned_with_one(project: Path) -> None:
    found = json.loads(run("plan", "cfg.yaml", "--model", "factories:with_loss", "--json").stdout)
    assert found["activations"]["none"] > 0


def test_a_block_that_changes_a_product_in_place_is_planned_with_any_recomputation(project: Path) -> None:
    found = json.loads(run("plan", "cfg.yaml", "--model", "factories:in_place", "--seq-len", "8", "--json").stdout)
    assert list(found["activations"]) == ["none", "selective", "full"]
    assert not found["notes"]


def test_a_stretch_that_only_one_trace_has_is_covered_by_the_next_module() -> None:
    def traced(*segments: Segment) -> Activations:
        return Activations(1, 8, "none", segments)

    one = traced(Segment("forward", "a", 0, 10, 5), Segment("backward", "a", 0, 12, 6))
    two = traced(
        Segment("forward", "a", 0, 20, 7),
        Segment("backward", "", -1, 90, 8),
        Segment("backward", "a", 0, 30, 9),
    )
    sums = [("forward", "a", 0, 30, 12), ("backward", "", -1, 102, 14), ("backward", "a", 0, 42, 15)]
    assert list(one.map(sum, two).segments) == list(two.map(sum, one).segments) == sums


def test_a_folder_of_transformers(project: Path) -> None:
    sizes = {
        "vocab_size": 97,
        "hidden_size": 24,
        "intermediate_size": 41,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
    }
    Path("tiny").mkdir()
    Path("tiny/config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]} | sizes)
    )
    result = run("plan", "cfg.yaml", "--model", "tiny", "--seq-len", "64", "--world-size", "4", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["model"]["units"] == 3
    assert found["activations"]["none"] > found["activations"]["selective"] > found["activations"]["full"]


@pytest.mark.parametrize(("field", "kind"), [("sequence", "all_to_all"), ("tensor", "all_reduce")])
def test_traffic_between_ranks_of_a_group(project: Path, field: str, kind: str) -> None:
    model = str(Path(__file__).parents[2] / "examples" / "llama_tiny")
    ask = ("plan", "cfg.yaml", "--world-size", "2", "--memory", "1GiB", "--seq-len", "128", "--model", model)
    size = ("--set", f"parallel.{field}.size=2")
    alone, shared = (json.loads(run(*ask, "--json", *more).stdout) for more in ((), size))
    assert alone["exchanged"] == []
    found = {(each["kind"], each["phase"], each["ranks"]) for each in shared["exchanged"]}
    assert found >= {(kind, "forward", 2), (kind, "backward", 2)}
    assert all(each["nbytes"] > each["calls"] > 0 for each in shared["exchanged"])
    sent = sum(
        Collective(each["kind"], "activations", "step", each["nbytes"], 2).sent() for each in shared["exchanged"]
    )
    unsharded = [candidate for candidate in shared["candidates"] if candidate["strategy"] == "no_shard"]
    assert all(candidate["wire"]["within"] > sent > 0 for candidate in unsharded)
    assert f" {kind} over 2 ranks in forward, " in " ".join(run(*ask, *size).stdout.split())
    unknown = json.loads(run(*ask, "--json", "--no-activations", *size).stdout)
    assert unknown["notes"] == ["activations are left out, and what ranks of a group send each other"]
    assert alone["answers"]["parallel"] == {}
    if field == "tensor":
        own = next(
            each for each in alone["candidates"] if (each["backend"], each["strategy"]) == ("fsdp", "full_shard")
        )
        less = (*ask, "--memory", str(own["reserved"][0] - 1))
        assert json.loads(run(*less, "--json").stdout)["answers"]["parallel"] == {"tensor": 2}
        assert "; with parallel.tensor: 2 it fits on these" in " ".join(run(*less).stdout.split())


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft 0.21.2 asks for it
def test_a_factory_that_casts_its_model_and_adds_adapters_is_planned(project: Path) -> None:
    """`Module.to` of torch refuses parameters without data, and peft moves each adapter by it."""
    pytest.importorskip("peft")
    from unishard.config import Config

    shape = PlannedModel("factories:adapted", Config()).shape
    assert {each.dtype for each in shape.frozen} == {"bfloat16"}
    assert [(each.shape, each.dtype) for each in shape.trainable[:2]] == [((3, 24), "float32"), ((24, 3), "float32")]
    assert run("plan", "cfg.yaml", "--model", "factories:adapted", "--seq-len", "8").exit_code == 0
