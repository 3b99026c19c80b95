"""What a planted bug is.

Must not know any: they are listed by what they are in, see `bugs`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bug:
    """One mistake: replacing `old` with `new` in `file` must make at least one of `caught_by` fail.

    needs: a module without which its tests are skipped, so that nothing can be said of it.
    """

    id: str
    file: str
    old: str
    new: str
    caught_by: tuple[str, ...]
    may_hang: bool = False
    needs: str = ""
