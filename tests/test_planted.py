"""The planted bugs still fit the source, and the command that plants them tells caught from missed.

Must not plant the real list: that is `make planted`.
"""

import sys
from pathlib import Path

import pytest

from tests.planted.__main__ import main
from tests.planted.bugs import BUGS, Bug
from tests.planted.plant import DoesNotApply, Outcome, check_applies, mutate, plant

LIMIT_S = 60.0
TOY_SOURCE = "def double(x):\n    return x + x\n"
TOY_TEST = """from kvkeep import double


def test_double():
    assert double(3) == 6


def test_zero():
    assert double(0) == 0
"""


@pytest.fixture
def toy(tmp_path: Path, repo_root: Path) -> Path:
    """A tree shaped like the repository, whose package is one function."""
    root = tmp_path / "a tree"
    (root / "kvkeep").mkdir(parents=True)
    (root / "kvkeep" / "__init__.py").write_text(TOY_SOURCE)
    (root / "tests" / "planted").mkdir(parents=True)
    (root / "tests" / "test_toy.py").write_text(TOY_TEST)
    for name in ("__init__.py", "guard.py"):
        (root / "tests" / "planted" / name).write_text((repo_root / "tests" / "planted" / name).read_text())
    (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = ["--import-mode=importlib"]\n')
    return root


def toy_bug(new: str, *, test: str = "test_double", old: str = "x + x", may_hang: bool = False) -> Bug:
    return Bug("toy", "kvkeep/__init__.py", old, new, (f"tests/test_toy.py::{test}",), may_hang)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.id)
def test_every_planted_bug_still_applies(bug: Bug, repo_root: Path) -> None:
    """Each entry's old text is in its file once, changes one line, and the tests it names exist."""
    check_applies(bug, repo_root)


def test_ids_are_unique() -> None:
    """Each planted bug has a name of its own."""
    assert len({bug.id for bug in BUGS}) == len(BUGS)


def test_caught_bug_is_told_from_a_survivor(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bug that its test sees is caught and exits 0; one that its test misses survives and exits 1."""
    assert main([], [toy_bug("x * x")], toy) == 0
    assert "1 of 1 planted bugs caught" in capsys.readouterr().out
    assert main([], [toy_bug("x * x", test="test_zero")], toy) == 1
    assert "SURVIVED" in capsys.readouterr().out
    assert TOY_SOURCE == (toy / "kvkeep" / "__init__.py").read_text(), "the tree itself is never touched"


def test_bug_that_no_longer_applies_fails_the_run(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An entry whose old text is gone is said to be stale, and the run fails."""
    assert main([], [toy_bug("x * x", old="y + y")], toy) == 1
    assert "planted bug toy no longer applies" in capsys.readouterr().out


def test_tests_that_fail_without_a_bug_catch_nothing(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A red test in the list stops the run: it would seem to catch everything."""
    (toy / "tests" / "test_toy.py").write_text(TOY_TEST.replace("== 6", "== 7"))
    assert main([], [toy_bug("x * x")], toy) == 1
    assert "do not pass without a bug" in capsys.readouterr().err


def test_bug_that_breaks_the_import_is_not_caught(toy: Path) -> None:
    """A change after which no test can run proves nothing about the tests."""
    verdict = plant(toy_bug("import nothing_of_this_name", old="def double(x):\n    return x + x"), toy, LIMIT_S)
    assert verdict.outcome is Outcome.BROKEN
    verdict = plant(toy_bug("def treble(x):", old="def double(x):"), toy, LIMIT_S)
    assert (Outcome.BROKEN, True) == (verdict.outcome, "status" in verdict.detail)


@pytest.mark.parametrize(("may_hang", "outcome"), [(False, Outcome.BROKEN), (True, Outcome.CAUGHT)])
def test_bug_that_hangs_is_caught_only_where_the_list_says_so(toy: Path, may_hang: bool, outcome: Outcome) -> None:
    """Running out of time counts as caught where the entry expects it, and nowhere else."""
    bug = toy_bug("exec('while x: pass')", may_hang=may_hang)
    assert plant(bug, toy, limit_s=5.0).outcome is outcome


def test_a_bug_is_one_line() -> None:
    """Texts that change more than one line, or that leave no valid Python, are refused."""
    with pytest.raises(DoesNotApply, match="must change one line"):
        mutate(toy_bug("def double(y):\n    return y", old="def double(x):\n    return x + x"), TOY_SOURCE)
    with pytest.raises(DoesNotApply, match="no valid Python"):
        mutate(toy_bug("x +"), TOY_SOURCE)
    with pytest.raises(DoesNotApply, match="occurs 3 times"):
        mutate(toy_bug("y", old="x)"), TOY_SOURCE + "double(x)\ndouble(x)\n")


def test_unknown_id_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    """Asking for a bug that is not in the list says so and exits 2."""
    assert main(["no-such-bug"]) == 2
    assert "no-such-bug" in capsys.readouterr().err


def test_guard_refuses_another_tree(toy: Path, repo_root: Path) -> None:
    """Tests that would import the package from elsewhere than the mutated copy do not run at all."""
    from tests.planted.guard import WRONG_TREE
    from tests.planted.plant import run_tests

    status, _ = run_tests(toy, ["tests/test_toy.py"], LIMIT_S)
    assert status == 0, sys.executable
    (toy / "elsewhere").mkdir()
    (toy / "kvkeep").rename(toy / "elsewhere" / "kvkeep")
    (toy / "sitecustomize.py").write_text(f"import sys\nsys.path.insert(0, {str(toy / 'elsewhere')!r})\n")
    status, output = run_tests(toy, ["tests/test_toy.py"], LIMIT_S)
    assert status == WRONG_TREE, output
