"""A CUDA driver that a C compiler makes: what `CudaApi` says reaches it through the real bindings, and is done at once.

It refuses what a device would: a call without a context, a stream that waits for the default one, memory that is not
mapped, a batch in another signature than that of the version that was asked for.  An event is done when it is asked
for the second time.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from kvkeep.transfer.kernel import SOURCE
from tests.transfer.twin import AFTER, BEFORE

ROOT = Path(__file__).resolve().parent.parent.parent

DRIVER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID_VALUE = 1, INVALID_CONTEXT = 201, NOT_FOUND = 500, NOT_READY = 600 };
typedef unsigned long long address;
typedef struct { int queries; float at_ms; } event;

#define CONTEXT ((void *)0xC0)
static __thread void *contexts[8];
static __thread int depth;
static float now_ms;
#define NEEDS_CONTEXT if (!depth || contexts[depth - 1] != CONTEXT) return INVALID_CONTEXT
#define NEEDS(what) if (!(what)) return INVALID_VALUE

int cuInit(unsigned flags) { return flags ? INVALID_VALUE : OK; }
int cuDriverGetVersion(int *version) { *version = 13000; return OK; }
int cuDeviceGet(int *device, int number) { *device = number; return number > 1 ? 101 : OK; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = CONTEXT; return device ? 101 : OK; }
int cuCtxPushCurrent(void *context) { NEEDS(depth < 8); contexts[depth++] = context; return OK; }
int cuCtxPopCurrent(void **context) { if (!depth) return INVALID_CONTEXT; *context = contexts[--depth]; return OK; }
int cuCtxGetCurrent(void **context) { *context = depth ? contexts[depth - 1] : NULL; return OK; }

int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 91 ? 1 : -1;
    return OK;
}

int cuStreamCreate(void **stream, unsigned flags)
{
    NEEDS_CONTEXT; NEEDS(flags == 1); *stream = malloc(8); return OK;
}
int cuStreamDestroy(void *stream) { NEEDS_CONTEXT; NEEDS(stream); free(stream); return OK; }
int cuStreamQuery(void *stream) { NEEDS_CONTEXT; NEEDS(stream); return OK; }
int cuStreamWaitEvent(void *stream, event *of, unsigned flags) { NEEDS_CONTEXT; NEEDS(of && !flags); return OK; }
int cuEventCreate(event **made, unsigned flags)
{
    NEEDS_CONTEXT; NEEDS(!flags); *made = calloc(1, sizeof(event)); return OK;
}
int cuEventDestroy(event *gone) { NEEDS_CONTEXT; NEEDS(gone); free(gone); return OK; }
int cuEventRecord(event *of, void *stream)
{
    NEEDS_CONTEXT; NEEDS(of && stream); of->queries = 0; of->at_ms = now_ms += 0.5f; return OK;
}
int cuEventQuery(event *of) { NEEDS_CONTEXT; NEEDS(of); return of->queries++ ? OK : NOT_READY; }
int cuEventElapsedTime(float *ms, event *start, event *end)
{
    NEEDS_CONTEXT; NEEDS(start->queries >= 0 && end->queries); *ms = end->at_ms - start->at_ms; return OK;
}

int cuMemHostAlloc(void **made, size_t nbytes, unsigned flags)
{
    NEEDS_CONTEXT; NEEDS(flags == 3); return posix_memalign(made, 256, nbytes) ? INVALID_VALUE : OK;
}
int cuMemAlloc(address *made, size_t nbytes)
{
    NEEDS_CONTEXT; return posix_memalign((void **)made, 256, nbytes) ? INVALID_VALUE : OK;
}
int cuMemFreeHost(void *gone) { NEEDS_CONTEXT; free(gone); return OK; }
int cuMemFree(address gone) { NEEDS_CONTEXT; free((void *)gone); return OK; }
int cuMemHostRegister(void *at, size_t nbytes, unsigned flags)
{
    NEEDS_CONTEXT; NEEDS(at && nbytes && flags == 3); return nbytes > (1 << 30) ? 2 : OK;
}
int cuMemHostUnregister(void *at) { NEEDS_CONTEXT; NEEDS(at); return OK; }

int cuMemcpyAsync(address target, address source, size_t nbytes, void *stream)
{
    NEEDS_CONTEXT; NEEDS(stream); memcpy((void *)target, (void *)source, nbytes); return OK;
}

typedef struct { int order, source_location[2], target_location[2]; unsigned flags; } attributes;
static int batch(const address *targets, const address *sources, const size_t *sizes, size_t count,
    const attributes *how, const size_t *first, size_t kinds, size_t *failed, void *stream)
{
    NEEDS_CONTEXT;
    *failed = (size_t)-1;
    NEEDS(stream && kinds == 1 && !*first && how->order == 1 && !how->flags && !how->source_location[0]);
    while (count--)
        memcpy((void *)targets[count], (void *)sources[count], sizes[count]);
    return OK;
}

int cuModuleLoadData(void **module, const char *image)
{
    NEEDS_CONTEXT; NEEDS(!memcmp(image, "\177ELF", 4)); *module = (void *)0xE1; return OK;
}
int cuModuleGetFunction(void **function, void *module, const char *name)
{
    NEEDS(module == (void *)0xE1);
    *function = (void *)0xF1;
    return strcmp(name, "kvkeep_move") ? NOT_FOUND : OK;
}
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned y_threads,
    unsigned z_threads, unsigned shared, void *stream, void **p, void **extra)
{
    NEEDS_CONTEXT;
    NEEDS(function == (void *)0xF1 && y == 1 && z == 1 && y_threads == 1 && z_threads == 1 && !shared && stream);
    NEEDS(!extra);
    run(x, threads, *(void **)p[0], *(void **)p[1], *(address *)p[2], *(address *)p[3], *(void **)p[4],
        *(void **)p[5], *(int *)p[6], *(int *)p[7], *(address *)p[8], *(int *)p[9]);
    return OK;
}

int cuGetProcAddress_v2(const char *name, void **function, int version, address flags, int *status)
{
    if (!strcmp(name, "cuMemcpyBatchAsync"))  /* another signature since CUDA 13, and none before 12.8 */
        *function = version == 12080 && !getenv("OLD_DRIVER") ? (void *)batch : NULL;
    else
        *function = dlsym(RTLD_DEFAULT, name) ? dlsym(RTLD_DEFAULT, name) : dlsym(dlopen(getenv("STUB"), 2), name);
    if (status)
        *status = *function ? 0 : 1;
    return *function ? OK : NOT_FOUND;
}
int cuGetProcAddress(const char *name, void **function, int version, address flags, int *status)
{
    return cuGetProcAddress_v2(name, function, version, flags, status);
}
"""


def build_driver(folder: Path) -> Path | None:
    """libcuda.so.1 in `folder`; None where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    source, library = folder / "driver.c", folder / "libcuda.so.1"
    source.write_text(BEFORE + SOURCE + AFTER + DRIVER)
    command = [compiler, "-O1", "-std=gnu99", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return library


def run_on(library: Path, script: str, *words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Runs Python in a process that finds this driver."""
    found = {"LD_LIBRARY_PATH": str(library.parent), "STUB": str(library), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", script, *words],
        cwd=ROOT,
        env={**os.environ, **found, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
