"""Environments over others, made for real from a folder of wheels, with no network.

Must not touch this checkout's own environments.
"""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest


class Place:
    """A checkout in a folder whose name has a space, two environments below, and an index that is a folder."""

    def __init__(self, root: Path, script: Path) -> None:
        self.root, self.index = root, root.parent / "index"
        self.index.mkdir()
        (root / "tools").mkdir(parents=True)
        (root / "tools" / "overlay_env.py").write_text(script.read_text())
        (root / "of_the_checkout.py").write_text("")
        self.publish("top", "1.0")
        self.publish("top", "2.0")
        self.list_packages("top==1.0")
        for name in ("upper", "lower"):
            venv.create(root / name, with_pip=False)
            [site] = (root / name / "lib").glob("python*/site-packages")
            (site / "shared_module.py").write_text(f"WHERE = {name!r}\n")
            (site / f"only_{name}.py").write_text("")

    def publish(self, package: str, version: str) -> None:
        """A wheel that needs a package that is not there."""
        name = f"{package}-{version}"
        with zipfile.ZipFile(self.index / f"{name}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{package}.py", f"VERSION = {version!r}\n")
            about = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\nRequires-Dist: not-there\n"
            wheel.writestr(f"{name}.dist-info/METADATA", about)
            wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{name}.dist-info/RECORD", "")

    def list_packages(self, *packages: str) -> None:
        (self.root / "list.txt").write_text("\n".join(packages))

    def make(self) -> "subprocess.CompletedProcess[str]":
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
        settings = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": self.index.as_uri(), "PIP_CONFIG_FILE": os.devnull}
        return subprocess.run(
            [sys.executable, "tools/overlay_env.py", "over", "list.txt", "upper", "lower"],
            cwd=self.root,
            env={**kept, **settings},
            capture_output=True,
            text=True,
            timeout=120,
        )

    def said(self, script: str) -> str:
        command = [str(self.root / "over" / "bin" / "python"), "-c", script]
        return subprocess.run(command, cwd=self.root.parent, capture_output=True, text=True, check=True).stdout.strip()

    @property
    def ready(self) -> Path:
        return self.root / "over" / "ready"


@pytest.fixture
def place(tmp_path: Path, repo_root: Path) -> Place:
    return Place(tmp_path / "a checkout", repo_root / "tools" / "overlay_env.py")


def test_packages_come_without_what_they_need_and_the_rest_from_below(place: Place):
    """What is listed is there, then the first environment below, the second, and the checkout."""
    made = place.make()
    assert 0 == made.returncode, made.stderr
    found = (
        "import top, shared_module, only_upper, only_lower, of_the_checkout; print(top.VERSION, shared_module.WHERE)"
    )
    assert "1.0 upper" == place.said(found)


def test_environment_is_made_again_only_where_its_contents_change(place: Place):
    """Not for the same list; for another list, and for another state of what is below, it is."""
    place.make()
    made = place.ready.stat().st_mtime_ns
    assert "" == place.make().stdout and made == place.ready.stat().st_mtime_ns
    place.list_packages("top==2.0")
    assert "is ready" in place.make().stdout and "2.0" == place.said("import top; print(top.VERSION)")
    (place.root / "lower" / "kvkeep-setup-stamp").write_text("set up again")
    assert "is ready" in place.make().stdout


def test_half_made_environment_is_made_again(place: Place):
    """A package that is not to be had ends with 1 and leaves nothing that looks ready."""
    place.list_packages("top==1.0", "nowhere==1.0")
    assert 1 == place.make().returncode and not place.ready.exists()
    place.list_packages("top==1.0")
    assert 0 == place.make().returncode and place.ready.exists()
