"""Planted bugs in routing, the proxy, and the request router for Ray Serve.

Must not hold anything but data: see `bugs` for what an entry is.
"""

from tests.planted.bug import Bug

RANK, GUARD, SHARED, ROUTER = (f"kvkeep/routing/{name}.py" for name in ("rank", "guard", "shared", "router"))
APP, BODIES, REPLICAS, COMMAND = (f"kvkeep/proxy/{name}.py" for name in ("app", "bodies", "replicas", "command"))
RAY = "kvkeep/integrations/ray_serve.py"

RANK_TESTS = "tests/routing/test_rank.py::"
SHARED_TESTS = "tests/routing/test_shared.py::"
ROUTER_TESTS = "tests/routing/test_router.py::"
BODY_TESTS = "tests/proxy/test_bodies.py::"
PROXY_TESTS = "tests/proxy/test_proxy.py::"

BUGS: tuple[Bug, ...] = (
    Bug(
        "rank-is-the-same-for-all-keys",
        RANK,
        "hash64(replica.encode(), key)",
        "hash64(replica.encode(), 0)",
        (RANK_TESTS + "test_keys_are_spread_evenly",),
    ),
    Bug(
        "rank-depends-on-the-order-of-listing",
        RANK,
        "return sorted(replicas, key=lambda replica: (-hash64(replica.encode(), key), replica))",
        "return sorted(replicas, key=lambda replica: -hash64(replica[:1].encode(), key))",
        (RANK_TESTS + "test_the_order_does_not_depend_on_how_replicas_are_listed",),
    ),
    Bug(
        "guard-spreads-copies-over-every-rank",
        GUARD,
        "for rank in range(min(self.ranks, len(order))):",
        "for rank in range(len(order)):",
        (ROUTER_TESTS + "test_who_waits_is_passed_over",),
    ),
    Bug(
        "guard-waits-for-what-nobody-has",
        GUARD,
        "+ self.slack * worth",
        "+ self.slack",
        (ROUTER_TESTS + "test_nothing_is_waited_for_where_there_is_nothing_to_hit",),
    ),
    Bug(
        "guard-limit-rises-with-the-hot-queues",
        GUARD,
        "limit = min(lengths)",
        "limit = sum(lengths) / len(lengths)",
        (ROUTER_TESTS + "test_the_limit_is_relative_to_the_others",),
    ),
    Bug(
        "shared-a-fork-makes-a-session-common",
        SHARED,
        "len(node.children) >= FANOUT_MIN",
        "len(node.children) >= 2",
        (SHARED_TESTS + "test_a_session_that_was_tried_again_stays_together",),
    ),
    Bug(
        "shared-what-few-share-is-common",
        SHARED,
        "share >= SHARE_MIN and len",
        "share >= 0 and len",
        (
            SHARED_TESTS + "test_what_few_ask_for_is_not_common",
            ROUTER_TESTS + "test_few_who_share_a_document_meet",
        ),
    ),
    Bug(
        "shared-a-share-that-sways-moves-everybody",
        SHARED,
        "node.common = share >= SHARE_MIN * SHARE_KEPT",
        "node.common = share >= SHARE_MIN",
        (SHARED_TESTS + "test_a_common_prefix_stays_so_until_its_share_is_a_quarter_of_what_made_it",),
    ),
    Bug(
        "shared-forgets-that-a-session-grew",
        SHARED,
        "child.names += path[depth:]  # a session grows",
        "pass",
        (SHARED_TESTS + "test_a_system_prompt_that_came_alone_first_is_common_too",),
    ),
    Bug(
        "shared-remembers-every-prompt",
        SHARED,
        "while len(self._leaves) > self._leaves_max:",
        "while len(self._leaves) < 0:",
        (SHARED_TESTS + "test_memory_is_bounded",),
    ),
    Bug(
        "shared-counts-do-not-age",
        SHARED,
        "self.count = self.count * 0.5 ** ((now - self.at) / HALF_LIFE) + 1.0",
        "self.count = self.count + 1.0",
        (SHARED_TESTS + "test_a_common_prefix_stays_so_until_its_share_is_a_quarter_of_what_made_it",),
    ),
    Bug(
        "shared-nobody-ever-comes-back",
        SHARED,
        "self._came_back += 1.0",
        "pass",
        (SHARED_TESTS + "test_how_many_come_back_is_learned",),
    ),
    Bug(
        "route-forgets-the-salt",
        ROUTER,
        'self._identities.get(b"", salt, adapter, kind)',
        'self._identities.get(b"", b"", adapter, kind)',
        (ROUTER_TESTS + "test_salt_and_adapter_are_in_the_key",),
    ),
    Bug(
        "route-all-short-prompts-to-one",
        ROUTER,
        "hash64(rest, names[-1] if names else root)",
        "(names[-1] if names else root)",
        (
            ROUTER_TESTS + "test_a_prompt_that_ends_in_what_all_share_is_spread",
            ROUTER_TESTS + "test_a_prompt_shorter_than_a_page_goes_to_any_replica_that_is_idle",
        ),
    ),
    Bug(
        "route-learns-though-a-depth-is-said",
        ROUTER,
        "self._shared = None if self.settings.depth is not None else SharedPrefixes()",
        "self._shared = SharedPrefixes()",
        (ROUTER_TESTS + "test_a_depth_that_is_said_is_kept",),
    ),
    Bug(
        "route-loses-who-waits-on-a-replica-that-left",
        ROUTER,
        "        self._alive.remove(replica)",
        "        self._alive.remove(replica), self._waiting.pop(replica, None)",
        (ROUTER_TESTS + "test_requests_in_flight_are_counted_across_a_replica_that_comes_and_goes",),
    ),
    Bug(
        "proxy-sends-again-what-was-sent",
        APP,
        "except aiohttp.ConnectionTimeoutError as error:",
        "except aiohttp.ClientError as error:",
        (PROXY_TESTS + "test_a_request_that_was_sent_is_not_sent_again",),
    ),
    Bug(
        "proxy-buffers-streams",
        APP,
        "async for chunk in answer.content.iter_any():",
        "for chunk in [await answer.read()]:",
        (PROXY_TESTS + "test_a_stream_is_not_buffered",),
    ),
    Bug(
        "proxy-counts-a-stream-as-waiting",
        APP,
        "if waits:\n                        waits = False",
        "if not waits:\n                        waits = False",
        (PROXY_TESTS + "test_a_stream_is_not_buffered",),
    ),
    Bug(
        "proxy-does-not-notice-that-a-client-left",
        APP,
        "listener.add_done_callback(leave)",
        "pass",
        (PROXY_TESTS + "test_a_client_that_leaves_stops_the_replica",),
    ),
    Bug(
        "proxy-passes-on-what-is-the-connections",
        APP,
        'own = OWN_HEADERS | _named_by_connection(headers) | {b"content-length", b"expect"}',
        'own = OWN_HEADERS | {b"content-length", b"expect"}',
        (PROXY_TESTS + "test_requests_arrive_as_they_were_sent",),
    ),
    Bug(
        "proxy-makes-half-an-answer-whole",
        APP,
        "return  # without an end",
        'await send({"type": "http.response.body", "body": b""})  # without an end',
        (PROXY_TESTS + "test_half_an_answer_is_seen_to_be_half",),
    ),
    Bug(
        "proxy-is-led-elsewhere-by-a-path",
        APP,
        'if not _raw_path(scope).startswith("/"):',
        "if not _raw_path(scope):",
        (PROXY_TESTS + "test_a_path_cannot_lead_elsewhere",),
    ),
    Bug(
        "proxy-reads-packed-bodies",
        APP,
        "prompt = None if packed or not body else",
        "prompt = None if not body else",
        (PROXY_TESTS + "test_a_packed_body_is_passed_on",),
    ),
    Bug(
        "proxy-takes-a-broken-replica-back-at-once",
        REPLICAS,
        "if not replica.alive and time.monotonic() >= replica.back_s:",
        "if not replica.alive:",
        (PROXY_TESTS + "test_a_replica_that_breaks_requests_is_left_out_though_it_looks_well",),
    ),
    Bug(
        "proxy-answers-take-forty-milliseconds-more",
        COMMAND,
        "socket.SOCK_STREAM, socket.IPPROTO_TCP)",
        "socket.SOCK_STREAM)",
        ("tests/proxy/test_timing.py::test_the_proxy_adds_little",),
    ),
    Bug(
        "bodies-depend-on-the-order-of-keys",
        BODIES,
        "sort_keys=True",
        "sort_keys=False",
        (BODY_TESTS + "test_a_chat_begins_as_its_later_turns_do",),
    ),
    Bug(
        "bodies-forget-the-tools",
        BODIES,
        'first = [request["tools"]] if request.get("tools") else []',
        "first = list[str]()",
        (BODY_TESTS + "test_tools_come_first",),
    ),
    Bug(
        "ray-does-not-count-calls-that-have-not-begun",
        RAY,
        "self.count[order[0]] += 1",
        "self.count[order[0]] += 0",
        ("tests/integrations/test_ray_serve.py::test_a_busy_replica_is_passed_over",),
        needs="ray",
    ),
)
