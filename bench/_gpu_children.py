"""Parts of the GPU check that are commands of their own: tests that need a device, and the engine on one.

Must not know limits or reports.
"""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NO_DEVICE = "no CUDA device"
NOT_INSTALLED = "which is not installed"
WORDS_MAX = 600

#: The tests that meet a real device where there is one; the machine may lack what other tests need.
DEVICE_TESTS = ("tests/transfer/test_conformance.py",)
DEVICE_TESTS_CHOSEN = "cuda and not emulated"


@dataclass(frozen=True)
class Tests:
    """Numbers of tests; `without_device` of those that were skipped for want of one.   error: why none ran."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    without_device: int = 0
    error: str | None = None
    failures: tuple[str, ...] = ()


def run_tests(timeout_s: float, files: Sequence[str] = DEVICE_TESTS, chosen: str = DEVICE_TESTS_CHOSEN) -> Tests:
    """Runs them with no plugin and no configuration but what they need themselves."""
    with TemporaryDirectory() as folder:
        settings, result = Path(folder) / "pytest.ini", Path(folder) / "result.xml"
        settings.write_text("[pytest]\n")
        command = [sys.executable, "-m", "pytest", "-q", "-c", str(settings), "--rootdir", str(ROOT), "--noconftest"]
        command += ["--import-mode=importlib", "-p", "no:cacheprovider", "-k", chosen, f"--junitxml={result}", *files]
        done = _run(command, timeout_s)
        if not result.is_file():
            return Tests(error=_last_words(done))
        return _tally(ElementTree.parse(result).iter("testcase"))


def _tally(cases: Any) -> Tests:
    passed = failed = skipped = without = 0
    failures = []
    for case in cases:
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
            failures.append(str(case.get("name")))
        elif (skip := case.find("skipped")) is not None:
            skipped += 1
            without += NO_DEVICE in str(skip.get("message"))
        else:
            passed += 1
    error = None if passed or failed or skipped else "no test was chosen"
    return Tests(passed, failed, skipped, without, error, tuple(failures))


@dataclass(frozen=True)
class Command:
    """What a command of kvkeep's ended with.   metrics: of its report.   error: its last words where it has none."""

    ok: bool
    metrics: dict[str, Any]
    error: str | None


def run_command(words: Sequence[str], timeout_s: float) -> Command:
    """Runs `kvkeep WORDS --json ...`."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        done = _run([sys.executable, "-m", "kvkeep.cli", *words, "--json", str(file)], timeout_s)
        if not file.is_file():
            return Command(False, {}, _last_words(done))
        report = json.loads(file.read_text())
    metrics = {name: metric["value"] for name, metric in report["metrics"].items()}
    return Command(bool(report["ok"]), metrics, None if report["ok"] else _last_words(done))


def _run(command: Sequence[str], timeout_s: float) -> "subprocess.CompletedProcess[str]":
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    try:
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=max(1.0, timeout_s)
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"not over after {timeout_s:.0f} s")


def _last_words(done: "subprocess.CompletedProcess[str]") -> str:
    words = " ".join((done.stdout + "\n" + done.stderr).split())
    return words[-WORDS_MAX:] or f"exit code {done.returncode}, and no word"
