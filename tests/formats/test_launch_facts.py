"""What configs say about their processes ends in the torchrun line of the report."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from unishard.cli.report import ReportForm, write_report
from unishard.config.topology import Topology
from unishard.formats import translate

FILE = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "bf16", "fsdp_config": {"fsdp_version": 2}}
UNPLACED = "torchrun --nnodes 2 --nproc-per-node 8 --node-rank RANK --master-addr HOST train.py"
TWO = {"num_processes": 16, "num_machines": 2}


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({}, ""),
        ({"gpu_ids": "all", "rdzv_backend": "static"}, ""),
        ({"num_processes": 4}, "torchrun --nproc-per-node 4 train.py"),
        (
            {"num_processes": 2, "num_machines": 1, "machine_rank": 0, "gpu_ids": "2,3", "main_process_port": 0},
            "CUDA_VISIBLE_DEVICES=2,3 torchrun --nproc-per-node 2 train.py",
        ),
        (
            {**TWO, "machine_rank": 1, "main_process_ip": "10.0.0.1", "main_process_port": 29501},
            "torchrun --nnodes 2 --nproc-per-node 8 --node-rank 1 --master-addr 10.0.0.1 --master-port 29501 train.py",
        ),
        (
            {**TWO, "rdzv_backend": "c10d", "main_process_ip": "head"},
            "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint head:29500 --rdzv-id 1 train.py",
        ),
        (
            {"num_processes": "${N}", "num_machines": "${M}", "machine_rank": "${R}", "main_process_ip": "$HEAD"},
            "torchrun --nnodes ${M} --nproc-per-node $((${N} / ${M})) --node-rank ${R} --master-addr $HEAD train.py",
        ),
        (
            {
                **TWO,
                "distributed_type": "DEEPSPEED",
                "deepspeed_config": {"zero_stage": 2, "deepspeed_hostfile": "hosts", "deepspeed_exclusion_filter": "a:0"},
            },
            f"{UNPLACED}  # once on each host of hosts, without a:0",
        ),
    ],
)
def test_the_torchrun_line_of_a_file_of_accelerate(facts: dict[str, Any], line: str) -> None:
    document = {**FILE, **facts}
    assert translate(document, "unishard", from_="accelerate").launch == line
    assert not translate(document, "accelerate", from_="accelerate").launch  # which says it itself


def test_ranks_that_are_asked_for_count() -> None:
    outcome = translate({**FILE, "num_processes": 4}, "unishard", topology=Topology(16, 8))
    assert outcome.launch.startswith("torchrun --nnodes 2 --nproc-per-node 8 ")


def test_devices_and_nodes_of_lightning() -> None:
    outcome = translate({"trainer": {"strategy": "fsdp", "devices": 4, "num_nodes": 2}}, "unishard")
    assert outcome.launch == "torchrun --nnodes 2 --nproc-per-node 4 --node-rank RANK --master-addr HOST train.py"
    assert not translate({"trainer": {"strategy": "fsdp"}}, "unishard").launch


def test_the_report_ends_with_it() -> None:
    outcome = translate({**FILE, "num_processes": 4}, "unishard")
    out = io.StringIO()
    write_report(outcome, ReportForm.TEXT, out)
    assert "\nlaunch: torchrun --nproc-per-node 4 train.py\n" in out.getvalue()
    out = io.StringIO()
    write_report(outcome, ReportForm.JSON, out)
    assert json.loads(out.getvalue())["launch"] == outcome.launch
