"""How much memory this process may use: the container's limit, not the host's total.

Must not know what the memory is for.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def memory_limit_nbytes(root: Path = Path("/")) -> int | None:
    """The least of the machine's memory and the limits of every control group that this process is in.

    root: where `proc` and `sys` are.  None where the system says nothing.  Version 2 groups name the limit
    `memory.max`, version 1 groups `memory.limit_in_bytes`; inside a container the group's own path may not be visible,
    so every ancestor up to the mount is asked.
    """
    limits = list(_group_limits(root))
    with contextlib.suppress(ValueError, OSError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(limits, default=None)


def _group_limits(root: Path) -> Iterator[int]:
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for depth in range(len(parts) + 1):
            text = _text(mount.joinpath(*parts[:depth], name)).strip()
            if text.isdigit():  # "max" is no limit
                yield int(text)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
