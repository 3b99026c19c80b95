"""Planted bugs of the vLLM connector that its simulation must catch."""

from tests.planted.bug import Bug

SCHEDULER = "kvkeep/integrations/vllm_scheduler.py"
WORKER = "kvkeep/integrations/vllm_worker.py"
MESSAGES = "kvkeep/integrations/vllm_messages.py"
CONNECTOR = "kvkeep/integrations/vllm.py"
SIM = "tests/integrations/test_vllm_sim.py::"
BYTES = SIM + "test_no_request_reads_another_ones_bytes"


def in_sim(name: str, file: str, old: str, new: str, *caught_by: str) -> Bug:
    return Bug(name, file, old, new, caught_by, needs="vllm")


BUGS = (
    in_sim(
        "vllm-holds-blocks-through-a-reset",
        CONNECTOR,
        "            scheduler.give_up_stores()",
        "            pass",
        SIM + "test_resets_in_the_middle_of_everything",
    ),
    in_sim(
        "vllm-keeps-what-was-given-up",
        SCHEDULER,
        "                job.failed = True\n                self._let_go(job.blocks)",
        "                self._let_go(job.blocks)",
        SIM + "test_what_was_given_up_is_not_kept",
    ),
    in_sim(
        "vllm-does-not-hold-what-is-being-stored",
        SCHEDULER,
        "        self._pool.touch([of[i] for i in blocks])",
        "        self._pool.touch([of[i] for i in blocks[1:]])",
        BYTES + "[0-plain]",
    ),
    in_sim(
        "vllm-ends-a-lease-while-its-copies-run",
        SCHEDULER,
        "if not chain.over or chain.running or lease is None:",
        "if not chain.over or lease is None:",
        BYTES + "[0-plain]",
        SIM + "test_an_abort_while_its_load_runs_leaves_the_pages_to_the_load",
    ),
    in_sim(
        "vllm-seals-what-is-on-its-way",
        SCHEDULER,
        "while chain.stores and chain.stores[0][0] not in chain.running:",
        "while chain.stores:",
        SIM + "test_a_store_that_fails_is_not_found_and_one_before_it_is",
    ),
    in_sim(
        "vllm-stores-tokens-that-are-not-known",
        SCHEDULER,
        "pages = min(computed, request.num_tokens) // size",
        "pages = computed // size",
        BYTES + "[0-asynchronous]",
    ),
    in_sim(
        "vllm-stores-what-is-not-computed",
        SCHEDULER,
        "pages = min(computed, request.num_tokens) // size",
        "pages = request.num_tokens // size",
        BYTES + "[0-plain]",
    ),
    in_sim(
        "vllm-is-through-when-one-rank-is",
        SCHEDULER,
        "            if not job.left:",
        "            if number in self._jobs:",
        BYTES + "[0-two-ranks]",
    ),
    in_sim(
        "vllm-keeps-a-store-that-failed",
        SCHEDULER,
        "            if job.failed:  # what",
        "            if not job:  # what",
        SIM + "test_a_store_that_fails_is_not_found_and_one_before_it_is",
    ),
    in_sim(
        "vllm-stores-what-another-request-is-storing",
        SCHEDULER,
        "if self._storing and not self._storing.isdisjoint(of_chain[: pages * per_page]):",
        "if self._storing.issuperset(of_chain[: pages * per_page]) and not of_chain:",
        SIM + "test_what_another_request_is_storing_is_not_stored_again",
    ),
    in_sim(
        "vllm-loads-into-the-first-blocks",
        SCHEDULER,
        'targets = array("i", blocks[first:last])',
        'targets = array("i", blocks[: last - first])',
        BYTES + "[0-plain]",
    ),
    in_sim(
        "vllm-loads-the-first-block-of-each-page",
        SCHEDULER,
        "(pages * self._per_page + at % self._per_page)",
        "(pages * self._per_page)",
        BYTES + "[0-pages-of-two-blocks]",
    ),
    in_sim(
        "vllm-stores-into-the-first-block-of-each-page",
        SCHEDULER,
        "(fresh * per_page + np.arange(per_page, dtype=np.int32))",
        "(fresh * per_page + 0 * np.arange(per_page, dtype=np.int32))",
        BYTES + "[0-pages-of-two-blocks]",
    ),
    in_sim(
        "vllm-forgets-the-salt",
        SCHEDULER,
        "lease = self.cache.admit(chain.known(), salt=salt, adapter=adapter, media=media, reserve=False)",
        "lease = self.cache.admit(chain.known(), adapter=adapter, media=media, reserve=False)",
        SIM + "test_another_salt_finds_nothing",
    ),
    in_sim(
        "vllm-goes-on-without-a-worker",
        SCHEDULER,
        "            self.cache = None\n            for chain",
        "            self.cache.reset()\n            for chain",
        SIM + "test_a_worker_that_dies_ends_the_tier_and_no_request",
    ),
    in_sim(
        "vllm-counts-a-store-of-parts-by-its-first",
        WORKER,
        "self._left[job] = len(plans)",
        "self._left[job] = 1",
        BYTES + "[0-two-ranks]",
    ),
    in_sim(
        "vllm-does-not-say-which-blocks-did-not-arrive",
        WORKER,
        "lost.update(blocks)",
        "lost.update(())",
        BYTES + "[0-failing]",
        BYTES + "[1-failing]",
    ),
    in_sim(
        "vllm-hears-of-the-first-rank-s-failures-only",
        MESSAGES,
        "self.failed | other.failed",
        "self.failed",
        BYTES + "[0-failing-asynchronous]",
        BYTES + "[1-failing-asynchronous]",
    ),
    in_sim(
        "vllm-a-failed-load-fails-its-request",
        CONNECTOR,
        'transfer.kv_load_failure_policy = "recompute"',
        'transfer.kv_load_failure_policy = "fail"',
        BYTES + "[0-failing]",
        BYTES + "[1-failing]",
    ),
)
