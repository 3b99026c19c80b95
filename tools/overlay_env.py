"""Make an environment over others: `python tools/overlay_env.py ENVIRONMENT LIST BELOW [BELOW ...]`.

Must not need anything but a Python interpreter that has pip.

The packages of LIST (a pip requirements file of exact versions) are installed without their dependencies; everything
else is found in the environments below, of which the first wins, and in this checkout.  `ready` is written last and
says what was made of what: an environment without it, or of other contents, is thrown away and made again.
"""

import hashlib
import shutil
import subprocess
import sys
import time
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent


def main(arguments: list[str]) -> int:
    if len(arguments) < 3:
        print("overlay_env: ENVIRONMENT LIST BELOW [BELOW ...]", file=sys.stderr)
        return 2
    environment, listed, *below = (Path(argument) for argument in arguments)
    ready, wanted = environment / "ready", digest(listed, below)
    if ready.is_file() and ready.read_text() == wanted:
        return 0
    began = time.monotonic()
    if environment.exists():
        shutil.rmtree(environment)
    python = environment / "bin" / "python"
    subprocess.check_call([sys.executable, "-m", "venv", "--without-pip", str(environment)])
    folders = [*(site(path).resolve() for path in below), CHECKOUT]
    (site(environment) / "below.pth").write_text("".join(f"{folder}\n" for folder in folders))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    if subprocess.call([*pip, "--no-compile", "--no-deps", "--ignore-requires-python", "-r", str(listed)]):
        return 1
    ready.write_text(wanted)
    print(f"{environment} is ready ({time.monotonic() - began:.0f} s)", flush=True)
    return 0


def site(environment: Path) -> Path:
    """Where an environment's packages are."""
    [found] = (environment / "lib").glob("python*/site-packages")
    return found


def digest(listed: Path, below: list[Path]) -> str:
    """Of what an environment is made of: the interpreter, the list, what the environments below say of themselves."""
    parts = [sys.version, listed.read_text()]
    for path in below:
        stamps = [path / name for name in ("ready", "kvkeep-setup-stamp") if (path / name).is_file()]
        parts += [str(path.resolve()), str(CHECKOUT), *(stamp.read_text() for stamp in stamps)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
