"""What configs say about their processes ends in the section `launch`, and in the torchrun line of the report."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from unishard.cli.report import ReportForm, write_report
from unishard.config.topology import Topology
from unishard.formats import translate
from unishard.mapping.rules import Fit

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


SIXTEEN = {
    **TWO,
    "machine_rank": 1,
    "main_process_ip": "10.0.0.1",
    "main_process_port": 29501,
    "rdzv_backend": "c10d",
    "gpu_ids": "0,1,2,3,4,5,6,7",
}


def test_they_are_read_into_the_section_and_written_from_it() -> None:
    there = translate({**FILE, **SIXTEEN}, "unishard", from_="accelerate")
    assert there.document["launch"] == {
        "nodes": 2,
        "processes_per_node": 8,
        "endpoint": "10.0.0.1:29501",
        "environment": {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"},
    }
    back = translate(there.document, "accelerate", from_="unishard").document
    assert {key: back.get(key) for key in SIXTEEN} == {**SIXTEEN, "machine_rank": None}  # which differs by host


def test_what_unishard_launches_is_what_others_are_told() -> None:
    launch = {"nodes": "2:4", "processes_per_node": 8, "endpoint": "[fd00::1]:7", "max_restarts": 3, "environment": {"A": 1}}
    outcome = translate({"launch": launch}, "accelerate", from_="unishard")
    told = {"num_machines": 4, "num_processes": 32, "main_process_ip": "[fd00::1]", "main_process_port": 7, "rdzv_backend": "c10d"}
    assert told.items() <= outcome.document.items()
    fits = {item.key: item.fit for item in outcome.items if item.key.startswith("launch.")}
    assert (fits["launch.nodes"], fits["launch.environment"], fits["launch.max_restarts"]) == (
        Fit.APPROXIMATE,
        Fit.NEEDS_INPUT,
        Fit.IGNORED,
    )
    assert translate({"launch": 4}, "accelerate", from_="unishard").document["num_processes"] == 4


def test_one_host_has_no_place_to_meet() -> None:
    facts = {"num_processes": 2, "num_machines": 1, "gpu_ids": "all", "main_process_ip": "10.0.0.1", "main_process_port": 29501}
    assert translate({**FILE, **facts}, "unishard").document["launch"] == {"nodes": 1, "processes_per_node": 2}
