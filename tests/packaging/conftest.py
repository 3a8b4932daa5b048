"""Builds the distributions once and installs them outside the checkout, each beside exactly what its own metadata asks
for."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Environment:
    """A virtual environment and an empty folder to work in, both outside the checkout."""

    root: Path
    folder: Path

    @property
    def python(self) -> Path:
        return self.root / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        return Path(sysconfig.get_path("purelib", vars={"base": str(self.root)}))

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a program of this environment, seeing nothing of the environment of the tests."""
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "VIRTUAL_ENV", "COVERAGE"))
        }
        program = self.root / "bin" / command[0]
        environ = clean | {"PATH": f"{program.parent}:{os.environ['PATH']}", "COLUMNS": "140", "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [program, *command[1:]], cwd=self.folder, env=environ, capture_output=True, text=True, timeout=300
        )

    def output(self, *command: str | Path) -> str:
        """What a program that must succeed prints."""
        done = self.run(*command)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def build(kind: str, source: Path, into: Path) -> Path:
    module("build", "--no-isolation", f"--{kind}", "--outdir", str(into), str(source))
    (built,) = into.iterdir()
    return built


def module(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def build_from() -> Callable[[str, Path, Path], Path]:
    """Build a `wheel` or an `sdist` from a source tree into an empty folder."""
    return build


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="session")
def install(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Environment]:
    """Install a wheel with some extras."""

    @cache
    def installed(artefact: Path, *extras: str) -> Environment:
        root = tmp_path_factory.mktemp("env")
        environment = Environment(root, tmp_path_factory.mktemp("elsewhere"))
        venv.EnvBuilder(symlinks=True).create(root)
        module("pip", "--python", str(environment.python), "install", "--no-index", "--no-deps", str(artefact))
        (unishard,) = distributions(name="unishard", path=[str(environment.site_packages)])
        for requirement in requirements(unishard, {"", *extras}):
            link_all(requirement, environment.site_packages)
        return environment

    return installed


def requirements(of: Distribution, extras: set[str]) -> Iterator[Requirement]:
    for text in of.requires or ():
        requirement = Requirement(text)
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            if requirement.name == of.name:  # `unishard[deepspeed]` asks for `unishard[torch]`
                yield from requirements(of, set(requirement.extras))
            else:
                yield requirement


def link_all(requirement: Requirement, site_packages: Path) -> None:
    """Link an installed package and all that it needs into another environment: as good as installing it again, in
    milliseconds."""
    found = distribution(requirement.name)
    assert requirement.specifier.contains(found.version, prereleases=True), (
        f"{requirement} is asked for, {found.version} is installed"
    )
    fresh = False
    for name in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
        target = site_packages / name
        if not target.exists():
            target.symlink_to(Path(str(found.locate_file(name))))
            fresh = True
    if fresh:
        for other in requirements(found, {"", *requirement.extras}):
            link_all(other, site_packages)
