"""The wheel that would be published, in an empty environment with what it declares and nothing else.

Must not import kvkeep from the checkout.
"""

import importlib.metadata
import shutil
import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement


@dataclass(frozen=True, slots=True)
class Installed:
    """An environment with the wheel in it."""

    bin: Path
    cwd: Path
    core_requirements: frozenset[str]

    def run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        program = str(self.bin / command[0])
        return subprocess.run([program, *command[1:]], cwd=self.cwd, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, repo_root: Path) -> Installed:
    scratch = tmp_path_factory.mktemp("wheel")
    wheel = build_wheel(repo_root, scratch)
    required = core_requirements(wheel)
    environment = scratch / "an empty environment"
    venv.create(environment, with_pip=True)
    [site_packages] = environment.glob("lib/python*/site-packages")
    for name in required:
        copy_distribution(name, site_packages)
    python = environment / "bin" / "python"
    # Without an index, pip refuses a wheel that asks for anything which is not already there.
    run(
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", wheel],
        scratch,
    )
    return Installed(python.parent, scratch, required)


def build_wheel(repo_root: Path, scratch: Path) -> Path:
    source = scratch / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy2(repo_root / name, source / name)
    shutil.copytree(repo_root / "kvkeep", source / "kvkeep", ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", scratch, source], scratch)
    [wheel] = scratch.glob("kvkeep-*.whl")
    return wheel


def core_requirements(wheel: Path) -> frozenset[str]:
    with zipfile.ZipFile(wheel) as archive:
        [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        fields = HeaderParser().parsestr(archive.read(metadata).decode())
    required = [Requirement(text) for text in fields.get_all("Requires-Dist", [])]
    return frozenset(one.name for one in required if one.marker is None or one.marker.evaluate({"extra": ""}))


def copy_distribution(name: str, site_packages: Path) -> None:
    """Copies an installed package as it is, so that the test needs no network."""
    distribution = importlib.metadata.distribution(name)
    for file in distribution.files or ():
        source = Path(str(distribution.locate_file(file)))
        if ".." not in file.parts and source.is_file():
            (site_packages / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, site_packages / file)


def run(command: "list[str | Path]", cwd: Path) -> None:
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"


def test_core_needs_numpy_and_xxhash_only(installed: Installed) -> None:
    """Installing kvkeep without extras brings numpy and xxhash, nothing else."""
    assert {"numpy", "xxhash"} == installed.core_requirements


def test_import_loads_no_torch(installed: Installed) -> None:
    """`import kvkeep` works in an environment without torch, from the wheel, with its type marker."""
    script = "import sys, kvkeep; from importlib.resources import files; print('torch' in sys.modules)"
    script += "; print((files('kvkeep') / 'py.typed').is_file(), 'site-packages' in kvkeep.__file__)"
    result = installed.run("python", "-c", script)
    assert "False\nTrue True\n" == result.stdout, result.stderr


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_command_starts(installed: Installed, option: str) -> None:
    """The command starts with the core dependencies alone."""
    result = installed.run("kvkeep", option)
    assert (0, "") == (result.returncode, result.stderr)
    assert "kvkeep" in result.stdout


def test_missing_engine_is_said_in_one_line(installed: Installed) -> None:
    """A command that needs a model names the extra to install, without a traceback, exit code 2."""
    result = installed.run("kvkeep", "demo")
    assert 2 == result.returncode, result
    assert "kvkeep[engine]" in result.stderr
    assert "Traceback" not in result.stderr


def test_bundled_data_and_its_licence_are_in_the_wheel(installed: Installed, repo_root: Path) -> None:
    """Every data file of the package is in the wheel, licence notes included."""
    script = "import kvkeep, pathlib; root = pathlib.Path(kvkeep.__file__).parent\n"
    script += "files = [path for path in root.rglob('*') if path.is_file() and path.suffix != '.pyc']\n"
    script += "print(*sorted(str(path.relative_to(root)) for path in files))"
    listed = installed.run("python", "-c", script).stdout.split()
    package = repo_root / "kvkeep"
    files = (path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc")
    assert sorted(str(path.relative_to(package)) for path in files) == listed
