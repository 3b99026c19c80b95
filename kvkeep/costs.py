"""Is it faster to load pages from host memory, or to compute them again?

Must not know pages or copies: it is told what they took.

    load      = (pages + pages queued before them) * seconds a page of the loads so far
    recompute = pages * page_size * seconds a token of the prefills so far

Both are exponentially weighted means.  While one of them is unknown, loading is taken to be faster.
"""

from kvkeep.errors import BadInput

#: Weight of the newest measurement: the mean of about the last ten.
NEWEST_WEIGHT = 0.1


class Costs:
    """What loading and computing a page take, as measured.   page_size: token positions a page holds."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self.load_s_per_page: float | None = None
        self.prefill_s_per_token: float | None = None

    def prefilled(self, tokens: int, seconds: float) -> None:
        """The engine computed `tokens` positions in `seconds`."""
        if tokens < 1 or not 0 <= seconds < float("inf"):
            raise BadInput(f"prefill of {tokens} tokens in {seconds!r} s: 1 token or more and a finite time are needed")
        self.prefill_s_per_token = _mean(self.prefill_s_per_token, seconds / tokens)

    def loaded(self, pages: int, seconds: float) -> None:
        """A load brought `pages` pages in `seconds`."""
        self.load_s_per_page = _mean(self.load_s_per_page, seconds / pages)

    def worth_loading(self, pages: int, queued: int, compute_s: float | None = None) -> bool:
        """Whether loading `pages` pages, behind `queued` others, is faster than computing them.

        compute_s: what that takes, where it is known; None for KV, as measured.
        """
        if compute_s is None and self.prefill_s_per_token is not None:
            compute_s = pages * self._page_size * self.prefill_s_per_token
        if self.load_s_per_page is None or compute_s is None:
            return True
        return (pages + queued) * self.load_s_per_page <= compute_s

    def worth(self, seconds: float, nbytes: int, page_nbytes: int) -> float:
        """What a byte of an output saves, `nbytes` of them that took `seconds`, in what a byte of a KV page does."""
        if self.prefill_s_per_token is None or not seconds:
            return 1.0
        return seconds / nbytes * page_nbytes / (self._page_size * self.prefill_s_per_token)


def _mean(before: float | None, now: float) -> float:
    return now if before is None else before + NEWEST_WEIGHT * (now - before)
