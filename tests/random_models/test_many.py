"""What a log of many random models says of those whose process was killed."""

from tests.random_models.many import KILLED, STARTED, ended, tell

DONE, KILLED_ONCE, KILLED_TWICE = ("local", "3", "0"), ("hybrid", "3", "1"), ("worker", "3", "0")


def test_a_model_killed_with_its_process_is_not_done(tmp_path):
    log = tmp_path / "models.log"
    for name, what in [(DONE, STARTED), (DONE, "same 9.1 s Mirrored"), (KILLED_ONCE, STARTED)]:
        tell(log, name, what)

    assert ended(log) == {DONE}
    assert log.read_text().splitlines()[-1] == f"hybrid 3 1 {KILLED}"


def test_a_model_killed_twice_is_not_tried_again(tmp_path):
    log = tmp_path / "models.log"
    for _ in range(2):
        assert ended(log) == set()
        tell(log, KILLED_TWICE, STARTED)

    assert ended(log) == {KILLED_TWICE}
    assert [line.split()[-1] for line in log.read_text().splitlines()].count(KILLED) == 2
    assert ended(log) == {KILLED_TWICE}


def test_a_model_killed_once_is_done_once_it_ends(tmp_path):
    log = tmp_path / "models.log"
    for what in (STARTED, KILLED, STARTED, "same 9.1 s Mirrored"):
        tell(log, KILLED_ONCE, what)

    assert ended(log) == {KILLED_ONCE}
