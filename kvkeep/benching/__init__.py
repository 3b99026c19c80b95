"""Benching: the harness of the cases in `bench/`, and what is said of their numbers.

cases.py    where cases live, how one is found and run        command.py   `kvkeep bench`: one case, or all
samples.py  medians, tails, spread, bootstrap intervals       record.py    how and on what it was measured
results.py  results files, read back                          compare.py   better, worse or within noise
"""

from kvkeep.benching.cases import bench_directory, bench_names, run_bench
from kvkeep.benching.record import spin_us
from kvkeep.benching.samples import median, p90, p99, summary

__all__ = ["bench_directory", "bench_names", "median", "p90", "p99", "run_bench", "spin_us", "summary"]
