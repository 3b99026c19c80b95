"""Figures of passes: hits against the ceiling, times against ample space, texts, memory, what is left at idle.

Must not know servers: it reads what passes left.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench._vllm_workloads import Ask, Workload, block_names
from kvkeep.benching import median
from kvkeep.report import JsonValue, Metric

MIB, GIB = 1 << 20, 1 << 30
#: What kvkeep must reach; the same figures of the others stand beside.
OF_CEILING_MIN = 0.99
TTFT_OVER_AMPLE_MAX = 1.2
#: Of the memory of vLLM alone, with the same KV space; the tier comes on top.
MEMORY_OVER_MAX = 1.2
#: Of the steps' time, that kvkeep may take in the scheduler and the workers where there is nothing to reuse.
OWN_SHARE_MAX = 0.01
JUDGED = "kvkeep"
CHECKED_BLOCKS = "kvkeep_checked_blocks_total"

Pass = Mapping[str, Any]
Row = dict[str, JsonValue]


@dataclass(frozen=True, slots=True)
class Limit:
    """at_least, at_most: what a value must reach; one of them."""

    at_least: float | None = None
    at_most: float | None = None

    def row(self, value: float) -> Row:
        if self.at_least is not None:
            return {"limit": f"at least {self.at_least:g}", "reached": value >= self.at_least}
        assert self.at_most is not None
        return {"limit": f"at most {self.at_most:g}", "reached": value <= self.at_most}


def judge(workload: Workload, block_size: int, passes: Mapping[str, Sequence[Pass]]) -> list[Row]:
    """Rows of one workload; `passes` by configuration, in the order of their repeats."""
    return [
        {"workload": workload.name, "configuration": name} | row
        for name, made in passes.items()
        if made
        for row in _rows(name, made, workload, block_size, passes)
    ]


def metrics(rows: Sequence[Row]) -> dict[str, Metric]:
    """The rows' values by name."""
    out = {}
    for row in rows:
        value, samples = row.get("value"), row.get("samples")
        if isinstance(value, int | float):
            name = f"{row['workload']}_{str(row['configuration']).replace('-', '_')}_{row['metric']}"
            out[name] = Metric(value, str(row["unit"]), samples=samples if isinstance(samples, int) else None)
    return out


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The rows as lines of text."""
    yield f"{'workload':<12}{'configuration':<17}{'metric':<24}{'value':>12}  {'unit':<18}{'limit':<20}reached"
    for row in rows:
        value = row.get("value")
        shown = "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
        reached = "" if "reached" not in row else "yes" if row["reached"] else "NO"
        words = f"{row['workload']!s:<12}{row['configuration']!s:<17}{row['metric']!s:<24}{shown:>12}"
        yield f"{words}  {row['unit']!s:<18}{row.get('limit', '')!s:<20}{reached}".rstrip()


def _rows(
    name: str, made: Sequence[Pass], workload: Workload, block_size: int, passes: Mapping[str, Sequence[Pass]]
) -> Iterator[Row]:
    judged = name == JUDGED
    ceiling, shares = sum(made[0]["ceiling"]), [cached_tokens(one) / workload.prompt_tokens for one in made]
    yield _value("hit_share", median(shares), "of prompt tokens", len(made)) | {
        "ceiling": ceiling / workload.prompt_tokens
    }
    of_ceiling = median([cached_tokens(one) / ceiling for one in made]) if ceiling else 1.0
    limit = Limit(at_least=OF_CEILING_MIN) if judged else Limit(at_least=1.0) if name in ("ample", "again") else None
    yield _value("of_ceiling", of_ceiling, "of the ceiling", len(made), limit)
    told = max(abs(cached_tokens(one) - sum(a["cached_tokens"] or 0 for a in one["answers"])) for one in made)
    yield _value("tokens_told_apart", told, "tokens", len(made), Limit(at_most=0)) | {
        "what": "difference between the hits of /metrics and those that the answers tell"
    }
    yield _value(
        "external_share", median([_external(one) / workload.prompt_tokens for one in made]), "of prompt tokens"
    )
    yield from _times(name, made, passes, judged)
    yield from _memory(made, passes, judged)
    yield from _texts(name, made, workload, block_size, passes)
    if any(CHECKED_BLOCKS in one["metrics"] for one in made) and name.endswith("-checked"):
        checked = int(min(one["metrics"][CHECKED_BLOCKS] for one in made))
        yield _value("checked_blocks", checked, "blocks", len(made), Limit(at_least=1))
        wrong = int(max(one["metrics"]["kvkeep_wrong_blocks_total"] for one in made))
        yield _value("wrong_blocks", wrong, "blocks", checked, Limit(at_most=0))
    yield _value("log_errors", sum(len(one["bad_lines"]) for one in made), "lines", len(made), Limit(at_most=0))
    yield _value("kv_usage_idle", max(one["idle"]["kv_usage"] for one in made), "share", len(made), Limit(at_most=0))
    if name.endswith("-lru") and (other := passes.get(name.removesuffix("-lru"))):
        gained = median([cached_tokens(one) for one in other]) / max(1.0, median([cached_tokens(one) for one in made]))
        yield _value("hits_rhythm_over_lru", gained, "ratio", len(other), Limit(at_least=1.0))


def cached_tokens(one: Pass) -> float:
    """Prompt tokens that vLLM took from its blocks or through its connector."""
    return float(one["metrics"]["vllm:prefix_cache_hits_total"]) + _external(one)


def _external(one: Pass) -> float:
    return float(one["metrics"].get("vllm:external_prefix_cache_hits_total", 0.0))


def _times(name: str, made: Sequence[Pass], passes: Mapping[str, Sequence[Pass]], judged: bool) -> Iterator[Row]:
    sums = [ttft_sum_s(one) for one in made]
    yield _value("ttft_sum", median(sums), "s", len(sums)) | {"all": [round(value, 3) for value in sums]}
    yield _value("ttft_mean", median(sums) / len(made[0]["answers"]), "s", len(sums))
    yield _value("wall", median([one["wall_s"] for one in made]), "s", len(made))
    yield _value("cpu", median([one["cpu_s"] for one in made]), "s", len(made))
    yield _value("spin", median([one["spin_us"] for one in made]), "us", len(made))
    pairs = [(one, other) for one in made for other in passes.get("ample", ()) if one["repeat"] == other["repeat"]]
    if name != "ample" and pairs:
        ratios = [ttft_sum_s(one) / ttft_sum_s(other) for one, other in pairs]
        limit = Limit(at_most=TTFT_OVER_AMPLE_MAX) if judged else None
        yield _value("ttft_over_ample", median(ratios), "ratio", len(ratios), limit) | {
            "all": [round(value, 3) for value in ratios]
        }
        cpu = [one["cpu_s"] / other["cpu_s"] for one, other in pairs]
        yield _value("cpu_over_ample", median(cpu), "ratio", len(cpu))


def ttft_sum_s(one: Pass) -> float:
    return float(sum(answer["ttft_s"] for answer in one["answers"]))


def _memory(made: Sequence[Pass], passes: Mapping[str, Sequence[Pass]], judged: bool) -> Iterator[Row]:
    peak = median([one["pss_peak_nbytes"] for one in made])
    yield _value("pss_peak", peak / MIB, "MiB", len(made)) | {"tier_mib": round(made[0]["tier_gib"] * 1024)}
    alone = passes.get("quarter")
    if alone and made[0]["tier_gib"]:
        over = (peak - made[0]["tier_gib"] * GIB) / median([one["pss_peak_nbytes"] for one in alone])
        yield _value(
            "memory_over_vllm", over, "ratio", len(made), Limit(at_most=MEMORY_OVER_MAX) if judged else None
        ) | {"what": "peak of all processes together, less the tier, over that of vLLM alone with the same KV space"}


def _texts(
    name: str, made: Sequence[Pass], workload: Workload, block_size: int, passes: Mapping[str, Sequence[Pass]]
) -> Iterator[Row]:
    """Against the first pass of ample space: how many are equal, and how many differ though nothing in how they were
    computed does."""
    first = next(iter(passes.get("ample", ())), None)
    if first is None:
        return
    expected, origins = [_ids(answer) for answer in first["answers"]], lineages(workload.asks, first, block_size)
    same = alike = unexplained = 0
    for one in made:
        if one is first:
            continue
        theirs = lineages(workload.asks, one, block_size)
        for number, answer in enumerate(one["answers"]):
            equal = _ids(answer) == expected[number]
            same += equal
            alike += theirs[number] == origins[number]
            unexplained += not equal and theirs[number] == origins[number]
    compared = len(expected) * sum(one is not first for one in made)
    if compared:
        yield _value("texts_same", same / compared, "of texts", compared)
        yield _value("texts_unexplained", unexplained, "texts", alike, Limit(at_most=0)) | {
            "what": "texts that differ from those of ample space though they were computed in the same steps"
        }


def lineages(asks: Sequence[Ask], one: Pass, block_size: int) -> list[bytes]:
    """Of each request, how its KV came about: equal where every block was computed in the same steps.

    What a block holds depends, to the last bit, on the chunk that computed it and on the blocks before it.  So its
    lineage is that of the request that computed it last; blocks that were matched keep the one they have.
    """
    kept: dict[bytes, bytes] = {}
    out = []
    for ask, answer in zip(asks, one["answers"], strict=True):
        names = block_names(ask.prompt, block_size)
        matched = (answer["cached_tokens"] or 0) // block_size
        history = hashlib.sha256(f"{len(ask.prompt)} {matched}".encode())
        for block in names[:matched]:
            history.update(kept.get(block, b"unknown"))
        history.update(str(ask.prompt).encode())
        own = history.digest()
        kept |= dict.fromkeys(names[matched:], own)
        out.append(own)
    return out


def _ids(answer: Mapping[str, Any]) -> list[int]:
    return list(answer["token_ids"])


def _value(metric: str, value: float, unit: str, samples: int = 1, limit: Limit | None = None) -> Row:
    row: Row = {"metric": metric, "value": round(value, 5), "unit": unit, "samples": samples}
    return row | (limit.row(value) if limit is not None else {})


# ---------------------------------------------------------------------- clients that go away, random prompts


def judge_concurrent(name: str, one: Pass) -> list[Row]:
    """Rows of a concurrent pass: everybody who stayed was served, and nothing is held afterwards."""
    ended = one["ended"]
    stayed = ended.get("finished", 0) + ended.get("failed", 0)
    rows = [
        _value("finished_share", ended.get("finished", 0) / max(1, stayed), "of requests", stayed, Limit(at_least=1.0))
        | {"ended": ended, "failures": one["failures"], "clients": one["clients"], "wall_s": one["wall_s"]},
        _value("aborted", sum(count for kind, count in ended.items() if kind.startswith("aborted")), "requests"),
        _value("hit_share", one["cached_tokens"] / max(1, one["prompt_tokens"]), "of prompt tokens"),
        _value("kv_usage_idle", one["idle"]["kv_usage"], "share", 1, Limit(at_most=0)),
        _value("log_errors", len(one["bad_lines"]), "lines", 1, Limit(at_most=0)),
    ]
    own = one["idle"]["own"]
    if "kvkeep_pages_total" in own:
        away = own["kvkeep_pages_total"] - own["kvkeep_pages_free"] - own["kvkeep_pages_cached"]
        rows.append(
            _value("tier_pages_away", away, "pages", 1, Limit(at_most=0)) | {"total": own["kvkeep_pages_total"]}
        )
    return [{"workload": "concurrent", "configuration": name} | row for row in rows]


def judge_random(one: Pass) -> list[Row]:
    """Rows of random pairs: throughput beside that of equal servers, and our own share of the steps."""
    a, b, kept = (one["seconds"][name] for name in ("a", "b", "kvkeep"))
    equal = [min(x / y, y / x) for x, y in zip(a, b, strict=True)]
    ours = [(x + y) / 2 / z for x, y, z in zip(a, b, kept, strict=True)]
    noise = Limit(at_least=round(min(equal), 5))
    rows = [
        _value("throughput_equal_servers", median([x / y for x, y in zip(a, b, strict=True)]), "ratio", len(a))
        | {"worst": round(min(equal), 5)},
        _value("throughput_over_plain", median(ours), "ratio", len(ours), noise)
        | {"all": [round(value, 4) for value in ours]},
        _value("tokens_per_s", one["tokens"] / median(kept), "tokens/s", len(kept)),
        _value("tokens_per_s_plain", one["tokens"] / median([*a, *b]), "tokens/s", len(a) + len(b)),
        _value("log_errors", len(one["bad_lines"]), "lines", 1, Limit(at_most=0)),
    ]
    found = one["metrics"]["kvkeep"]
    steps_s = found.get("kvkeep_step_seconds_total", 0.0)
    if steps_s:
        own_s = found["kvkeep_scheduler_seconds_total"] + found["kvkeep_worker_seconds_total"]
        rows.append(
            _value("own_share_of_steps", own_s / steps_s, "of the steps", 1, Limit(at_most=OWN_SHARE_MAX))
            | {"steps": found["kvkeep_steps_total"], "own_s": round(own_s, 4), "steps_s": round(steps_s, 4)}
        )
    return [{"workload": "random", "configuration": one["kept"]} | row for row in rows]
