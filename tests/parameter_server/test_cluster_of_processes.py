"""Real workers and parameter servers: exact counters, and what is left when processes die."""

import pytest

pytestmark = pytest.mark.turns

EACH_ONCE = [1.0]


def test_counters_are_exact_every_example_is_used_once_and_staleness_is_bounded(run_case):
    result = run_case("counters_and_staleness")
    for iterations, loss_count, seen in result["results"]:
        assert iterations and loss_count, result["results"]
        assert seen == EACH_ONCE
    assert result["kinds"] == ["ArrayRows", "Numbered", "ReadByChief"]
    assert all(count > 0 for count in result["steps_of_worker"])
    assert min(result["loads"]) > 0

    drawn = result["drawn"]
    drawn_from = [tuple(source) for source in drawn["from"]]
    assert len(set(drawn_from)) == len(drawn_from) == drawn["count"]  # no mask twice
    assert len({worker for worker, _ in drawn_from}) > 1
    assert drawn["moved"] == pytest.approx(drawn["rates"], rel=1e-5)
    assert drawn["next_rate"][0] == pytest.approx(drawn["next_rate"][1], rel=1e-5)

    largest = result["largest"]
    assert largest["0"] == 0
    assert largest["1"] == 1
    assert largest["None"] >= 1
    # Two at once crash in TensorFlow, rarely: "Unable to parse request".
    assert result["calls"].keys() >= {"ps 0", "worker 0", "worker 1", "worker 2"}
    assert result["at_once"] == []


def test_a_step_of_each_asynchronous_worker_is_drawn_on_one_clock(run_case):
    """All workers compute, the server updates after the first of them has."""
    result = run_case("steps_are_drawn")
    assert result["is_as_before"]
    assert "Enqueue" not in result["labels"]  # the call, which waits for what it sends
    spans = {(lane, kind): [] for lane, kind, _, _ in result["boxes"]}
    for lane, kind, start, end in result["boxes"]:
        spans[lane, kind].append((start, end))
        assert 0 <= start <= end <= result["seconds"]
    computed = [spans[f"worker {worker} CPU:0", "compute"] for worker in range(2)]
    updated = spans["ps 0 CPU:0", "update"]
    assert min(start for start, _ in updated) > min(start for own in computed for start, _ in own)
    assert {lane for lane, kind in spans if kind == "update"} == {"ps 0 CPU:0"}


def test_training_goes_on_without_a_worker_and_nothing_counts_twice(run_case):
    result = run_case("worker_is_lost")
    for name in ("killed", "stopped"):
        first, then = result[name]["first"], result[name]["then"]
        for part in (first, then):
            assert part["iterations"] == part["expected"]
            assert part["seen"] == EACH_ONCE
        assert then["steps_of_worker"][1] > first["steps_of_worker"][1], "It never came back."
    assert "is lost" in result["log"] and "to finish step" in result["log"]
    assert "within 4 s" in result["log"]
    assert "worker 1 (127.0.0.1:" in result["log"]


def test_workers_stopped_in_the_first_epoch_are_named_and_hold_up_nobody(run_case):
    result = run_case("worker_is_stopped_in_the_first_epoch")
    assert result["iterations"] == result["expected"]
    assert result["seen"] == EACH_ONCE
    for worker in (1, 2):
        assert f"worker {worker} ({result['workers'][worker]}) is lost" in result["log"]


@pytest.mark.parametrize("name", ["all_workers_die", "all_workers_are_stopped"])
def test_chief_gives_up_when_all_workers_are_gone_and_names_them(run_case, name):
    result = run_case(name)
    for worker, address in enumerate(result["workers"]):
        assert f"worker {worker} ({address})" in result["error"]
    assert "to come back within 3 s" in result["error"]


@pytest.mark.parametrize("name", ["server_dies", "server_is_stopped"])
def test_chief_ends_with_an_error_that_names_the_lost_server(run_case, name):
    result = run_case(name)
    assert f"ps 1 ({result['ps'][1]})" in result["error"]
    assert "backup callback" in result["error"]
    assert result["status"] == 0  # the chief's process ends


def test_sync_training_waits_for_lost_workers_and_applies_each_step_once(run_case):
    """Killed, killed in the middle of a step, and stopped."""
    result = run_case("worker_is_lost_in_sync")
    assert result["lost"] == ["_kill_now", "_kill_soon", "_stop", "_kill_now"]
    assert result["log"].count("chief waits for worker 1") >= 2
    assert result["log"].count("chief waits for worker 0") >= 1
    assert result["repeated"] >= 3
    assert result["remembered"] == 0  # nothing, arrays among it, is kept when `fit` has ended
    assert result["iterations"] == [145, 145]
    assert result["weights"] < 1e-5
    assert result["history"] < 1e-5
    assert result["error"].startswith("WorkerLost: "), result["error"]  # lost for good
    assert f"worker 1 ({result['address']})" in result["error"]

    # Workers have the rows already, each only its own of arrays in order; or the chief sends them.
    sent = result["sent"]
    assert max(sent["in order"], sent["shuffled"], sent["dataset"]) < 0.2, sent
    assert sent["chief"] > 0.8, sent
    assert sent["kept"] == 0


@pytest.mark.parametrize(
    ("name", "error", "task"),
    [
        ("server_dies_in_sync", "ServerLost", "ps 1"),
        ("server_is_stopped_in_sync", "ServerLost", "ps 1"),
    ],
)
def test_sync_training_ends_with_an_error_that_names_the_lost_task(run_case, name, error, task):
    result = run_case(name)
    assert result["error"].startswith(f"{error}: "), result["error"]
    assert f"{task} ({result['address']})" in result["error"]
    assert "backup callback" in result["error"]
    assert result["status"] == 0  # the chief's process ends


def test_a_mistake_of_the_user_is_reported_as_it_is(run_case):
    whole, in_parts = run_case("mistake_in_a_step")["results"]
    assert "99 is not in [0, 5)" in whole["error"]
    assert "Expected indices in [0, 5). Received others:" in in_parts["error"]
    assert "99" in in_parts["error"]
    assert (whole["parts"], in_parts["parts"]) == (1, 2)
    for each in (whole, in_parts):
        assert each["iterations"] >= 10
        assert "run_eagerly=True" in each["refused"]
        # Rows are gathered where the table is: it is not read as a whole, nor is a part of it.
        assert [shape for shape in each["read"] if len(shape) == 2] == []
        assert [shape for shape in each["read_by_lookup"] if len(shape) == 2] == []
        assert [value != 0 for value in each["trained"]] == [False, False, False, True, False]


@pytest.mark.long
def test_async_training_is_as_good_as_one_device(run_case):
    """1,000 digits within 2 percent; a table in parts: AUC within 0.01 and loss within 0.02."""
    result = run_case("converges")
    assert result["mnist"]["one_device"] > 0.85
    assert result["mnist"]["async"] == pytest.approx(result["mnist"]["one_device"], abs=0.02)
    assert len(result["clicks"]) == 3  # seeds
    for of_seed in result["clicks"]:
        (loss, auc), (async_loss, async_auc) = of_seed["one_device"], of_seed["async"]
        assert auc > 0.9, result
        assert async_auc > auc - 0.01, result
        assert async_loss < loss + 0.02, result


@pytest.mark.long
def test_activations_are_computed_again_on_workers(run_case):
    for mode, results in run_case("memory_policy")["results"].items():
        assert results["none"]["again"] == 0, mode
        for said in ("policy", "scope"):
            assert results[said]["again"] > 0, (mode, said)
            assert results[said]["apart"] <= 5e-7, (mode, said)


def test_a_step_that_reads_what_it_has_updated_is_told_that_it_reads_the_value_of_before(run_case):
    """A teacher that follows the updated student was a step behind, without a word."""
    result = run_case("reads_what_it_has_updated")
    assert max(result["differences"]) < 1e-6
    alone, follows_first, follows_last = result["told"]
    assert not alone and not follows_first
    assert len(set(follows_last)) == 1
    assert "optimizer 'own_sgd' was applied to it" in follows_last[0]
