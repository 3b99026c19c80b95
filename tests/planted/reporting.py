"""Planted bugs in the report and in traces.

Must not hold anything but data: see `bugs` for what an entry is.
"""

from tests.planted.bug import Bug

ENGINE = "kvkeep/engine/tracing.py"
HEADLINE = "kvkeep/reporting/headline.py"
INPUTS = "kvkeep/reporting/inputs.py"
MANAGER = "kvkeep/transfer/manager.py"
SERVING = "kvkeep/reporting/serving.py"
SVG = "kvkeep/reporting/svg.py"
TIMELINE = "kvkeep/reporting/timeline.py"
TRACE = "kvkeep/telemetry/trace.py"

REPORT_TESTS = "tests/reporting/test_report.py::"
TRACE_TESTS = "tests/telemetry/test_trace.py::"
TRACING_TESTS = "tests/engine/test_tracing.py::"

BUGS: tuple[Bug, ...] = (
    Bug(
        "report-calls-a-limit-inside-the-interval-reached",
        HEADLINE,
        "if low < promise.limit < high:",
        "if False:",
        (REPORT_TESTS + "test_limit_inside_the_interval_is_neither_reached_nor_missed",),
    ),
    Bug(
        "report-judges-a-cost-as-a-gain",
        HEADLINE,
        "(value >= promise.limit) == promise.least or",
        "value >= promise.limit or",
        (REPORT_TESTS + "test_cost_above_its_limit_is_missed",),
    ),
    Bug(
        "report-reads-traces-of-any-version",
        INPUTS,
        "if not isinstance(made_by, str):",
        "if False:",
        (REPORT_TESTS + "test_file_of_another_version_or_cut_short_is_named_and_skipped",),
    ),
    Bug(
        "report-takes-words-of-a-file-for-markup",
        SVG,
        "{escape(words)}</text>",
        "{words}</text>",
        (REPORT_TESTS + "test_words_of_a_results_file_are_never_markup",),
    ),
    Bug(
        "report-puts-the-users-point-on-the-next-size",
        SERVING,
        "return share + (then - share) * ((size - low) / (high - low) if high > low else 0)",
        "return then",
        (REPORT_TESTS + "test_point_of_the_user_lies_on_the_measured_curve",),
    ),
    Bug(
        "report-draws-requests-over-each-other",
        TIMELINE,
        "if end <= span.begin), len(free))",
        "), len(free))",
        (REPORT_TESTS + "test_requests_that_overlap_have_lanes_of_their_own",),
    ),
    Bug(
        "trace-is-in-the-order-in-which-things-were-told",
        TRACE,
        "events.sort(key=lambda pair: pair[0])",
        "pass",
        (TRACE_TESTS + "test_trace_is_what_perfetto_opens_sorted_and_in_microseconds",),
    ),
    Bug(
        "trace-leaves-spans-open",
        TRACE,
        "            events.append((last, event))",
        "            pass",
        (TRACE_TESTS + "test_span_that_has_not_ended_is_cut_where_the_trace_ends",),
    ),
    Bug(
        "trace-ends-spans-whose-beginning-was-dropped",
        TRACE,
        "if (pid, cat, of, name) in self._open:",
        "if True:",
        (TRACE_TESTS + "test_recorder_keeps_so_many_events_and_says_how_many_it_dropped",),
    ),
    Bug(
        "trace-begins-requests-when-they-are-admitted",
        ENGINE,
        'f"request {request.number}", at_ns=request.submitted_ns)',
        'f"request {request.number}")',
        (TRACING_TESTS + "test_each_request_is_a_span_from_submission_to_its_end",),
        needs="torch",
    ),
    Bug(
        "trace-misses-copies-that-start-while-others-run",
        MANAGER,
        "if self.watch is not None:\n                    self.watch.started(job)",
        "if self.watch is not None and len(self._in_flight) == 1:\n                    self.watch.started(job)",
        (TRACING_TESTS + "test_every_copy_that_was_made_is_a_span",),
        needs="torch",
    ),
    Bug(
        "trace-counts-a-miss-once-for-each-stage",
        ENGINE,
        "if miss is None or miss is self._seen:",
        "if miss is None or miss is not self._seen and self._seen is not None:",
        (TRACING_TESTS + "test_tokens_of_a_prompt_are_found_or_have_a_cause",),
        needs="torch",
    ),
)
