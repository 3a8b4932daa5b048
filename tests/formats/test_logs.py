"""What other tools' keys about logs come to, and how those tools say what `logging` says."""

from __future__ import annotations

from typing import Any

import pytest

from unishard.config import Logging
from unishard.contract.rules import Fit
from unishard.formats import Outcome, translate

ARGUMENTS = {"per_device_train_batch_size": 2, "learning_rate": 1e-4, "fsdp": True, "output_dir": "out"}
AXOLOTL = {
    "base_model": "x",
    "datasets": [{"path": "a"}],
    "micro_batch_size": 2,
    "learning_rate": 1e-4,
    "output_dir": "out",
}
ZERO = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1}
COMPOSER = {
    "max_duration": "10ba",
    "device_train_microbatch_size": 1,
    "precision": "fp32",
    "optimizer": {"name": "decoupled_adamw", "lr": 1e-4},
}
BASES = {
    "hf": ARGUMENTS,
    "axolotl": AXOLOTL,
    "deepspeed": ZERO,
    "lightning": {"strategy": "fsdp"},
    "torchtitan": {"training": {"steps": 100}},
    "composer": COMPOSER,
}
FILES = {"enabled": True, "output_path": "out", "job_name": "a"}
LOGGERS = "lightning.pytorch.loggers."


def logging_of(outcome: Outcome) -> dict[str, Any]:
    """The fields of `logging` that a translation sets; the schema takes them."""
    fields = dict(outcome.document.get("logging", {}))
    Logging.model_validate(fields)
    return fields


@pytest.mark.parametrize(
    ("tool", "said", "fields"),
    [
        ("hf", {"logging_steps": 5}, {"to": ["progress"], "every_steps": 5}),
        (
            "hf",
            {"report_to": "wandb", "run_name": "a"},
            {"to": ["progress", "wandb"], "every_steps": 500, "run_name": "a"},
        ),
        (
            "hf",
            {"report_to": ["comet_ml", "tensorboard"], "logging_steps": 7},
            {"to": ["progress", "tensorboard"], "every_steps": 7, "dir": "out/runs"},
        ),
        (
            "hf",
            {"report_to": ["mlflow"], "logging_dir": "l"},
            {"to": ["progress", "mlflow"], "every_steps": 500, "dir": "l"},
        ),
        ("hf", {"logging_steps": 5, "logging_strategy": "epoch", "report_to": "wandb"}, {}),
        ("hf", {"logging_steps": 0.1}, {}),
        ("hf", {"report_to": "none", "run_name": "a"}, {}),
        ("hf", {"report_to": "all"}, {}),
        ("axolotl", {"logging_steps": 1}, {"to": ["progress"], "every_steps": 1}),
        (
            "axolotl",
            {
                "wandb_project": "p",
                "wandb_name": "n",
                "wandb_entity": None,
                "wandb_mode": "offline",
                "logging_steps": 1,
            },
            {"to": ["progress", "wandb"], "every_steps": 1, "project": "p", "run_name": "n", "wandb_mode": "offline"},
        ),
        ("axolotl", {"wandb_project": "p", "wandb_mode": "disabled"}, {}),
        ("axolotl", {"use_wandb": False, "wandb_project": "p"}, {}),
        (
            "axolotl",
            {"use_tensorboard": True, "output_dir": None},
            {"to": ["progress", "tensorboard"], "dir": "./model-out/runs"},
        ),
        (
            "axolotl",
            {"use_mlflow": True, "mlflow_tracking_uri": "http://x", "mlflow_experiment_name": "e"},
            {"to": ["progress", "mlflow"], "dir": "out/runs", "project": "e", "mlflow_uri": "http://x"},
        ),
        ("deepspeed", {"steps_per_print": 20}, {"to": ["progress"], "every_steps": 20}),
        ("deepspeed", {"steps_per_print": None, "wall_clock_breakdown": True, "comet": {"enabled": True}}, {}),
        (
            "deepspeed",
            {"tensorboard": FILES, "steps_per_print": 5},
            {"to": ["progress", "tensorboard"], "every_steps": 5, "dir": "out/a"},
        ),
        (
            "deepspeed",
            {"csv_monitor": FILES, "wandb": {"enabled": True, "team": "t", "group": "g"}},
            {
                "to": ["progress", "wandb", "jsonl"],
                "dir": "out/a",
                "project": "deepspeed",
                "wandb_entity": "t",
                "wandb_group": "g",
            },
        ),
        ("deepspeed", {"tensorboard": {"enabled": False}}, {}),
        ("lightning", {"log_every_n_steps": 5}, {"to": ["progress"], "every_steps": 5}),
        ("lightning", {"logger": False, "log_every_n_steps": 5, "enable_progress_bar": False}, {}),
        (
            "lightning",
            {"logger": True, "default_root_dir": "out"},
            {"to": ["progress", "tensorboard"], "dir": "out/lightning_logs"},
        ),
        (
            "lightning",
            {
                "logger": [
                    {"class_path": f"{LOGGERS}CSVLogger", "init_args": {"save_dir": "logs", "name": "a"}},
                    {"class_path": "WandbLogger", "init_args": {"project": "p", "name": "r", "offline": True}},
                    {"class_path": "NeptuneLogger"},
                ],
                "log_every_n_steps": 2,
                "enable_progress_bar": False,
            },
            {
                "to": ["jsonl", "wandb"],
                "every_steps": 2,
                "dir": "logs/a",
                "project": "p",
                "run_name": "r",
                "wandb_mode": "offline",
            },
        ),
        ("torchtitan", {"metrics": {"log_freq": 3}}, {"to": ["progress"], "every_steps": 3}),
        (
            "torchtitan",
            {
                "metrics": {"log_freq": 3, "enable_tensorboard": True, "save_tb_folder": "t"},
                "job": {"dump_folder": "d"},
            },
            {"to": ["progress", "tensorboard"], "every_steps": 3, "dir": "d/t"},
        ),
        ("torchtitan", {"metrics": {"enable_wandb": True}}, {"to": ["progress", "wandb"]}),
        ("composer", {"console_log_interval": "5ba"}, {"to": ["progress"], "every_steps": 5}),
        ("composer", {"console_log_interval": "1ep"}, {}),
        (
            "composer",
            {"loggers": {"wandb": {"project": "p"}, "neptune": {}}, "run_name": "r"},
            {"to": ["progress", "wandb"], "every_steps": 1, "project": "p", "run_name": "r"},
        ),
        (
            "composer",
            {"loggers": {"tensorboard": {"log_dir": "l"}}},
            {"to": ["progress", "tensorboard"], "every_steps": 1, "dir": "l"},
        ),
    ],
)
def test_what_a_tool_logs(tool: str, said: dict[str, Any], fields: dict[str, Any]) -> None:
    document = {**BASES[tool], **said}
    assert logging_of(translate(document, "unishard", from_=tool)) == fields
    again = translate(document, tool, from_=tool)
    assert {key: again.document.get(key) for key in said} == said, "unchanged in its own format"
    assert not [item for item in again.items if item.fit is Fit.UNSUPPORTED]


@pytest.mark.parametrize(
    ("tool", "written", "fit"),
    [
        ("hf", {"report_to": ["wandb"], "logging_strategy": "steps", "logging_steps": 3, "run_name": "r"}, Fit.IGNORED),
        ("axolotl", {"use_wandb": True, "logging_steps": 3, "wandb_name": "r", "wandb_project": "p"}, Fit.IGNORED),
        (
            "deepspeed",
            {
                "steps_per_print": 3,
                "wandb": {"enabled": True, "project": "p"},
                "csv_monitor": {"enabled": True, "output_path": "out", "job_name": "logs"},
            },
            Fit.EQUIVALENT,
        ),
        ("torchtitan", {"metrics": {"enable_wandb": True, "log_freq": 3}}, Fit.IGNORED),
        ("composer", {"loggers": {"wandb": {"project": "p", "name": "r"}}, "console_log_interval": "3ba"}, Fit.IGNORED),
    ],
)
def test_how_a_tool_says_it(tool: str, written: dict[str, Any], fit: Fit) -> None:
    logging = {
        "to": ["progress", "jsonl", "wandb"],
        "dir": "out/logs",
        "every_steps": 3,
        "run_name": "r",
        "project": "p",
    }
    outcome = translate({"logging": logging}, tool, from_="unishard")
    assert {key: outcome.document.get(key) for key in written} == written
    fits = {item.key: item.fit for item in outcome.items}
    assert (fits["logging.to"], fits["logging.every_steps"]) == (fit, Fit.EQUIVALENT)
    # DeepSpeed and torchtitan have no name of the run in their files
    assert fits["logging.run_name"] is (Fit.IGNORED if tool in ("deepspeed", "torchtitan") else Fit.EXACT)
    plain = translate({}, tool, from_="unishard").document
    assert not [
        key for key in plain if "log" in key or "wandb" in key or "report" in key or "print" in key or "metrics" in key
    ]


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
def test_loggers_of_lightning_there_and_back(backend: str) -> None:
    logging = {
        "to": ["jsonl", "wandb"],
        "dir": "out/logs",
        "every_steps": 3,
        "run_name": "r",
        "project": "p",
        "wandb_mode": "offline",
    }
    there = translate({"backend": backend, "logging": logging}, "lightning", from_="unishard")
    wandb = {"project": "p", "name": "r", "save_dir": "out/logs", "offline": True}
    assert there.document["trainer"]["logger"] == [
        {"class_path": f"{LOGGERS}CSVLogger", "init_args": {"save_dir": "out/logs", "name": "", "version": ""}},
        {"class_path": f"{LOGGERS}WandbLogger", "init_args": wandb},
    ]
    compile(there.text, "snippet", "exec")
    assert logging_of(translate(there.document, "unishard", from_="lightning")) == logging


@pytest.mark.parametrize(
    ("tool", "said", "profile", "fit"),
    [
        (
            "axolotl",
            {"profiler_steps": 2, "profiler_steps_start": 5},
            {"steps": [6, 7], "dir": "out", "memory": True},
            Fit.EQUIVALENT,
        ),
        ("axolotl", {"profiler_steps": None}, {}, Fit.IGNORED),
        (
            "torchtitan",
            {
                "profiling": {
                    "enable_profiling": True,
                    "profile_freq": 10,
                    "profiler_active": 2,
                    "save_traces_folder": "t",
                }
            },
            {"steps": [9, 10], "dir": "./outputs/t", "ranks": "all"},
            Fit.APPROXIMATE,
        ),
        ("torchtitan", {"profiling": {"enable_profiling": False, "profile_freq": 10}}, {}, Fit.IGNORED),
        ("lightning", {"profiler": "pytorch"}, {"steps": [3, 4, 5], "dir": "lightning_logs"}, Fit.APPROXIMATE),
        ("lightning", {"profiler": "simple"}, {}, Fit.IGNORED),
        (
            "composer",
            {"profiler": {"schedule": {"wait": 1, "warmup": 1, "active": 2, "repeat": 1}, "torch_prof_folder": "t"}},
            {"steps": [3, 4], "dir": "t"},
            Fit.APPROXIMATE,
        ),
    ],
)
def test_what_a_tool_profiles(tool: str, said: dict[str, Any], profile: dict[str, Any], fit: Fit) -> None:
    outcome = translate({**BASES[tool], **said}, "unishard", from_=tool)
    assert outcome.document.get("profile", {}) == profile
    key = "profiling.enable_profiling" if tool == "torchtitan" else next(iter(said))
    assert {item.key: item.fit for item in outcome.items}[key] is fit


@pytest.mark.parametrize(
    ("tool", "written"),
    [
        ("axolotl", {"profiler_steps": 2, "profiler_steps_start": 5}),
        (
            "torchtitan",
            {
                "profiling": {
                    "enable_profiling": True,
                    "profile_freq": 7,
                    "profiler_active": 2,
                    "profiler_warmup": 3,
                    "enable_memory_snapshot": True,
                    "save_traces_folder": "t",
                }
            },
        ),
        (
            "composer",
            {
                "profiler": {
                    "schedule": {"skip_first": 0, "wait": 4, "warmup": 1, "active": 2, "repeat": 1},
                    "torch_prof_folder": "out/t",
                }
            },
        ),
    ],
)
def test_how_a_tool_profiles(tool: str, written: dict[str, Any]) -> None:
    profile = {"steps": [6, 7], "dir": "out/t", "memory": True}
    outcome = translate({"profile": profile}, tool, from_="unishard")
    assert {key: outcome.document.get(key) for key in written} == written
    gaps = translate({"profile": {**profile, "steps": [3, 7]}}, tool, from_="unishard")
    assert {item.key: item.fit for item in gaps.items}["profile.steps"] is Fit.IGNORED
    assert not outcome.document.keys() & {"profiler", "profiling"} - written.keys()


def test_a_trainer_around_deepspeed_logs_by_its_own_keys() -> None:
    """So the prints and monitors of DeepSpeed's config, which are beside it, contradict nothing."""
    inside = {**ZERO, "steps_per_print": 2000, "tensorboard": FILES}
    outcome = translate({**ARGUMENTS, "fsdp": "", "deepspeed": inside, "logging_steps": 5}, "unishard", from_="hf")
    assert logging_of(outcome) == {"to": ["progress"], "every_steps": 5}
    words = [
        "--per_device_train_batch_size",
        "1",
        "--logging_steps",
        "7",
        "--bf16",
        "True",
        "--save_steps",
        "3",
        "--output_dir",
        "o",
    ]
    for arguments in (words, words[2:4]):
        outcome = translate(inside, "unishard", from_="deepspeed", with_=arguments)
        assert not outcome.of(Fit.UNSUPPORTED)
        assert logging_of(outcome)["every_steps"] == 7


def test_accelerate_is_told_what_the_script_must_do() -> None:
    outcome = translate({"logging": {"to": ["progress", "wandb"]}}, "accelerate", from_="unishard")
    (item,) = [item for item in outcome.items if item.key == "logging.to"]
    assert (item.fit, "Accelerator(log_with=..." in item.note) == (Fit.IGNORED, True)
