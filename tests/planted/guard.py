"""A pytest plugin for runs on a mutated copy: stops when the package under test is not that copy.

It also keeps hypothesis from shrinking: that a test fails is enough here, and shrinking may take minutes.

Must not know what was planted.
"""

from pathlib import Path

import pytest
from hypothesis import Phase, settings

WRONG_TREE = 99
"""Exit status that pytest itself never uses."""


def pytest_sessionstart() -> None:
    import kvkeep

    found, wanted = Path(kvkeep.__file__).resolve(), Path.cwd().resolve() / "kvkeep" / "__init__.py"
    if found != wanted:
        pytest.exit(f"tests would import {found} and not the copy with the bug, {wanted}", returncode=WRONG_TREE)
    settings.register_profile("planted", settings(), phases=(Phase.explicit, Phase.generate))
    settings.load_profile("planted")
