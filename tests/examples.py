"""How many examples a drawn test tries.

Must not know the tests.
"""

import os


def examples(count: int) -> int:
    """`count`; a third of it in `make test`, which has minutes for everything: `make test-full` tries them all."""
    return max(10, count // 3) if os.environ.get("KVKEEP_FEWER_EXAMPLES") else count
