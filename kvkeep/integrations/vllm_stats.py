"""The connector's counters in vLLM's log lines and at its /metrics.

Must not know how anything is counted.  A report is {"counters": since the last one, "gauges": of now}.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvkeep.integrations.vllm_identity import UNNAMED

COUNTERS = {
    "loaded_tokens": "Tokens whose KV came from the tier.",
    "lost_tokens": "Tokens whose load failed; they were computed.",
    "saved_tokens": "Tokens whose KV was copied into the tier.",
    "unsaved_tokens": "Tokens whose KV was not kept: no room beside live requests, or the copy failed.",
    "stored_pages": "Pages that entered the tier's index.",
    "evicted_pages": "Pages that left the tier to make room.",
    "loaded_bytes": "Bytes copied from the tier, of all ranks.",
    "saved_bytes": "Bytes copied into the tier, of all ranks.",
    "load_seconds": "Seconds that copies from the tier took, of all ranks.",
    "save_seconds": "Seconds that copies into the tier took, of all ranks.",
    "scheduler_seconds": "Seconds of the scheduler's steps that kvkeep took.",
    "worker_seconds": "Seconds of the workers' steps that kvkeep took, of all ranks.",
    "step_seconds": "Seconds of the workers' steps that computed something, of all ranks.",
    "steps": "Steps that computed something, of all ranks.",
    "checked_blocks": "Loaded blocks whose bytes were compared with what was saved (check_copies).",
    "wrong_blocks": "Of those, the ones that differed.",
}
GAUGES = {
    "pages_total": "Pages of the tier.",
    "pages_free": "Pages of the tier that hold nothing.",
    "pages_cached": "Pages of the tier that only the index holds.",
    "pages_live": "Pages of the tier that requests or copies hold.",
}
UNNAMED_HELP = "Requests that were not cached since they cannot be named safely."


class Stats(KVConnectorStats):  # type: ignore[misc]
    """Reports added up."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data or {})
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Nothing has been reported."""
        self.data: dict[str, Any] = {"counters": {}, "gauges": {}}

    def aggregate(self, other: KVConnectorStats) -> "Stats":
        """This, with a later report."""
        counters = self.data["counters"]
        for name, value in other.data["counters"].items():
            counters[name] = counters.get(name, 0) + value
        self.data["gauges"].update(other.data["gauges"])
        return self

    def reduce(self) -> dict[str, int | float]:
        """What a log line says of an interval."""
        counters, gauges = self.data["counters"], self.data["gauges"]
        shown = {name: counters[name] for name in ("loaded_tokens", "saved_tokens", "lost_tokens") if name in counters}
        return {f"kvkeep_{name}": round(value) for name, value in {**shown, **gauges}.items()}

    def is_empty(self) -> bool:
        """Whether nothing was reported."""
        return not self.data["counters"] and not self.data["gauges"]


class PromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """`kvkeep_...` at vLLM's /metrics, one for each engine."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        labels = self._labelnames
        self._metrics = {
            **{name: self._counter_cls(f"kvkeep_{name}_total", text, labels) for name, text in COUNTERS.items()},
            **{name: self._gauge_cls(f"kvkeep_{name}", text, labels) for name, text in GAUGES.items()},
        }
        self._unnamed = self._counter_cls("kvkeep_uncached_requests_total", UNNAMED_HELP, [*labels, "reason"])
        for values in self.per_engine_labelvalues.values():  # so that each is there from the start, at 0
            for metric in self._metrics.values():
                metric.labels(*values)
            for reason in UNNAMED:
                self._unnamed.labels(*values, reason)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Takes a report of an engine."""
        values = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data["counters"].items():
            reason = name.removeprefix("unnamed_")
            metric = self._unnamed.labels(*values, reason) if reason != name else self._metrics[name].labels(*values)
            if value > 0:
                metric.inc(value)
        for name, value in transfer_stats_data["gauges"].items():
            self._metrics[name].labels(*values).set(value)
