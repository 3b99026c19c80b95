"""A hit curve: what a pool hits by its size.

Must not know how it was found.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

#: Of the hits that more memory can buy, what a size at the knee has.
KNEE_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class HitCurve:
    """hits: by pages of the pool, from 0 on, pages found by prompts; a larger pool finds as many as the last says.

    page_size: tokens a page.   prompt_tokens: of all prompts.
    """

    hits: npt.NDArray[np.int64]
    page_size: int
    prompt_tokens: int

    def matched_pages(self, capacity_tokens: int) -> int:
        """Pages that the prompts find in a pool of this size."""
        pages = capacity_tokens // self.page_size
        return int(self.hits[min(pages, len(self.hits) - 1)])

    def hit_share(self, capacity_tokens: int) -> float:
        """The same, as a share of all prompt tokens."""
        return self.matched_pages(capacity_tokens) * self.page_size / max(1, self.prompt_tokens)

    @property
    def full_tokens(self) -> int:
        """The smallest pool that hits all there is to hit, in tokens."""
        return int(np.searchsorted(self.hits, self.hits[-1])) * self.page_size


def knee(sizes: Sequence[int], shares: Sequence[float]) -> int:
    """The size where more begins to buy little: the smallest that hits `KNEE_SHARE` of what the largest hits.

    sizes: growing.  Curves of LRU are flat, then steep, then flat, so the point farthest from a straight line, as knees
    are often defined, would be at their beginning.
    """
    enough = KNEE_SHARE * max(shares)
    return next(size for size, share in zip(sizes, shares, strict=True) if share >= enough)
