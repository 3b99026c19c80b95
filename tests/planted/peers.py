"""Planted bugs in the bench that asks other packages' managers beside ours.

Must not hold anything but data: see `bugs` for what an entry is.
"""

from tests.planted.bug import Bug

COMPARING, JUDGING, WIRE = (f"bench/peers/{name}.py" for name in ("comparing", "judging", "wire"))
TESTS = "tests/bench/test_peers.py::"

BUGS: tuple[Bug, ...] = (
    Bug(
        "peers-with-other-requests-are-compared",
        COMPARING,
        'if answer is not None and answer["checksum"] != checksum:',
        'if answer is not None and not answer["checksum"]:',
        (TESTS + "test_whoever_has_other_requests_leaves_the_table",),
    ),
    Bug(
        "peers-that-died-keep-half-a-pass",
        COMPARING,
        "            if self._seat[variant] in self._peers:  # else it left on the way\n",
        "            if variant in self._seat:\n",
        (TESTS + "test_a_peer_that_ends_on_the_way_leaves_and_the_others_go_on",),
    ),
    Bug(
        "peers-ratio-upside-down",
        JUDGING,
        'ratio(theirs.us, ours.us, "higher")',
        'ratio(ours.us, theirs.us, "higher")',
        (TESTS + "test_a_ratio_is_theirs_over_ours_and_held_against_its_limit",),
    ),
    Bug(
        "peers-time-what-fills-the-pool",
        WIRE,
        "return self._serve(self.plan, variant, self.plan.warm + int(",
        "return self._serve(self.plan, variant, int(",
        (TESTS + "test_a_process_matches_what_the_cache_matches_here",),
    ),
    Bug(
        "peers-best-possible-shares-no-prompt",
        COMPARING,
        "    shared_pages = shared // PAGE\n",
        "    shared_pages = 0\n",
        (TESTS + "test_the_best_possible_is_the_ceiling_with_room_and_less_without",),
    ),
)
