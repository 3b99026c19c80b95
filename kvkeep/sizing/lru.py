"""The hit curve of LRU over recorded requests.

Must not know names, tokens or caches.
"""

from collections.abc import Iterable

from kvkeep.sizing.curve import HitCurve
from kvkeep.stack import PageIds, Stack


def lru_curve(
    requests: Iterable[tuple[PageIds, int]], distinct: int, *, page_size: int, prompt_tokens: int
) -> HitCurve:
    """What LRU hits, exactly, by size of the pool.

    requests: the pages that each leaves behind, and how many of them its prompt has (see `Pages.pages_of`).
    distinct: above every page id.
    """
    stack = Stack(distinct)
    for pages, prompt_pages in requests:
        stack.use(pages, prompt_pages)
    return HitCurve(stack.hits(), page_size, prompt_tokens)
