"""The host's side, really read here: what this process and its children use is what is told.

Must not expect exact numbers of a process that others disturb: bounds on both sides, from another door.
"""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvkeep.telemetry import host
from kvkeep.telemetry.counters import Counter, CounterMissing, NoAnswer
from kvkeep.telemetry.host import Host

MIB = 2**20
BURN_S = 0.2


def counters(of: Host) -> dict[str, Counter]:
    return {field.name: counter for counter in of.counters() for field in counter.fields}


def read(name: str, of: Host | None = None) -> float:
    counter = counters(of or Host())[name]
    value = counter.read()[[field.name for field in counter.fields].index(name)]
    assert value is not None
    return value


def linux_only() -> None:
    if not Path("/proc/self/statm").is_file():
        pytest.skip("this system has no /proc")


@contextmanager
def child(script: str) -> "Iterator[subprocess.Popen[str]]":
    """A Python process that has said a line, and ends when its input does."""
    process = subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1, text=True)
    assert process.stdout is not None and process.stdin is not None
    try:
        assert process.stdout.readline(), "the child has died"
        yield process
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait(60)


HOLDS_64_MIB = """
import sys
held = b"1" * (64 << 20)
print("ready", flush=True)
sys.stdin.read()
"""
BURNS = f"""
import sys, time
while time.process_time() < {BURN_S}: pass
print("ready", flush=True)
sys.stdin.read()
"""
HAS_A_CHILD = f"""
import subprocess, sys
below = subprocess.Popen([sys.executable, "-c", {HOLDS_64_MIB!r}], stdin=0, stdout=1)
below.wait()
"""


def test_memory_and_faults_of_this_process():
    """What is written to is resident, faulted in page by page or in larger ones, and its share of it is ours."""
    linux_only()
    before = {name: read(name) for name in ("host_rss_nbytes", "host_minor_faults")}
    held = bytearray(os.urandom(1) * (64 * MIB))
    after = {name: read(name) for name in before}
    assert 60 * MIB < after["host_rss_nbytes"] - before["host_rss_nbytes"] < 200 * MIB
    assert 64 * MIB // (2 * MIB) <= after["host_minor_faults"] - before["host_minor_faults"]
    assert 64 * MIB == len(held)


def test_share_of_shared_memory():
    """It is more than what only this process has just written to, and no more than what is resident."""
    linux_only()
    held = bytearray(b"1" * (64 * MIB))
    try:
        pss = read("host_pss_nbytes")
    except CounterMissing as missing:
        pytest.skip(str(missing))
    assert 64 * MIB < pss <= read("host_rss_nbytes") * 1.1
    assert 64 * MIB == len(held)


def test_processor_time_of_this_process():
    """All threads of it, user and system, in seconds."""
    before, began = read("host_cpu_s"), time.process_time()
    while time.process_time() < began + BURN_S:
        pass
    spent = read("host_cpu_s") - before
    assert BURN_S * 0.9 <= spent <= time.process_time() - began + 0.1


def test_children_are_told_while_they_live():
    """How many, their memory, and that of theirs; afterwards none."""
    linux_only()
    held, before = Host(), read("children")
    with child(HOLDS_64_MIB):
        assert before + 1 == read("children", held)
        assert 64 * MIB < read("children_rss_nbytes", held)
        assert 64 * MIB < read("children_pss_nbytes", held)
    with child(HAS_A_CHILD):
        assert before + 2 == read("children", held)
        assert 64 * MIB < read("children_rss_nbytes", held)
    assert before == read("children", held)


def test_processor_time_of_children_is_kept_when_they_end():
    """It is there while they live, and does not go back, nor twice, when they have been waited for."""
    linux_only()
    before = read("children_cpu_s")
    with child(BURNS):
        while_alive = read("children_cpu_s") - before
    afterwards = read("children_cpu_s") - before
    assert BURN_S * 0.9 <= while_alive <= afterwards + 0.001
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert before + afterwards == pytest.approx(used.ru_utime + used.ru_stime, abs=0.05)


def test_child_that_ends_meanwhile_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch):
    """The sum is made again; when children end all the time there is no answer this time."""
    linux_only()
    told = iter([(1.0, 0.0, 0.0), (2.0, 0.0, 0.0), (2.0, 0.0, 0.0), (2.0, 0.0, 0.0)])
    monkeypatch.setattr(host, "_usage", lambda _: next(told))
    assert 2.0 <= read("children_cpu_s") < 2.5
    numbers = iter(range(100))
    monkeypatch.setattr(host, "_usage", lambda _: (float(next(numbers)), 0.0, 0.0))
    with pytest.raises(NoAnswer, match="ended 3 times while"):
        read("children_cpu_s")


def test_system_without_proc_says_which_file_is_missing(tmp_path: Path):
    """Each counter for itself; processor time and faults of this process are known all the same."""
    of = Host(tmp_path)
    reasons = {}
    for name in ("host_rss_nbytes", "host_pss_nbytes", "children_cpu_s", "children_pss_nbytes"):
        with pytest.raises(CounterMissing) as caught:
            read(name, of)
        reasons[name] = str(caught.value)
    assert {
        "host_rss_nbytes": "/proc/PID/statm: No such file or directory",
        "host_pss_nbytes": "/proc/PID/smaps_rollup: No such file or directory",
        "children_cpu_s": "/proc/PID/task: No such file or directory",
        "children_pss_nbytes": "/proc/PID/task: No such file or directory",
    } == reasons
    assert read("host_cpu_s", of) > 0 and read("host_minor_faults", of) > 0


def fake_proc(folder: Path) -> Path:
    """Process 10 has a child of each of its two threads; 30, a grandchild, is a zombie; 40 has ended."""
    for pid, threads in ((10, {10: "21", 11: "20 40"}), (20, {20: "30"}), (21, {21: ""}), (30, {30: ""})):
        for thread, children in threads.items():
            (folder / f"{pid}/task/{thread}").mkdir(parents=True)
            (folder / f"{pid}/task/{thread}/children").write_text(children)
    fields = "1 1 1 0 -1 0 100 7 5 3 250 50 20 10 20 0 1 0 99 5000000 25"
    (folder / "20/stat").write_text(f"20 (a name) (with) brackets) S {fields} 0 0\n")
    (folder / "21/stat").write_text("21 (plain) R 10 1 1 0 -1 0 2000 0 0 0 1000 0 0 0 20 0 1 0 99 0 4 0 0\n")
    (folder / "30/stat").write_text("30 (gone) Z 20 1 1 0 -1 0 1 0 0 0 100 0 0 0 20 0 1 0 99 0 0 0 0\n")
    (folder / "20/smaps_rollup").write_text("0-1 ---p 0 00:00 0 [rollup]\nRss: 300 kB\nPss: 200 kB\nPss_Anon: 9 kB\n")
    (folder / "21/smaps_rollup").write_text("Pss: 16 kB\n")
    (folder / "30/smaps_rollup").write_text("")
    return folder


def test_numbers_are_taken_from_the_right_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of children of any thread, of theirs, of zombies, whatever their names; of those that they waited for."""
    monkeypatch.setattr(host, "_usage", lambda _: (1.0, 1000.0, 10.0))
    of = Host(fake_proc(tmp_path), pid=10)
    ticks, page_nbytes = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    cpu, minor, major, count, resident = counters(of)["children_cpu_s"].read()
    assert cpu == pytest.approx(1.0 + (250 + 50 + 20 + 10 + 1000 + 100) / ticks)
    assert (1000 + 100 + 7 + 2000 + 1, 10 + 5 + 3, 3, 29 * page_nbytes) == (minor, major, count, resident)
    assert (216 * 1024,) == counters(of)["children_pss_nbytes"].read()


def test_kernel_that_does_not_list_children_says_so(tmp_path: Path):
    """Such a kernel would otherwise seem to have none."""
    (tmp_path / "10/task/10").mkdir(parents=True)
    with pytest.raises(CounterMissing, match="/proc/PID/task/TID/children: No such file"):
        read("children", Host(tmp_path, pid=10))


def test_child_that_may_not_be_looked_into_is_no_zero(tmp_path: Path):
    """Its memory is unknown, and so is the sum."""
    of = Host(fake_proc(tmp_path), pid=10)
    (tmp_path / "20/smaps_rollup").unlink()
    (tmp_path / "20/smaps_rollup").mkdir()  # what root cannot read either
    with pytest.raises(CounterMissing, match="smaps_rollup: Is a directory"):
        read("children_pss_nbytes", of)
