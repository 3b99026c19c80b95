"""Telemetry of the machine, put into the report of what ran meanwhile.

Must not know what ran.
"""

from dataclasses import replace

from kvkeep.report import Metric, Report
from kvkeep.telemetry.machine import MachineTelemetry


def with_telemetry(report: Report, telemetry: MachineTelemetry) -> Report:
    """The report with the main figures as metrics `telemetry_*` (None where there is none), and a row with the rest."""
    metrics = {f"telemetry_{name}": Metric(value, unit) for name, (value, unit) in telemetry.figures().items()}
    told = telemetry.to_json()
    row = {
        "series": "telemetry",
        "metric": "telemetry",
        "note": told["nvml"]["reason"] or told["nvml"]["device"] or "",
        "telemetry": told,
    }
    return replace(report, metrics={**report.metrics, **metrics}, rows=[*report.rows, row])
