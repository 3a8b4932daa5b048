"""The pieces of `make gpu`: the runner, the verdicts, the formulas and the page; the cheapest ones run in their CPU
form."""

import json
import sys
import warnings
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest
import torch
from forking import completed

from benchmarks.gpu import __main__ as runner
from benchmarks.gpu import llamas, packages, page, piece
from benchmarks.gpu.pieces import BUDGET, PIECES, Piece
from benchmarks.gpu.report import Check, Report, verdict_of
from dev.pages import marked

ROOT = Path(__file__).resolve().parents[2]


def answer(folder, name, device="cpu"):
    return json.loads((folder / f"{name}-{device}.json").read_text())


def fake(monkeypatch, name, run):
    """A piece whose module is made here."""
    module = type(sys)(f"benchmarks.gpu.{name}")
    module.run = run
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return Piece(name, name, "made by a test", 10)


# -- verdicts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (["pass", "pass"], "pass"),
        (["pass", "fail", "unsupported"], "fail"),
        (["pass", "unsupported", "needs CUDA"], "pass"),
        (["unsupported", "needs CUDA"], "unsupported"),
        (["needs CUDA"], "needs CUDA"),
        ([], "fail"),
    ],
)
def test_one_failed_check_fails_a_piece_and_nothing_proved_is_no_pass(verdicts, expected):
    assert verdict_of(Check("a", verdict, "", {}) for verdict in verdicts) == expected


def test_a_piece_that_fails_gives_exit_code_1_and_its_json(monkeypatch, tmp_path, capsys):
    def run(report):
        report.check("holds", True)
        report.check("two is three", 2 == 3, "no", two=2)

    assert piece.run_piece(fake(monkeypatch, "wrong", run), "cpu", tmp_path) == 1
    found = answer(tmp_path, "wrong")
    assert found["verdict"] == "fail"
    assert [check["verdict"] for check in found["checks"]] == ["pass", "fail"]
    assert found["checks"][1]["figures"] == {"two": 2}
    assert "two is three" in capsys.readouterr().out


def test_a_piece_that_raises_keeps_what_it_found(monkeypatch, tmp_path):
    def run(report):
        report.check("holds", True)
        raise RuntimeError("broke")

    assert piece.run_piece(fake(monkeypatch, "broken", run), "cpu", tmp_path) == 1
    found = answer(tmp_path, "broken")
    assert [check["verdict"] for check in found["checks"]] == ["pass", "fail"]
    assert "RuntimeError: broke" in found["checks"][1]["detail"]


# -- the runner ------------------------------------------------------------------------------------


def test_every_piece_is_listed_and_stays_below_ten_minutes(capsys):
    assert runner.main(["--list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == [piece.name for piece in PIECES]
    assert len(set(listed)) == len(listed)
    assert all(piece.limit < 600 for piece in PIECES)
    assert BUDGET <= 40 * 60


@pytest.mark.parametrize("name", [piece.name for piece in PIECES])
def test_every_piece_has_a_module_to_run_and_a_row_on_the_page(name):
    (wanted,) = [piece for piece in PIECES if piece.name == name]
    assert callable(import_module(f"benchmarks.gpu.{wanted.module}").run)
    assert f"`{name}`" in (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")


def test_a_piece_beyond_the_budget_is_not_run_and_fails(tmp_path):
    assert runner.run([PIECES[0]], "cpu", tmp_path, tmp_path / "none", 0, None) == 1
    assert "budget" in answer(tmp_path, PIECES[0].name)["checks"][0]["detail"]


# -- wheels ----------------------------------------------------------------------------------------

WHEELS = [
    "deepspeed-0.19.8-py3-none-any.whl",
    "pydantic_core-2.50.4-cp312-cp312-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
    "psutil-7.2.2-cp36-abi3-manylinux_2_12_x86_64.whl",
    "shellingham-1.5.4-py2.py3-none-any.whl",
]


@pytest.mark.parametrize(
    ("installed", "tag", "expected"),
    [
        ({}, "cp312", ["deepspeed", "pydantic-core", "psutil", "shellingham"]),
        ({}, "cp311", ["deepspeed", "psutil", "shellingham"]),
        (
            {"deepspeed": "0.19.8", "pydantic-core": "2.41.5", "psutil": "7.2.2", "shellingham": "1.10"},
            "cp312",
            ["pydantic-core"],
        ),
        ({"deepspeed": "0.19.10+cu130", "pydantic-core": "2.50.4", "psutil": "8", "shellingham": "1.5.4"}, "cp312", []),
    ],
)
def test_what_is_missing_or_older_is_installed_and_nothing_else(installed, tag, expected):
    wheels = [packages.parse(Path(name)) for name in WHEELS]
    assert [wheel.name for wheel in packages.needed(wheels, installed.get, tag=tag)] == expected


# -- formulas --------------------------------------------------------------------------------------


def test_parameters_are_those_of_the_model():
    by_hand = import_module("benchmarks.gpu.by_hand")
    size = llamas.SIZES["tiny"]
    assert sum(parameter.numel() for parameter in by_hand.model(size).parameters()) == llamas.parameters(size)[0]


def test_mfu_is_the_models_arithmetic_over_the_peak():
    size = llamas.Size(hidden=8, inner=16, layers=2, heads=2, kv_heads=1, vocabulary=10, tied=False, batch=1, length=4)
    # A block: 64 + 32 + 32 + 64 in attention, 3 * 128 in the MLP, 16 in the norms; then a norm of 8 and a head of 80;
    # 80 more look up.
    assert llamas.parameters(size) == (2 * 592 + 8 + 80 + 80, 2 * 592 + 8 + 80)
    assert llamas.flops_per_token(size) == 6 * 1272 + 12 * 2 * 8 * 4
    assert llamas.mfu(1000, size, 84e6) == pytest.approx(1000 * 8400 / 84e6)


def test_a_card_whose_peak_is_not_known_has_none():
    assert llamas.peak_of("NVIDIA H200") == 989e12
    assert llamas.peak_of("NVIDIA H100 PCIe") is None
    assert llamas.peak_of("Some Other Card") is None


def test_warnings_and_explicit_waits_are_counted_by_place(monkeypatch):
    syncs, modes = import_module("benchmarks.gpu.syncs"), []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with syncs.watching("cuda") as places:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
        torch.cuda.synchronize()
    torch.cuda.synchronize()
    assert modes == ["warn", "default"]
    assert sorted(places.values()) == [1, 2]
    assert places["torch.cuda.synchronize"] == 1
    assert any(place.startswith("unit/test_gpu_pieces.py:") for place in places)


def test_more_synchronizations_than_the_budget_fail():
    syncs, verdicts = import_module("benchmarks.gpu.syncs"), []
    for ours in (2, 3):
        report = Report("syncs", "cuda", quiet=True)
        syncs.judge(report, "fsdp", Counter(a=ours * 5), Counter(b=5))
        verdicts.append(report.verdict)
    assert verdicts == ["pass", "fail"]


def test_one_repeat_with_other_bits_fails():
    offload, training = import_module("benchmarks.gpu.offload"), import_module("benchmarks.gpu.training")
    same, other = training.Curve((1.0, 0.9), (3.0, 2.0)), training.Curve((1.0, 0.9), (3.0, 2.0 + 1e-15 * 4))
    for curves, verdict in (([same] * 3, "pass"), ([same, same, other], "fail")):
        report = Report("offload", "cuda", quiet=True)
        offload.judge(report, "fsdp", curves, [same])
        assert report.verdict == verdict


@pytest.mark.parametrize(("planned", "verdict"), [(1_080, "pass"), (1_120, "fail"), (890, "fail")])
def test_a_peak_far_from_the_plan_fails(monkeypatch, planned, verdict):
    memory = import_module("benchmarks.gpu.memory")
    monkeypatch.setattr(memory, "full_size", lambda device: True)
    report = Report("memory", "cuda", quiet=True)
    memory.judge(report, "fsdp full_shard", planned, 1_000, "step")
    assert report.verdict == verdict


@pytest.mark.parametrize(
    ("record", "verdict"),
    [
        ({"losses": 9e-6, "norms": 9e-5}, "pass"),
        ({"losses": 2e-5, "norms": 0.0}, "fail"),
        ({"losses": float("nan"), "norms": 0.0}, "fail"),
        ({"error": "RuntimeError: no"}, "fail"),
        ({"error": "ModelError: no", "refused": True}, "unsupported"),
        ({"plain": "RuntimeError: no"}, "unsupported"),
    ],
)
def test_a_model_that_trains_otherwise_fails(record, verdict):
    report = Report("models", "cuda", quiet=True)
    import_module("benchmarks.gpu.models").judge(
        report, {"case": "llama", "run": "fsdp fp32", "precision": "fp32"} | record
    )
    assert report.verdict == verdict


def test_the_oracle_trains_where_it_is_told():
    cells = import_module("benchmarks.gpu.cells")
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):  # no value can be read there
        cells.expected(cells.cells("cpu")[:1], "meta")


# -- the page --------------------------------------------------------------------------------------


def measured(device, **figures):
    check = {"name": "fsdp full_shard, 1b: at least", "verdict": "pass", "detail": "", "figures": figures}
    versions = {"python": "3.12.3", "torch": "2.11.0"}
    return {
        "piece": "throughput_1b",
        "device": device,
        "hardware": "A Card",
        "verdict": "pass",
        "seconds": 61.0,
        "versions": versions,
        "checks": [check],
    }


SIDE = {"tokens_per_second": 12_345.6, "mfu": 0.4321, "peak_gib": 55.5}


def test_figures_from_a_cpu_are_none_of_a_gpu():
    assert page.figures([]) == page.NOT_RUN
    assert page.figures([measured("cpu", ratio=1.0, unishard=SIDE, **{"by hand": SIDE})]) == page.NOT_RUN


def test_figures_of_a_gpu_stand_in_the_table():
    text = page.figures([measured("cuda", ratio=0.987, unishard=SIDE, **{"by hand": SIDE | {"mfu": None}})])
    assert "A Card; python 3.12.3, torch 2.11.0" in text
    assert "| throughput_1b | pass | 1 pass |  | 61 |" in text
    assert "| fsdp full_shard, 1b | unishard | 12,346 | 43.2% | 55.5 | 0.987 |" in text
    assert "| fsdp full_shard, 1b | by hand | 12,346 |  | 55.5 |  |" in text
    assert "| cells | not run |" in text
    assert page.NOT_RUN not in text


def test_no_page_takes_a_figure_of_a_simulated_device(tmp_path):
    report = measured("cuda") | {"hardware": "NVIDIA H100 80GB HBM3 (simulated)"}
    (tmp_path / "throughput_1b-cuda.json").write_text(json.dumps(report))
    target = tmp_path / "gpu.md"
    target.write_text(f"<!-- figures: x -->\n{page.NOT_RUN}\n<!-- end of figures -->\n")
    with pytest.raises(ValueError, match=r"gpu.md takes no figure of a simulated device"):
        page.write(tmp_path, target)
    assert page.NOT_RUN in target.read_text()


def test_the_page_has_the_place_for_the_figures():
    assert "| piece | verdict |" in marked.part(ROOT / "docs" / "gpu.md", "figures")


# -- a run -----------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_the_cheapest_piece_runs_on_the_cpu(tmp_path):
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        "throughput_1b",
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
        "--wheels",
        "none",
    ]
    done = completed(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert answer(tmp_path, "throughput_1b")["verdict"] == "pass"


def test_without_a_gpu_the_gpu_form_fails_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert piece.run_piece(PIECES[0], "cuda", tmp_path) == 1
    assert "--device cpu" in answer(tmp_path, "imports", "cuda")["checks"][0]["detail"]
