"""What holds for the project as a whole: its files, its documents, what importing it loads.

Must not test what any module does.
"""

import ast
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import kvkeep

ROOT = Path(__file__).resolve().parent.parent
LINES_MAX = 500
SKIPPED_FOLDERS = {".git", ".venv", "__pycache__", "dist", "build", "results"}

# Written in pieces, so that this file does not contain what it looks for.
MACHINE_PATH = re.compile(r"(?<![\w.~})-])/(?:" + "|".join(["work", "root", "tmp", "home"]) + r")/[\w.]")
REGISTRY_HOST = re.compile(r"\b(?:" + "|".join(["pypi", "pythonhosted", "npmjs"]) + r")\.(?:org|com)\b")


@cache
def project_files() -> tuple[Path, ...]:
    """Every file that is, or would be, part of the repository."""
    try:
        listing = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        ).stdout.decode()
        found = {ROOT / name for name in listing.split("\0") if name}
    except (OSError, subprocess.CalledProcessError):
        found = {path for path in ROOT.rglob("*") if not SKIPPED_FOLDERS & set(path.relative_to(ROOT).parts)}
    return tuple(sorted(path for path in found if path.is_file()))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def python_files(*folders: str) -> list[Path]:
    chosen = [path for path in project_files() if path.suffix == ".py"]
    return [path for path in chosen if not folders or path.relative_to(ROOT).parts[0] in folders]


def text_of(path: Path) -> str:
    try:
        return path.read_text()
    except UnicodeDecodeError:
        return ""


def test_files_are_rooms_not_halls() -> None:
    """No source file grows beyond what a reader holds in mind."""
    long = {relative(path): len(text_of(path).splitlines()) for path in python_files()}
    assert {} == {name: lines for name, lines in long.items() if lines > LINES_MAX}


def test_every_module_says_what_it_is_for() -> None:
    """Every module has a docstring; in the package it goes on to say what the module must not know."""
    silent = []
    for path in python_files():
        if not text_of(path).strip():
            continue
        lines = (ast.get_docstring(ast.parse(text_of(path))) or "").split("\n")
        is_room = relative(path).startswith("kvkeep/") and path.name != "__init__.py"
        if not lines[0].strip() or (is_room and not any(line.strip() for line in lines[1:])):
            silent.append(relative(path))
    assert [] == silent


def test_no_file_names_a_machine() -> None:
    """Nothing in the repository depends on a path of one machine or on the address of a package registry."""
    named = [
        f"{relative(path)}:{number}: {line.strip()[:120]}"
        for path in project_files()
        for number, line in enumerate(text_of(path).splitlines(), 1)
        if MACHINE_PATH.search(line) or REGISTRY_HOST.search(line)
    ]
    assert [] == named


def test_environment_is_read_in_the_command_only() -> None:
    """Below the command line nothing reads environment variables: settings are arguments."""
    readers = []
    for path in python_files("kvkeep"):
        for node in ast.walk(ast.parse(text_of(path))):
            if isinstance(node, ast.Attribute) and node.attr in {"environ", "environb", "getenv"}:
                readers.append(f"{relative(path)}:{node.lineno}")
    assert [] == [reader for reader in readers if not reader.startswith("kvkeep/cli.py:")]


def test_readme_shows_how_to_start() -> None:
    """The README shows the two commands that a newcomer needs."""
    readme = (ROOT / "README.md").read_text()
    assert ["make demo", "make test"] == [command for command in ("make demo", "make test") if command in readme]


def test_readme_example_runs() -> None:
    """The README's Python example runs as it stands and prints what it says."""
    example = "".join(re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL))
    promised = re.findall(r"# prints (.*)", example)
    assert promised
    result = run_python(example)
    assert promised == result.stdout.splitlines(), result.stderr


def test_documents_point_at_files_that_exist() -> None:
    """Relative links in the documents lead somewhere."""
    dead = []
    for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md"):
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / name).read_text()):
            if not (ROOT / target).exists():
                dead.append(f"{name}: {target}")
    assert [] == dead


def test_documents_name_targets_that_exist() -> None:
    """What is to be typed behind `make` is a target of the Makefile."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for path in [*ROOT.glob("*.md"), *(ROOT / "bench").glob("*.md"), *(ROOT / "tests").rglob("*.py")]:
        named = set(re.findall(r"(?:`|^    )make ([a-z][a-z-]*)", path.read_text(), re.M))
        assert named <= targets, f"{path.relative_to(ROOT)} names make {', '.join(sorted(named - targets))}"
    assert {"setup", "test", "test-full", "planted", "planted-full", "soak", "clean", "demo"} <= targets


def test_changelog_has_this_version() -> None:
    """The version that the package reports has its section in the changelog."""
    assert f"## {kvkeep.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_material_of_others_comes_with_its_licence() -> None:
    """The licence is Apache-2.0; each folder of bundled data holds a licence note and is named in NOTICE."""
    assert "Apache License" in (ROOT / "LICENSE").read_text().splitlines()[1]
    folders = {path.parent for path in project_files() if path.parent.name == "data"}
    notice = (ROOT / "NOTICE").read_text()
    assert [] == [relative(folder) for folder in folders if not list(folder.glob("LICENSE*"))]
    assert [] == [relative(folder) for folder in folders if f"- {relative(folder)}:" not in notice]


def test_direct_dependencies_are_pinned_within_their_ranges() -> None:
    """Each dependency named in pyproject.toml has one exact developers' pin, which its range allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [
        *project["dependencies"],
        *(one for extra in project["optional-dependencies"].values() for one in extra),
    ]
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            name, _, version = line.partition("==")
            pins[canonicalize_name(name)] = version
    wanted = [Requirement(text) for text in named]
    assert [] == [str(one) for one in wanted if pins.get(canonicalize_name(one.name), "0") not in one.specifier]


def test_ci_runs_the_same_tests_as_a_person() -> None:
    """`.ci/run` can be started and does nothing but `make test`."""
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "exec make test" == script.read_text().splitlines()[-1]


def run_python(script: str, *options: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *options, "-c", script]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


def test_nothing_below_the_engine_needs_torch() -> None:
    """Outside the engine, the integrations and the CUDA backend, modules import without heavy packages."""
    blocked = ("torch", "cupy", "transformers", "tokenizers", "gguf", "rich", "typer", "pynvml")
    heavy = ("kvkeep.engine", "kvkeep.integrations", "kvkeep.transfer.cuda")
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in python_files("kvkeep")]
    light = [name.removesuffix(".__init__") for name in names if not name.startswith(heavy)]
    script = f"""
import importlib, sys
for name in {blocked!r}:
    sys.modules[name] = None  # importing it raises ImportError
for name in {light!r}:
    importlib.import_module(name)
print("imported", {len(light)})
"""
    result = run_python(script)
    assert f"imported {len(light)}\n" == result.stdout, result.stderr


def test_import_is_cheap() -> None:
    """`import kvkeep` loads none of the heavy packages, even where they are installed."""
    script = "import sys, kvkeep; print({'torch', 'cupy', 'transformers', 'mstar', 'rich'} & set(sys.modules))"
    assert "set()\n" == run_python(script).stdout
