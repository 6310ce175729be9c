import threading

import pytest

from tfparallel.coordination.writer import Writer, writer_for


def test_runs_beside_the_caller_and_one_at_a_time():
    writer, gate, order = Writer(), threading.Event(), []

    def first():
        gate.wait(10)
        order.append("first")

    writer.submit(first)
    assert order == []  # submit did not wait for it
    threading.Timer(0.05, gate.set).start()
    writer.submit(lambda: order.append("second"))  # but this one does
    assert order[0] == "first"
    writer.wait()
    assert order == ["first", "second"]


def test_an_error_is_raised_once_and_later():
    writer = Writer()

    def fail():
        raise OSError("disk full")

    writer.submit(fail)
    with pytest.raises(OSError, match="disk full"):
        writer.wait()
    writer.raise_error()


def test_a_job_runs_though_the_one_before_it_failed():
    writer, done = Writer(), []
    writer.submit(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        writer.submit(lambda: done.append(True))
    writer.wait()
    assert done


def test_a_folder_has_one_writer(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    assert writer_for(tmp_path) is writer_for(str(tmp_path / "link"))
