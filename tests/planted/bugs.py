"""The list of planted bugs.

Must not hold anything but data: adding a bug is adding an entry here, or to one of the lists that are joined here.

An entry is one line that somebody could plausibly get wrong, and the tests that must then fail:

    Bug(
        id="seal-ignores-kv-len",                     # short, unique, says what is wrong
        file="kvkeep/cache.py",
        old="if kv_len >= (page + 1) * page_size:",   # in the file exactly once; part of a line will do
        new="if kv_len >= page * page_size:",
        caught_by=("tests/core/test_cache.py::test_last_page_is_not_sealed",),
    )

`old` may span several lines where one line alone is not unique, but only one of them may differ in `new`; a
line is removed by leaving it out of `new`. `caught_by` are pytest node ids (or files); one test that says
what the line is for is better than a whole file. Set `may_hang=True` where the mistake can make a test run
for ever: only then does running out of time count as caught.

`make planted` plants each bug in turn and shows the table; `make planted ARGS="ID ID"` only some of them.
`make test` checks that each still applies, `make planted-full` that each is caught.
"""

from tests.planted import (
    agreement,
    benches,
    cache,
    cuda,
    encoder,
    engine,
    index,
    integrations,
    loads,
    media,
    outputs,
    peers,
    replay,
    reporting,
    reshaping,
    rhythm,
    routing,
    service,
    serving,
    sizes,
    slots,
    telemetry,
    tiers,
    traffic,
    transfer,
    vision,
    vllm,
    vllm_scheduling,
)
from tests.planted.bug import Bug

__all__ = ["BUGS", "Bug"]

BUGS: tuple[Bug, ...] = (
    *tiers.BUGS,
    *index.BUGS,
    *cache.BUGS,
    *reshaping.BUGS,
    *agreement.BUGS,
    *media.BUGS,
    *traffic.BUGS,
    *encoder.BUGS,
    *engine.BUGS,
    *vision.BUGS,
    *transfer.BUGS,
    *cuda.BUGS,
    *slots.BUGS,
    *outputs.BUGS,
    *peers.BUGS,
    *service.BUGS,
    *replay.BUGS,
    *reporting.BUGS,
    *rhythm.BUGS,
    *sizes.BUGS,
    *integrations.BUGS,
    *vllm_scheduling.BUGS,
    *serving.BUGS,
    *loads.BUGS,
    *vllm.BUGS,
    *routing.BUGS,
    *telemetry.BUGS,
    *benches.BUGS,
    Bug(
        id="set-up-trusts-half-finished-environment",
        file="tools/setup_env.py",
        old="        if have != want or not works():",
        new="        if have != NO_STAMP and have != want or not works():",
        caught_by=("tests/test_setup_env.py::test_environment_without_a_stamp_is_made_again",),
    ),
    Bug(
        id="torch-loaded-with-the-package",
        file="kvkeep/tiers/memory.py",
        old="if TYPE_CHECKING:",
        new="if True:",
        caught_by=(
            "tests/test_project.py::test_import_is_cheap",
            "tests/test_project.py::test_nothing_below_the_engine_needs_torch",
        ),
    ),
)
