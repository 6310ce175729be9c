import pytest

from tfparallel.launch.failure import describe_end, exit_status, failure_report, last_traceback

HEADER = b"Traceback (most recent call last):"
CAUSE = b"The above exception was the direct cause of the following exception:"
CONTEXT = b"During handling of the above exception, another exception occurred:"


@pytest.mark.parametrize(
    "returncode, status, words",
    [
        (0, 0, "exit status 0"),
        (137, 137, "exit status 137"),
        (-9, 137, "killed by SIGKILL (exit status 137)"),
        (-15, 143, "killed by SIGTERM (exit status 143)"),
        (-40, 168, "killed by signal 40 (exit status 168)"),
    ],
)
def test_says_how_a_process_ended(returncode, status, words):
    assert (exit_status(returncode), describe_end(returncode)) == (status, words)


@pytest.mark.parametrize(
    "lines, expected",
    [
        ([], []),
        ([b"a", b"b"], [b"a", b"b"]),
        ([b"%d" % i for i in range(100)], [b"%d" % i for i in range(70, 100)]),
        ([b"log", HEADER, b"  File", b"E: 1"], [HEADER, b"  File", b"E: 1"]),
        # An earlier exception that was caught and printed is not part of the last one.
        ([HEADER, b"E: 1", b"going on", HEADER, b"E: 2"], [HEADER, b"E: 2"]),
        # Parts of one chain belong together.
        (
            [b"log", HEADER, b"E: 1", b"", CAUSE, b"", HEADER, b"E: 2", b"", CONTEXT, b"", HEADER],
            [HEADER, b"E: 1", b"", CAUSE, b"", HEADER, b"E: 2", b"", CONTEXT, b"", HEADER],
        ),
        # So do an exception group and its members.
        (
            [b"log", b"  + Exception Group " + HEADER, b"  |   File", b"  +-+----- 1 -----",
             b"    | " + HEADER, b"    | E: 1", b"    +----- 2 -----", b"    | " + HEADER],
            [b"  + Exception Group " + HEADER, b"  |   File", b"  +-+----- 1 -----",
             b"    | " + HEADER, b"    | E: 1", b"    +----- 2 -----", b"    | " + HEADER],
        ),
    ],
)  # fmt: skip
def test_finds_the_last_traceback(lines, expected):
    assert list(last_traceback(lines)) == expected


def test_report_names_the_worker_and_its_end():
    report = failure_report("worker 3", 1, [b"log", HEADER, b"E: 1"]).decode()
    assert report == (
        "======== worker 3 failed first: exit status 1 ========\n"
        "Traceback (most recent call last):\nE: 1\n"
    )


def test_report_says_when_there_was_no_error_output():
    assert failure_report("worker 0", 2, []).endswith(b"\n(no error output)\n")


def test_report_on_sigkill_names_the_likely_cause():
    assert b"out of memory" in failure_report("worker 0", -9, [])
