"""What configs say about their processes ends in the section `launch`, and in the torchrun line of the report."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from unishard.cli.report import ReportForm, write_report
from unishard.config import LaunchSettings
from unishard.contract.rules import Fit
from unishard.formats import Outcome, translate

FILE = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "fsdp_config": {"fsdp_version": 2},
}
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
            "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint head:29500 --rdzv-id 1 "
            "train.py",
        ),
        (
            {"num_processes": "${N}", "num_machines": "${M}", "machine_rank": "${R}", "main_process_ip": "$HEAD"},
            "torchrun --nnodes ${M} --nproc-per-node $((${N} / ${M})) --node-rank ${R} --master-addr $HEAD train.py",
        ),
        (
            {
                **TWO,
                "distributed_type": "DEEPSPEED",
                "deepspeed_config": {
                    "zero_stage": 2,
                    "deepspeed_hostfile": "hosts",
                    "deepspeed_exclusion_filter": "a:0",
                },
            },
            f"{UNPLACED}  # once on each host of hosts, without a:0",
        ),
    ],
)
def test_the_torchrun_line_of_a_file_of_accelerate(facts: dict[str, Any], line: str) -> None:
    document = {**FILE, **facts}
    assert translate(document, "unishard", from_="accelerate").launch == line
    assert not translate(document, "accelerate", from_="accelerate").launch  # which says it itself


def test_devices_and_nodes_of_lightning() -> None:
    outcome = translate({"trainer": {"strategy": "fsdp", "devices": 4, "num_nodes": 2}}, "unishard")
    assert outcome.launch == "torchrun --nnodes 2 --nproc-per-node 4 --node-rank RANK --master-addr HOST train.py"
    assert not translate({"trainer": {"strategy": "fsdp"}}, "unishard").launch


def test_the_report_ends_with_it() -> None:
    outcome = translate({**FILE, "num_processes": 4}, "unishard")
    out = io.StringIO()
    write_report(outcome, ReportForm.TEXT, out)
    assert "\nlaunch:\n  torchrun --nproc-per-node 4 train.py\n" in out.getvalue()
    out = io.StringIO()
    write_report(outcome, ReportForm.JSON, out)
    assert json.loads(out.getvalue())["launch"] == outcome.launch


# -- what a command says, beside a config ------------------------------------------------------


def launched(line: str, document: dict[str, Any] = FILE, to: str = "unishard") -> Outcome:
    return translate(document, to, with_=line)


@pytest.mark.parametrize(
    ("line", "section"),
    [
        ("torchrun --nproc_per_node 4 train.py", {"processes_per_node": 4}),
        ("torchrun --standalone --nnodes 1 --nproc-per-node=gpu --master_port 29501 train.py", {"nodes": 1}),
        (
            "torchrun --nnodes=2:4 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=head:29400 --rdzv-id=run7 "
            "--rdzv-conf=join_timeout=600,last_call_timeout=5 --max-restarts=3 -m pkg.train",
            {
                "nodes": "2:4",
                "processes_per_node": 8,
                "endpoint": "head:29400",
                "rendezvous": "c10d",
                "rendezvous_id": "run7",
                "rendezvous_options": {"join_timeout": 600, "last_call_timeout": 5},
                "max_restarts": 3,
            },
        ),
        (
            "NCCL_DEBUG=INFO KEY=x torchrun --nnodes 2 --nproc_per_node 8 --node_rank 1 --master_addr head train.py",
            {"nodes": 2, "processes_per_node": 8, "endpoint": "head:29500", "environment": {"NCCL_DEBUG": "INFO"}},
        ),
        (
            "accelerate launch --num_machines 2 --num_processes 16 --main_process_ip 10.0.0.1 --main_process_port 7 "
            "--rdzv_backend c10d --max_restarts 1 --gpu_ids 0,1,2,3,4,5,6,7 train.py",
            {
                "nodes": 2,
                "processes_per_node": 8,
                "endpoint": "10.0.0.1:7",
                "rendezvous": "c10d",
                "max_restarts": 1,
                "environment": {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"},
            },
        ),
        (
            "deepspeed --num_nodes 2 --num_gpus 8 --master_addr head --master_port 3 train.py",
            {"nodes": 2, "processes_per_node": 8, "endpoint": "head:3"},
        ),
        (
            "deepspeed --include localhost:1,3 train.py",
            {"processes_per_node": 2, "environment": {"CUDA_VISIBLE_DEVICES": "1,3"}},
        ),
        ("deepspeed --hostfile hosts train.py", {"nodes": 2, "processes_per_node": 4, "endpoint": "head:29500"}),
        (
            "NNODES=2 NPROC_PER_NODE=4 MASTER_ADDR=head llamafactory-cli train --stage sft",
            {"nodes": 2, "processes_per_node": 4, "endpoint": "head:29500"},
        ),
    ],
)
def test_a_command_fills_the_section(
    line: str, section: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("head slots=4\nother slots=4\n")
    outcome = launched(line)
    assert outcome.document.get("launch", {}) == section
    assert LaunchSettings.model_validate(section)
    assert not outcome.status(strict=True)


def test_what_the_section_cannot_hold_is_said() -> None:
    outcome = launched("torchrun --nnodes 0 --nproc_per_node 8 --node_rank 1 --max_restarts many train.py")
    assert outcome.document["launch"] == {"processes_per_node": 8}
    notes = {item.key: (item.fit, item.note, item.place) for item in outcome.items if item.supplied}
    assert notes["torchrun --nnodes"] == (
        Fit.IGNORED,
        "the section launch does not take 0; set launch.nodes",
        "the command",
    )
    assert "--node-rank" in notes["torchrun --node-rank"][1]
    gone = launched("deepspeed --hostfile gone --exclude a:0 train.py")
    notes = {item.key: item.note for item in gone.items if item.supplied}
    assert notes["deepspeed --hostfile"] == "file not found: its hosts are unknown; set launch.nodes"
    assert "launch.processes_per_node" in notes["deepspeed --exclude"]


def test_a_command_fills_other_tools_as_well() -> None:
    line = "torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint head:7 train.py"
    document = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
    told = {
        "num_machines": 2,
        "num_processes": 16,
        "main_process_ip": "head",
        "main_process_port": 7,
        "rdzv_backend": "c10d",
    }
    assert told.items() <= launched(line, document, "accelerate").document.items()
    assert launched(line, document, "deepspeed").document.items() >= document.items()


def test_a_file_of_accelerate_beside_a_config_fills_it_too(tmp_path: Path) -> None:
    (tmp_path / "acc.yaml").write_text(json.dumps({**FILE, **TWO, "main_process_ip": "head", "rdzv_backend": "static"}))
    document = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1}
    outcome = translate(document, "unishard", with_=str(tmp_path / "acc.yaml"))
    assert outcome.document["launch"] == {
        "nodes": 2,
        "processes_per_node": 8,
        "endpoint": "head:29500",
        "rendezvous": "static",
    }


def test_the_config_and_the_command_must_agree() -> None:
    outcome = launched(
        "torchrun --nproc_per_node 4 train.py", {"launch": {"processes_per_node": 4, "max_restarts": 1}}, "hf"
    )
    assert outcome.reading.config.launch.max_restarts == 1
    outcome = launched("torchrun --nproc_per_node 4 --max_restarts 2 train.py", {"launch": {"max_restarts": 1}}, "hf")
    (refused,) = outcome.of(Fit.UNSUPPORTED)
    assert (refused.key, refused.note) == (
        "torchrun --max-restarts",
        "contradicts launch.max_restarts, which is 1; make them equal, or leave one out",
    )


@pytest.mark.parametrize("backend", ["static", "c10d", "etcd-v2"])
def test_how_hosts_meet_goes_there_and_back(backend: str) -> None:
    there = translate(
        {**FILE, **TWO, "rdzv_backend": backend, "main_process_ip": "head", "main_process_port": 7}, "unishard"
    )
    assert there.reading.config.launch.rendezvous == backend
    back = translate(there.document, "accelerate", from_="unishard").document
    assert (back["rdzv_backend"], back["main_process_ip"], back["main_process_port"]) == (backend, "head", 7)
