"""The host's side: memory, page faults and processor time of this process and of its children, from the kernel.

Must not know when it is read, or what for.  Linux says all of it in /proc; where a file is missing, so is its counter.
"""

import errno
import os
import resource
from pathlib import Path

from kvkeep.telemetry.counters import Answer, Counter, CounterMissing, Field, NoAnswer

SOURCE = "host"

CPU = "host_cpu_s"
#: How often the sum over children is tried again when one of them ends meanwhile.
TRIES = 3

#: Where fields of /proc/PID/stat lie behind the command's name, which is in brackets and may hold anything.
MINOR, MINOR_BELOW, MAJOR, MAJOR_BELOW, USER, SYSTEM, USER_BELOW, SYSTEM_BELOW = range(7, 15)
RESIDENT = 21

#: What the kernel says of a process that has ended, waited for or not.
ENDED = {errno.ENOENT, errno.ESRCH}


class Host:
    """This process, as the kernel counts it.   proc: where its files are."""

    def __init__(self, proc: Path = Path("/proc"), pid: int | None = None) -> None:
        self._pid = os.getpid() if pid is None else pid
        self._proc = proc
        self._page_nbytes = os.sysconf("SC_PAGE_SIZE")
        self._ticks = os.sysconf("SC_CLK_TCK")

    def counters(self) -> list[Counter]:
        """Everything that is sampled; the order is that of the result."""
        return [
            Counter(SOURCE, (Field("host_rss_nbytes", "bytes", "resident memory of this process"),), self._rss, "live"),
            Counter(
                SOURCE,
                (Field("host_pss_nbytes", "bytes", "the same, what is shared counted by its share"),),
                self._own_pss,
                "live",
            ),
            Counter(
                SOURCE,
                (
                    Field(CPU, "s", "processor time of this process, user and system", "total"),
                    Field("host_minor_faults", "faults", "of this process, without reading a disk", "total"),
                    Field("host_major_faults", "faults", "of this process, with reading a disk", "total"),
                ),
                self._usage,
                "live",
            ),
            Counter(
                SOURCE,
                (
                    Field("children_cpu_s", "s", "of all processes below this one, those that ended too", "total"),
                    Field("children_minor_faults", "faults", "of the same", "total"),
                    Field("children_major_faults", "faults", "of the same", "total"),
                    Field("children", "processes", "below this one that live now"),
                    Field("children_rss_nbytes", "bytes", "of those; what they share is counted for each"),
                ),
                self._children,
                "live",
            ),
            Counter(
                SOURCE,
                (Field("children_pss_nbytes", "bytes", "of those, what is shared counted by its share"),),
                self._pss_of_children,
                "live",
            ),
        ]

    # ------------------------------------------------------------------ this process

    def _rss(self) -> Answer:
        try:
            words = (self._proc / str(self._pid) / "statm").read_text().split()
        except OSError as error:
            raise _missing("statm", error) from error
        return (float(int(words[1]) * self._page_nbytes),)

    def _own_pss(self) -> Answer:
        try:
            pss = self._pss(self._pid)
        except OSError as error:
            raise _missing("smaps_rollup", error) from error
        if pss is None:
            raise CounterMissing("/proc/PID/smaps_rollup has no line Pss")
        return (pss,)

    def _usage(self) -> Answer:
        return _usage(resource.RUSAGE_SELF)

    # ------------------------------------------------------------------ those below it

    def _children(self) -> Answer:
        """Those that were waited for are the kernel's sum; a child that moves there meanwhile would count twice."""
        for _ in range(TRIES):
            before = _usage(resource.RUSAGE_CHILDREN)
            cpu, minor, major, resident, count = before[0], before[1], before[2], 0.0, 0
            for pid in self._below(self._pid):
                stat = self._stat(pid)
                if stat is None:
                    continue
                count += 1
                ticks = stat[USER] + stat[SYSTEM] + stat[USER_BELOW] + stat[SYSTEM_BELOW]
                cpu += ticks / self._ticks
                minor += stat[MINOR] + stat[MINOR_BELOW]
                major += stat[MAJOR] + stat[MAJOR_BELOW]
                resident += stat[RESIDENT] * self._page_nbytes
            if before == _usage(resource.RUSAGE_CHILDREN):
                return cpu, minor, major, float(count), resident
        raise NoAnswer(f"children ended {TRIES} times while they were counted")

    def _pss_of_children(self) -> Answer:
        total = 0.0
        for pid in self._below(self._pid):
            try:
                total += self._pss(pid) or 0.0
            except OSError as error:
                if error.errno not in ENDED:
                    raise _missing("smaps_rollup", error) from error
        return (total,)

    def _below(self, pid: int) -> list[int]:
        """Numbers of all processes below this one."""
        found = self._direct(pid)
        for child in found:  # grows while it is walked
            found += self._direct(child)
        return found

    def _direct(self, pid: int) -> list[int]:
        """Children of all threads of a process; none when it has ended."""
        try:
            threads = os.listdir(self._proc / str(pid) / "task")
        except OSError as error:
            if pid == self._pid:
                raise _missing("task", error) from error
            return []
        children: list[int] = []
        for thread in threads:
            try:
                children += map(int, (self._proc / str(pid) / "task" / thread / "children").read_text().split())
            except OSError as error:
                if thread == str(self._pid):
                    raise _missing("task/TID/children", error) from error
        return children

    def _stat(self, pid: int) -> list[int] | None:
        """Numbers of /proc/PID/stat behind the name and the state; None when the process has ended."""
        try:
            text = (self._proc / str(pid) / "stat").read_text(errors="replace")
        except OSError:
            return None
        words = text.rpartition(")")[2].split()
        return [0, *map(int, words[1:])]

    def _pss(self, pid: int) -> float | None:
        """None of a process without memory, which is ending.  Raises `OSError`."""
        for line in (self._proc / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return float(int(line.split()[1]) * 1024)
        return None


def _missing(file: str, error: OSError) -> CounterMissing:
    return CounterMissing(f"/proc/PID/{file}: {error.strerror}")


def _usage(whose: int) -> tuple[float, float, float]:
    """Processor seconds, minor and major faults."""
    used = resource.getrusage(whose)
    return used.ru_utime + used.ru_stime, float(used.ru_minflt), float(used.ru_majflt)
