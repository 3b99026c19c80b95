"""The hit curve of LRU over recorded requests.

Must not know names, tokens or caches.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvkeep.sizing.curve import HitCurve
from kvkeep.stack import PageIds, Stack, stands_for

#: Pages at the beginning of each chain that are always looked at: those that many prompts share are too few for chance.
ALWAYS = 8


def lru_curve(
    requests: Iterable[tuple[PageIds, int]],
    distinct: int,
    *,
    page_size: int,
    prompt_tokens: int,
    share: float = 1.0,
    seed: int = 0,
) -> HitCurve:
    """What LRU hits, by size of the pool.

    requests: the pages that each leaves behind, and how many of them its prompt has (see `Pages.pages_of`).
    distinct: above every page id.
    share: of the pages behind the first `ALWAYS` of a chain, chosen by `seed`, those that are looked at; with 1 the
        curve is exact.
    """
    if share >= 1:
        stack = Stack(distinct)
        for pages, prompt_pages in requests:
            stack.use(pages, prompt_pages)
        return HitCurve(stack.hits(), page_size, prompt_tokens)
    looked_at: npt.NDArray[np.bool_] = np.random.default_rng(seed).random(distinct) < share
    weight = np.full(distinct, round(1 / share), dtype=np.int64)
    stack = Stack(distinct, weight)
    seen: npt.NDArray[np.bool_] = np.zeros(distinct, dtype=np.bool_)
    for pages, prompt_pages in requests:
        weight[pages[:ALWAYS]] = 1
        behind = ALWAYS + np.flatnonzero(looked_at[pages[ALWAYS:]])
        chosen = np.concatenate([np.arange(min(ALWAYS, len(pages))), behind])
        new = ~seen[pages[:prompt_pages]]
        known = int(np.argmax(new)) if len(new) and new[-1] else len(new)
        stack.use(pages[chosen], stands_for(chosen[: np.searchsorted(chosen, known)], known))
        seen[pages] = True
    return HitCurve(stack.hits(), page_size, prompt_tokens)
