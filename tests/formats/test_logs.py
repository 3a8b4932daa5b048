"""What other tools' keys about logs come to, and how those tools say what `logging` says."""

from __future__ import annotations

from typing import Any

import pytest

from unishard.config import Logging
from unishard.formats import Outcome, translate
from unishard.mapping.rules import Fit

ARGUMENTS = {"per_device_train_batch_size": 2, "learning_rate": 1e-4, "fsdp": True, "output_dir": "out"}
AXOLOTL = {"base_model": "x", "datasets": [{"path": "a"}], "micro_batch_size": 2, "learning_rate": 1e-4, "output_dir": "out"}
BASES = {"hf": ARGUMENTS, "axolotl": AXOLOTL}


def logging_of(outcome: Outcome) -> dict[str, Any]:
    """The fields of `logging` that a translation sets; the schema takes them."""
    fields = dict(outcome.document.get("logging", {}))
    Logging.model_validate(fields)
    return fields


@pytest.mark.parametrize(
    ("tool", "said", "fields"),
    [
        ("hf", {"logging_steps": 5}, {"to": ["progress"], "every_steps": 5}),
        ("hf", {"report_to": "wandb", "run_name": "a"}, {"to": ["progress", "wandb"], "every_steps": 500, "run_name": "a"}),
        (
            "hf",
            {"report_to": ["comet_ml", "tensorboard"], "logging_steps": 7},
            {"to": ["progress", "tensorboard"], "every_steps": 7, "dir": "out/runs"},
        ),
        ("hf", {"report_to": ["mlflow"], "logging_dir": "l"}, {"to": ["progress", "mlflow"], "every_steps": 500, "dir": "l"}),
        ("hf", {"logging_steps": 5, "logging_strategy": "epoch", "report_to": "wandb"}, {}),
        ("hf", {"logging_steps": 0.1}, {}),
        ("hf", {"report_to": "none", "run_name": "a"}, {}),
        ("hf", {"report_to": "all"}, {}),
        ("axolotl", {"logging_steps": 1}, {"to": ["progress"], "every_steps": 1}),
        (
            "axolotl",
            {"wandb_project": "p", "wandb_name": "n", "wandb_entity": None, "wandb_mode": "offline", "logging_steps": 1},
            {"to": ["progress", "wandb"], "every_steps": 1, "project": "p", "run_name": "n", "wandb_mode": "offline"},
        ),
        ("axolotl", {"wandb_project": "p", "wandb_mode": "disabled"}, {}),
        ("axolotl", {"use_wandb": False, "wandb_project": "p"}, {}),
        ("axolotl", {"use_tensorboard": True, "output_dir": None}, {"to": ["progress", "tensorboard"], "dir": "./model-out/runs"}),
        (
            "axolotl",
            {"use_mlflow": True, "mlflow_tracking_uri": "http://x", "mlflow_experiment_name": "e"},
            {"to": ["progress", "mlflow"], "dir": "out/runs", "project": "e", "mlflow_uri": "http://x"},
        ),
    ],
)
def test_what_a_tool_logs(tool: str, said: dict[str, Any], fields: dict[str, Any]) -> None:
    document = {**BASES[tool], **said}
    assert logging_of(translate(document, "unishard", from_=tool)) == fields
    again = translate(document, tool, from_=tool)
    assert {key: again.document.get(key) for key in said} == said, "unchanged in its own format"


@pytest.mark.parametrize(
    ("tool", "written"),
    [
        ("hf", {"report_to": ["wandb"], "logging_strategy": "steps", "logging_steps": 3, "run_name": "r"}),
        ("axolotl", {"use_wandb": True, "logging_steps": 3, "wandb_name": "r", "wandb_project": "p"}),
    ],
)
def test_how_a_tool_says_it(tool: str, written: dict[str, Any]) -> None:
    logging = {"to": ["progress", "jsonl", "wandb"], "dir": "logs", "every_steps": 3, "run_name": "r", "project": "p"}
    outcome = translate({"logging": logging}, tool, from_="unishard")
    assert {key: outcome.document.get(key) for key in written} == written
    fits = {item.key: item.fit for item in outcome.items}
    assert (fits["logging.to"], fits["logging.every_steps"], fits["logging.run_name"]) == (Fit.IGNORED, Fit.EQUIVALENT, Fit.EXACT)
    assert not [key for key in translate({}, tool, from_="unishard").document if "log" in key or "wandb" in key or "report" in key]
