"""Planted bugs in the bench of vLLM under a load.

Must not hold anything but data: see `bugs` for what an entry is.
"""

from tests.planted.bug import Bug

CASES, SENDING = "bench/_vllm_load_cases.py", "bench/_vllm_load_sending.py"
JUDGING, FOUND = "bench/_vllm_load_judging.py", "bench/_vllm_load_found.py"
TESTS = "tests/bench/test_vllm_load.py::"

BUGS: tuple[Bug, ...] = (
    Bug(
        "vllm-load-waits-for-a-connection",
        SENDING,
        "    connections = aiohttp.TCPConnector(limit=0, force_close=True)\n",
        "    connections = aiohttp.TCPConnector(force_close=True)\n",
        (TESTS + "test_requests_are_sent_when_due_whoever_waits",),
    ),
    Bug(
        "vllm-load-uses-a-connection-again",
        SENDING,
        "    connections = aiohttp.TCPConnector(limit=0, force_close=True)\n",
        "    connections = aiohttp.TCPConnector(limit=0)\n",
        (TESTS + "test_no_connection_is_used_again",),
    ),
    Bug(
        "vllm-load-waits-for-the-answer-before",
        SENDING,
        "            tasks.append(asyncio.create_task(_request(session, content, one, began_s)))\n",
        "            tasks.append(await asyncio.gather(_request(session, content, one, began_s)))\n",
        (TESTS + "test_requests_are_sent_when_due_whoever_waits",),
    ),
    Bug(
        "vllm-load-takes-an-answer-that-is-too-short",
        SENDING,
        "        if len(one.token_ids) != one.served.wanted:\n",
        "        if len(one.token_ids) > one.served.wanted:\n",
        (TESTS + "test_what_fails_is_said_at_its_request",),
    ),
    Bug(
        "vllm-load-block-by-its-place",
        CASES,
        "    for block in trace.chains[request.chain]:\n",
        "    for block in range(len(trace.chains[request.chain])):\n",
        (TESTS + "test_conversations_of_a_trace_are_asked_as_they_came",),
    ),
    Bug(
        "vllm-load-who-failed-was-fast",
        JUDGING,
        "    return sum(goodput_per_s(_counted(one), one.arrivals, slo) for one in passes) / len(passes)\n",
        "    return sum(goodput_per_s(_whole(one), one.arrivals, slo) for one in passes) / len(passes)\n",
        (TESTS + "test_who_fails_has_not_met_the_slo_and_is_an_error",),
    ),
    Bug(
        "vllm-load-texts-compared-cold-only",
        FOUND,
        "for found in (self.first, self.again))\n",
        "for found in (self.first, self.first))\n",
        (TESTS + "test_every_promise_that_is_broken_is_a_limit_missed",),
    ),
)
