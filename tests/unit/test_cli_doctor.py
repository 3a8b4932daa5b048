"""What `unishard doctor` says of an environment, pretended ones too, and what it exits with."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from running import ROOT, Terminal, plain, run

from unishard.config.topology import Topology
from unishard.contract import registry, tested_versions
from unishard.contract.private_api import CORE_PRIVATE_API, PrivateApi
from unishard.errors import BackendError
from unishard.tools import doctor
from unishard.tools.doctor import devices, imports, packages

FIELDS = {"name", "status", "found", "instead"}
Pretend = Callable[..., None]


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "DS_ACCELERATOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Change the version of a distribution; None takes it away."""
    real = packages.versions()

    def pretended(**changed: str | None) -> None:
        found = {name: places for name, places in real.items() if name not in changed or changed[name]}
        monkeypatch.setattr(
            packages, "versions", lambda: found | {name: [(v, "/here")] for name, v in changed.items() if v}
        )
        gone = {name for name, version in changed.items() if version is None}
        monkeypatch.setattr(registry, "find_spec", lambda name: None if name in gone else "there")

    return pretended


def report(exit_code: int = 0) -> dict[str, dict[str, Any]]:
    """The lines of the report by name."""
    result = run("doctor", "--json")
    assert result.exit_code == exit_code, result.stdout + result.stderr
    return {check["name"]: check for check in json.loads(result.stdout)["checks"]}


def test_this_environment_can_train() -> None:
    result = run("doctor", "--json")
    whole = json.loads(result.stdout)
    assert set(whole) == {"status", "verdict", "counts", "versions", "checks"}
    assert whole["counts"] == {
        status: sum(check["status"] == status for check in whole["checks"]) for status in ("ok", "warn", "fail")
    }
    assert whole["counts"]["fail"] == result.exit_code == 0
    assert all(set(check) >= FIELDS for check in whole["checks"])
    assert all(check["instead"] for check in whole["checks"] if check["status"] != "ok")
    assert {"python", "torch", "deepspeed", "transformers", "pydantic"} <= set(whole["versions"])
    names = {check["name"] for check in whole["checks"]}
    assert {"backend fsdp", "backend deepspeed", "accelerators", "launcher"} <= names
    tables = {"unishard": CORE_PRIVATE_API} | {name: registry.get(name).private_api for name in registry.available()}
    assert {f"probe {owner} {name}" for owner, table in tables.items() for name in table} == {
        name for name in names if name.startswith("probe ")
    }


def test_it_prints_aligned_columns_and_nothing_of_the_engines() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "unishard", "doctor"], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    answer, empty, header, *lines, last = done.stdout.splitlines()
    assert answer.startswith("deepspeed and fsdp can train here on ")
    assert empty == ""
    assert header.split() == ["status", "what", "found", "to", "do"]
    assert {line.split()[0] for line in lines} <= {"ok", "warn"}
    assert re.search(r" warn, 0 fail; \d+ probes passed, --all lists them$", last)
    assert not any("probe " in line for line in lines)
    assert done.stderr == ""


@pytest.mark.parametrize("width", ["200", "60"])
def test_on_a_terminal_everything_is_readable(width: str, monkeypatch: pytest.MonkeyPatch, pretend: Pretend) -> None:
    from unishard.cli import doctor as command

    monkeypatch.setenv("COLUMNS", width)
    pretend(deepspeed=None)
    shown = Terminal()
    monkeypatch.setattr(command, "sys", SimpleNamespace(stdout=shown))
    run("doctor")
    text = plain(shown.getvalue())
    assert max(map(len, text.splitlines())) <= int(width)
    assert "pip install" in text
    assert "unishard[deepspeed]" in text


def test_the_answer_comes_first(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(deepspeed=None)
    assert run("doctor").stdout.splitlines()[:3] == [
        "fsdp can train here on the CPU",
        "backend deepspeed: cannot train: its packages are not installed; pip install 'unishard[deepspeed]'",
        "",
    ]
    monkeypatch.setenv("RANK", "0")
    assert run("doctor").stdout.splitlines()[0] == "fsdp can train here on the CPU, after 1 repair"
    pretend(torch=None)
    assert run("doctor").stdout.splitlines()[0] == "nothing can train here"


def test_all_lists_the_probes_that_passed() -> None:
    shown = run("doctor", "--all").stdout
    assert "probe unishard checkpoint-index" in shown
    assert "probes passed" not in shown


def test_a_missing_torch_fails(pretend: Pretend) -> None:
    pretend(torch=None)
    found = report(exit_code=1)
    assert found["torch"]["status"] == "fail"
    assert found["torch"]["instead"] == "pip install 'unishard[torch]'"
    assert found["backend fsdp"]["status"] == "warn"
    assert found["backend fsdp"]["instead"] == "pip install 'unishard[torch]'"
    assert "accelerators" not in found
    probes = [
        check for name, check in found.items() if name.startswith("probe ") and check["names"][0].startswith("torch")
    ]
    assert {check["status"] for check in probes} <= {"ok"}
    assert all(check["found"].startswith("not run, since torch cannot be imported") for check in probes)


def test_a_missing_engine_is_a_warning_and_a_missing_extra_is_not(pretend: Pretend) -> None:
    pretend(deepspeed=None, peft=None)
    found = report()
    assert (found["deepspeed"]["status"], found["deepspeed"]["instead"]) == (
        "warn",
        "pip install 'unishard[deepspeed]'",
    )
    assert (found["peft"]["status"], found["peft"]["instead"]) == ("ok", "optional: pip install 'unishard[hf]'")
    assert found["backend deepspeed"]["status"] == "warn"
    assert found["backend fsdp"]["status"] == "ok"


def test_an_untested_version_is_a_warning(pretend: Pretend) -> None:
    pretend(torch="9.1.0")
    found = report()["torch"]
    assert (found["status"], found["tested"]) == ("warn", False)
    assert found["found"] == "9.1.0, not tested"
    assert found["instead"].startswith("tested: 2.")


def test_a_version_below_the_floor_is_a_warning(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "requires", lambda _: ["pydantic>=2.9.1", 'lion-pytorch>=0.2; extra == "optimizers"'])
    pretend(pydantic="2.9.0", **{"lion-pytorch": "0.10"})
    found = report()
    assert found["pydantic"]["found"] == "2.9.0, older than unishard needs"
    assert found["pydantic"]["instead"] == "pip install --upgrade 'pydantic>=2.9.1'"
    assert found["lion-pytorch"]["status"] == "ok"


def test_an_engine_that_cannot_be_imported_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        if name == "deepspeed":
            raise OSError("libcudart.so.12: cannot open shared object file\nmore")

    monkeypatch.setattr(imports, "import_module", broken)
    found = report(exit_code=1)
    assert found["deepspeed"]["found"].endswith(
        "cannot be imported: OSError: libcudart.so.12: cannot open shared object file"
    )
    assert found["backend deepspeed"]["status"] == "warn"
    assert found["backend fsdp"]["status"] == "ok"


def test_two_versions_of_one_package_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = packages.versions() | {"peft": [("0.9", "/a"), ("0.8", "/b")]}
    monkeypatch.setattr(packages, "versions", lambda: twice)
    assert report()["peft"]["found"] == "installed twice: 0.9 in /a, 0.8 in /b; the first is used"


def test_two_backends_of_one_name_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice() -> None:
        raise BackendError("backend 'x' is offered twice: a by b and c by d; uninstall one of the two")

    monkeypatch.setattr(registry, "available", twice)
    found = report(exit_code=1)["backends"]
    assert found["instead"] == "uninstall one of the two"


def test_a_backend_that_cannot_be_imported_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    real = registry.get

    def get(name: str) -> Any:
        if name == "fsdp":
            raise RuntimeError("no")
        return real(name)

    monkeypatch.setattr(registry, "get", get)
    found = report(exit_code=1)
    assert found["backend fsdp"]["found"] == "cannot be imported: RuntimeError: no"
    assert found["backend deepspeed"]["found"].startswith("ready, from unishard ")


def test_a_probe_that_fails_names_the_case_the_name_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    patch = PrivateApi(
        "gone",
        "Training backwards",
        ("torch:nn", "torch:no_such_name"),
        "2.11",
        "https://example.org",
        "train forwards",
    )
    odd = PrivateApi("odd", "A broken module,", ("torch:nn",), "2.11", "https://example.org", "repair it")
    own = PrivateApi(
        "own", "A solved case", ("torch:no_such_name",), "2.11", "https://example.org", "wait", until="2.1"
    )
    known = PrivateApi.missing
    monkeypatch.setattr(PrivateApi, "missing", lambda self: [][1] if self.name == "odd" else known(self))
    monkeypatch.setattr(type(registry.get("fsdp")), "private_api", {each.name: each for each in (patch, odd, own)})
    shown = run("doctor").stdout
    assert "probe fsdp gone" in shown
    assert "probe fsdp own" not in shown
    found = report()
    assert found["probe fsdp gone"]["status"] == "warn"
    assert found["probe fsdp gone"]["found"] == "Training backwards: torch no longer has torch:no_such_name"
    assert found["probe fsdp gone"]["missing"] == ["torch:no_such_name"]
    assert found["probe fsdp gone"]["instead"] == "train forwards"
    assert found["probe fsdp odd"]["found"] == "A broken module: the probe raised IndexError: list index out of range"
    assert found["probe fsdp own"]["found"] == "A solved case: torch does it itself"


@pytest.mark.parametrize(
    ("version", "status"),
    [("3.10.9", "fail"), ("3.11.0", "ok"), ("3.13.7", "ok"), ("3.14.0", "warn"), ("3.1.2", "fail")],
)
def test_python(version: str, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.platform, "python_version", lambda: version)
    monkeypatch.setattr(packages, "sys", SimpleNamespace(version_info=tuple(map(int, version.split(".")))))
    assert packages.python().status == status


def fake_torch(
    monkeypatch: pytest.MonkeyPatch,
    *,
    cuda: str | None = None,
    count: int = 0,
    driver: str | None = None,
    broken: str = "",
) -> None:
    def ones(*_: Any, **__: Any) -> Any:
        if broken:
            raise RuntimeError(broken)
        return SimpleNamespace(sum=lambda: SimpleNamespace(item=lambda: 8.0))

    device = SimpleNamespace(
        is_available=lambda: count > 0,
        device_count=lambda: count,
        get_device_name=lambda index: f"GPU {index}",
        get_arch_list=lambda: ["sm_80"],
    )
    torch = SimpleNamespace(cuda=device, ones=ones, version=SimpleNamespace(cuda=cuda, hip=None))
    monkeypatch.setattr(devices, "import_module", lambda _: torch)
    monkeypatch.setattr(devices, "driver", lambda: driver)


@pytest.mark.parametrize(
    ("build", "count", "driver", "status", "found"),
    [
        (None, 0, None, "ok", "none; trains on the CPU"),
        ("12.8", 0, None, "ok", "none; trains on the CPU"),
        (
            None,
            0,
            "550.54.15",
            "warn",
            "none: this torch is a CPU build, but the machine has an NVIDIA driver (550.54.15)",
        ),
        ("13.0", 0, "550.54.15", "warn", "none: torch built for CUDA 13.0, driver 550.54.15"),
        ("12.8", 2, "570.1", "ok", "2; torch built for CUDA 12.8, driver 570.1"),
    ],
)
def test_accelerators(
    build: str | None, count: int, driver: str | None, status: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_torch(monkeypatch, cuda=build, count=count, driver=driver)
    first, *each = devices.devices()
    assert (first.status, first.found, bool(first.instead)) == (status, found, status == "warn")
    assert [line.found for line in each] == [f"GPU {index}" for index in range(count)]


def test_a_device_that_cannot_compute_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch(
        monkeypatch, cuda="12.8", count=1, driver="570.1", broken="CUDA error: no kernel image is available\nmore"
    )
    _, device = devices.devices()
    assert device.status == "fail"
    assert device.found == "cannot compute: RuntimeError: CUDA error: no kernel image is available"
    assert "sm_80" in device.instead


def test_a_driver_is_found_by_its_version(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "version"
    monkeypatch.setattr(devices, "_DRIVER", path)
    assert devices.driver() is None
    path.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\nGCC version: 12.3.0\n"
    )
    assert devices.driver() == "570.86.15"


@pytest.mark.parametrize(
    ("value", "count", "status"), [("cpu", 0, "ok"), ("cuda", 0, "fail"), ("cpu", 1, "fail"), ("cuda", 1, "ok")]
)
def test_an_exported_accelerator_must_be_the_one_that_torch_finds(
    value: str, count: int, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", value)
    fake_torch(monkeypatch, cuda="12.8", count=count, driver="570.1" if count else None)
    *_, exported = devices.devices()
    assert exported.status == status
    assert exported.instead == ("unset DS_ACCELERATOR" if status == "fail" else "")


def test_half_a_launcher_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    found = report(exit_code=1)["launcher"]
    assert found["found"] == "the environment variable WORLD_SIZE is not set"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    met: list[Topology] = []
    monkeypatch.setattr(doctor, "connected", lambda topology: met.append(topology) or [])
    assert report()["launcher"]["found"] == "torchrun, rank 0 of 2"
    assert [(each.rank, each.world_size) for each in met] == [(0, 2)], "it meets the other rank"


def test_what_engines_print_while_they_are_imported_is_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    with imports.quietly():
        sys.stdout.write("noise")
        sys.stderr.write("noise")
    assert capsys.readouterr() == ("", "")
    assert imports.failure("json") == ""
    assert imports.failure("no_such_package") == "ModuleNotFoundError: No module named 'no_such_package'"


def test_the_package_is_read_without_torch() -> None:
    code = "import unishard.tools.doctor, unishard.cli, sys; print({'torch', 'deepspeed', 'numpy'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout == "set()\n"


def test_pyproject_says_the_same() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pythons = [
        line.rpartition(" ")[2]
        for line in project["classifiers"]
        if line.startswith("Programming Language :: Python :: 3.")
    ]
    assert tuple(pythons) == tested_versions.PYTHONS
    assert project["requires-python"] == f">={tested_versions.PYTHONS[0]}"
    optional = {name: said for name, said in project["optional-dependencies"].items() if name not in ("dev", "docs")}
    extras = {"": project["dependencies"]} | optional
    named: dict[str, str] = {}
    for extra, texts in extras.items():
        for text in texts:
            if not text.startswith("unishard["):
                named.setdefault(text.partition(">=")[0].partition("[")[0], extra)
    assert named == packages.PACKAGES


def test_the_worst_line_decides() -> None:
    ok, warn, fail = (doctor.Check("x", status, "") for status in doctor.Status)
    assert doctor.worst([ok, fail, warn]) == "fail"
    assert doctor.worst([ok, warn]) == "warn"
    assert doctor.worst([]) == "ok"


def test_a_disk_is_measured_and_one_in_memory_refused() -> None:
    result = run("doctor", "--json", "--disk", "/var/tmp")
    (disk,) = (check for check in json.loads(result.stdout)["checks"] if check["name"] == "disk /var/tmp")
    assert disk["status"] in ("ok", "warn")
    assert disk["gigabytes_per_second_read"] > 0
    assert disk["gigabytes_per_second_written"] > 0
    result = run("doctor", "--disk", "/dev/shm")
    assert result.exit_code == 1
    assert "/dev/shm is a tmpfs, whose files lie in memory" in plain(result.stdout)
