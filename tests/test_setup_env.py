"""The set-up that all make targets share, run for real on a small project of the same shape, with no network.

Must not touch this checkout's own environment.
"""

import os
import runpy
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

BACKEND = '''
"""A build backend without dependencies: wheels of a package whose command prints one word."""
import zipfile

def build_editable(directory, config_settings=None, metadata_directory=None):
    name = "kvkeep-1.0-py3-none-any.whl"
    info = "kvkeep-1.0.dist-info/"
    with zipfile.ZipFile(f"{directory}/{name}", "w") as wheel:
        wheel.writestr("kvkeep_toy.py", "def main():\\n    print('toy')\\n")
        about = "Metadata-Version: 2.1\\nName: kvkeep\\nVersion: 1.0\\nProvides-Extra: dev\\n"
        wheel.writestr(info + "METADATA", about)
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(info + "entry_points.txt", "[console_scripts]\\nkvkeep = kvkeep_toy:main\\n")
        wheel.writestr(info + "RECORD", "")
    return name
'''

PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "kvkeep"
version = "1.0"
"""


class Checkout:
    """A project in a directory whose name has a space, and an index that is a directory."""

    def __init__(self, root: Path, script: Path) -> None:
        self.root = root
        self.index = root.parent / "index"
        self.index.mkdir()
        (root / "tools").mkdir(parents=True)
        (root / "tools" / "setup_env.py").write_text(script.read_text())
        (root / "backend.py").write_text(BACKEND)
        (root / "pyproject.toml").write_text(PYPROJECT)
        (root / "constraints.txt").write_text("")
        for package in runpy.run_path(str(script))["DATA_PACKAGES"]:
            self.publish(*package.split("=="))

    def publish(self, package: str, version: str) -> None:
        """A wheel of data in the index, which needs a package that is not there."""
        name = f"{package.replace('-', '_')}-{version}"
        needs = "Requires-Dist: a-package-that-must-not-be-installed\n"
        with zipfile.ZipFile(self.index / f"{name}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{package.replace('-', '_')}.py", "")
            about = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n{needs}"
            wheel.writestr(f"{name}.dist-info/METADATA", about)
            wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{name}.dist-info/RECORD", "")

    def set_up(self) -> "subprocess.CompletedProcess[str]":
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
        environment = {**kept, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": self.index.as_uri()}
        return subprocess.run(
            [sys.executable, "tools/setup_env.py", "--extras", "dev"],
            cwd=self.root,
            env={**environment, "PIP_CONFIG_FILE": os.devnull},
            capture_output=True,
            text=True,
            timeout=240,
        )

    def command_output(self) -> str:
        return subprocess.run([".venv/bin/kvkeep"], cwd=self.root, capture_output=True, text=True).stdout


@pytest.fixture
def checkout(tmp_path: Path, repo_root: Path) -> Checkout:
    return Checkout(tmp_path / "a checkout", repo_root / "tools" / "setup_env.py")


@pytest.mark.slow
def test_environment_without_a_stamp_is_made_again(checkout: Checkout) -> None:
    """A set-up makes a working command, does nothing when all fits, and recovers when it stopped half way."""
    first = checkout.set_up()
    assert (0, True) == (first.returncode, "making .venv" in first.stdout), first
    assert "toy\n" == checkout.command_output()

    again = checkout.set_up()
    assert (0, "") == (again.returncode, again.stdout + again.stderr)

    (checkout.root / "constraints.txt").write_text("a pin that no pip understands\n")
    broken = checkout.set_up()
    assert 1 == broken.returncode
    assert "setup: failed at" in broken.stderr.splitlines()[-1]
    (checkout.root / "constraints.txt").write_text("")
    # What an interrupted installation left behind, in a place where pip would see nothing to do.
    [package] = checkout.root.glob(".venv/lib/*/site-packages/kvkeep_toy.py")
    package.write_text("")

    recovered = checkout.set_up()
    assert (0, True) == (recovered.returncode, "making .venv" in recovered.stdout), recovered
    assert "toy\n" == checkout.command_output()


@pytest.mark.slow
def test_other_pins_bring_the_environment_up_to_date(checkout: Checkout) -> None:
    """New pins are installed into the environment that stands; without its interpreter a new one is made."""
    checkout.set_up()
    (checkout.root / "constraints.txt").write_text("# changed\n")
    updated = checkout.set_up()
    assert (0, True) == (updated.returncode, "up to date" in updated.stdout), updated

    (checkout.root / ".venv" / "bin" / "python").unlink()
    renewed = checkout.set_up()
    assert (0, True) == (renewed.returncode, "making .venv" in renewed.stdout), renewed
    assert "toy\n" == checkout.command_output()


def test_old_python_is_refused_in_one_line(repo_root: Path) -> None:
    """Under a Python that is too old the set-up says which one it needs, and makes nothing."""
    script = f"""
        import runpy, sys
        sys.version_info = (3, 10, 9, "final", 0)
        sys.argv = ["setup_env.py"]
        runpy.run_path({str(repo_root / "tools" / "setup_env.py")!r}, run_name="__main__")
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert 1 == result.returncode
    assert 1 == len(result.stderr.splitlines())
    assert "kvkeep needs Python 3.11 or newer" in result.stderr
