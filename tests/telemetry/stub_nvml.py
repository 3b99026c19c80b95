"""A libnvidia-ml.so.1 that a C compiler makes: what nvidia-ml-py asks reaches it through the real bindings.

It refuses what the real one would: calls before the start, another device, structures that are not there.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

LIBRARY = r"""
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
       DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15 };
typedef unsigned int u32;
typedef unsigned long long u64;
static int started, energy_calls;
#define DEVICE ((void *)0xD0)
#define ASKED(device, what) \
    if (!started) return UNINITIALIZED; \
    if (device != DEVICE || !(what)) return INVALID_ARGUMENT; \
    if (getenv("LOST")) return GPU_IS_LOST

int nvmlInitWithFlags(u32 flags) { if (getenv("UNLOADED")) return DRIVER_NOT_LOADED; started++; return flags; }
int nvmlShutdown(void) { if (!started) return UNINITIALIZED; started--; return OK; }
const char *nvmlErrorString(int code) { return "said by the stub"; }
static int text(char *to, u32 length, const char *from)
{
    if (strlen(from) >= length) return INSUFFICIENT_SIZE;
    strcpy(to, from);
    return OK;
}
int nvmlSystemGetDriverVersion(char *to, u32 length) { return text(to, length, "580.159.03"); }
int nvmlSystemGetNVMLVersion(char *to, u32 length) { return text(to, length, "13.580.159.03"); }
int nvmlDeviceGetCount_v2(u32 *count) { *count = getenv("DEVICES") ? atoi(getenv("DEVICES")) : 1; return OK; }
int nvmlDeviceGetHandleByIndex_v2(u32 index, void **device) { *device = DEVICE; return index ? INVALID_ARGUMENT : OK; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device)
{
    *device = DEVICE;
    return strcmp(uuid, "GPU-here") ? NOT_FOUND : OK;
}
int nvmlDeviceGetName(void *device, char *to, u32 length) { ASKED(device, to); return text(to, length, "NVIDIA Stub"); }

typedef struct { u64 total, free, used; } memory;
int nvmlDeviceGetMemoryInfo(void *device, memory *to)
{
    ASKED(device, to); *to = (memory){80ull << 30, 50ull << 30, 30ull << 30}; return OK;
}
typedef struct { u32 gpu, memory; } rates;
int nvmlDeviceGetUtilizationRates(void *device, rates *to) { ASKED(device, to); *to = (rates){93, 41}; return OK; }
int nvmlDeviceGetPowerUsage(void *device, u32 *mw) { ASKED(device, mw); *mw = 431500; return OK; }
int nvmlDeviceGetEnforcedPowerLimit(void *device, u32 *mw) { ASKED(device, mw); return NOT_SUPPORTED; }
int nvmlDeviceGetTotalEnergyConsumption(void *device, u64 *mj)
{
    ASKED(device, mj); *mj = (5ull << 40) + 1500ull * energy_calls++; return OK;
}
int nvmlDeviceGetClockInfo(void *device, int which, u32 *mhz)
{
    ASKED(device, which == 1 || which == 2); *mhz = which == 1 ? 1980 : 3201; return OK;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, u64 *to) { ASKED(device, to); *to = 0x24; return OK; }
int nvmlDeviceGetCurrPcieLinkGeneration(void *device, u32 *to) { ASKED(device, to); *to = 4; return OK; }
int nvmlDeviceGetMaxPcieLinkGeneration(void *device, u32 *to) { ASKED(device, to); *to = 5; return OK; }
int nvmlDeviceGetCurrPcieLinkWidth(void *device, u32 *to) { ASKED(device, to); *to = 8; return OK; }
int nvmlDeviceGetMaxPcieLinkWidth(void *device, u32 *to) { ASKED(device, to); *to = 16; return OK; }
int nvmlDeviceGetPcieThroughput(void *device, int which, u32 *to)
{
    ASKED(device, which == 0 || which == 1); usleep(20000); *to = which ? 22000000 : 1100000; return OK;
}
typedef struct { u32 pid; u64 used; u32 instance, compute; } process;
int nvmlDeviceGetComputeRunningProcesses_v2(void *device, u32 *count, process *to)
{
    ASKED(device, count);
    if (*count < 2) { *count = 2; return INSUFFICIENT_SIZE; }
    to[0] = (process){getpid(), 20ull << 30, 0, 0};
    to[1] = (process){1, 3ull << 30, 0, 0};
    *count = 2;
    return OK;
}
"""


def build_library(folder: Path) -> Path | None:
    """libnvidia-ml.so.1 in `folder`; None where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    source, library = folder / "nvml.c", folder / "libnvidia-ml.so.1"
    source.write_text(LIBRARY)
    command = [compiler, "-O1", "-std=gnu99", "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return library


def run_on(library: Path, script: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Runs Python in a process that finds this library."""
    found = {"LD_LIBRARY_PATH": str(library.parent), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, **found, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
