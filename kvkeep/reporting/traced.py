"""A command that is recorded: its trace with the machine's counters beside it, written when it is over.

Must not know what the command does.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvkeep import __version__
from kvkeep import report as reports
from kvkeep.errors import BadInput
from kvkeep.telemetry.machine import MachineTelemetry
from kvkeep.telemetry.trace import Recorder, add_series, recording


@contextmanager
def traced(path: Path, words: Sequence[str]) -> Iterator[None]:
    """What was recorded is written to `path`, of an interrupted command too; nothing where its input was bad.

    words: the command's.
    """
    recorder = Recorder()
    machine = recorder.process("machine")
    telemetry = MachineTelemetry()
    try:
        with telemetry, recording(recorder):
            yield
    except (BadInput, SystemExit):
        raise
    except BaseException:
        _write(path, words, recorder, machine, telemetry)
        raise
    _write(path, words, recorder, machine, telemetry)


def _write(path: Path, words: Sequence[str], recorder: Recorder, machine: int, telemetry: MachineTelemetry) -> None:
    told = telemetry.to_json()
    add_series(recorder, machine, told["series"])
    recorder.other |= {
        "command": " ".join(["kvkeep", *_without(words, ("--trace", "--json"))]),
        "version": __version__,
        "commit": reports.commit(),
        "machine": reports.machine(),
        "nvml": told["nvml"]["reason"] or told["nvml"].get("device") or "",
    }
    try:
        reports.write_whole(path, json.dumps(recorder.to_json(), allow_nan=False))
    except OSError as error:
        raise BadInput(f"--trace {path}: cannot write ({error.strerror}); nothing was written") from error
    print(f"trace: {path.name}; open it in Perfetto, or `kvkeep report {path.name} -o report.html`")


def _without(words: Sequence[str], options: Sequence[str]) -> list[str]:
    """The words without some options and their values: a path of this machine says nothing to others."""
    out, skip = [], False
    for word in words:
        if not skip and word not in options and not word.startswith(tuple(f"{option}=" for option in options)):
            out.append(word)
        skip = word in options and not skip
    return out
