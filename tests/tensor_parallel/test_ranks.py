"""Real processes that each trace their own part train as one device, and say what they cannot."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.multi_process.pool import (
    WorkerFailure,
    WorkerPool,
    cluster_environments,
    horovod_environments,
)
from tests.tensor_parallel.penalties import PENALISED

pytestmark = [pytest.mark.timeout(400), pytest.mark.turns]


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[[int, Callable], WorkerPool]]:
    """Ranks that stay up, by how many there are, and who has started them."""
    made: dict[tuple[int, Callable], WorkerPool] = {}

    def pool_of(count: int, of: Callable) -> WorkerPool:
        if (count, of) not in made:
            program = ["-m", "tests.tensor_parallel.rank_cases"]
            made[count, of] = WorkerPool(program, lambda: of(count))
        return made[count, of]

    yield pool_of
    for pool in made.values():
        pool.close()


@pytest.fixture
def ask(pools: Callable[[int, Callable], WorkerPool], tmp_path: Path) -> Callable[..., list[dict]]:
    """Has all ranks run a case; gives what each replied."""

    def ask(
        case: str, ranks: int = 2, of: Callable = cluster_environments, **options: object
    ) -> list[dict]:
        request = {"case": case, "folder": str(tmp_path), "options": options}
        return pools(ranks, of).ask(request, timeout_s=300)

    return ask


def test_two_ranks_train_a_transformer_save_and_predict_as_one_device(ask):
    replies = ask("a_transformer")
    assert [reply["stored"] for reply in replies] == [[[8, 8]], [[8, 7]]]
    assert [reply["slot"] for reply in replies] == [[[8, 8]], [[8, 7]]]
    assert all(reply["whole"] == [8, 15] for reply in replies)
    assert "rank=1 of 2" in replies[1]["shown"]


@pytest.mark.long
def test_three_ranks_find_a_layout_and_keep_sequences_in_parts(ask):
    replies = ask("a_transformer", ranks=3, layout="auto", sequence_parallel=True)
    assert [reply["stored"] for reply in replies] == [[[8, 5]]] * 3


def test_replicas_of_two_ranks_train_as_one_device(ask):
    replies = ask("replicas_of_ranks", ranks=4)
    assert [reply["stored"] for reply in replies] == [[[8, 8]], [[8, 7]]] * 2
    assert all(reply["replicas"] == 2 for reply in replies)
    assert "rank=3 of 4" in replies[3]["shown"] and "num_replicas=2" in replies[3]["shown"]


def test_a_loop_gathers_what_replicas_of_two_ranks_have(ask):
    """Eagerly and in a `tf.function`, outside of replicas and among them; also differentiated."""
    for rank, reply in enumerate(ask("gathers_of_replicas", ranks=4)):
        for said in (*reply["refused"]["shape"], *reply["refused"]["rank"]):
            assert "must have the same rank on all replicas, and the same shape but for" in said
        assert [len(said) for said in reply["refused"].values()] == [2, 2]
        # Of the losses of both replicas, of which the second counts twice.
        assert reply["gradient"] == 2 * [[0.0, 3.0] if rank < 2 else [6.0, 9.0]]


def test_a_pair_of_layers_exchanges_one_sum_forward_and_one_backward(ask):
    """Its wholes are traced, and nobody gathers what nobody reads."""
    for reply in ask("what_a_step_exchanges"):
        assert reply["train"] == {"sums": 2, "gathers": 0}
        assert reply["predict"] == {"sums": 1, "gathers": 0}


@pytest.mark.parametrize("model", PENALISED)
def test_a_loss_that_has_gradients_in_it_trains_as_on_one_device(ask, model):
    ask("gradients_of_gradients", model=model)


@pytest.mark.parametrize(
    ("case", "ranks", "options"),
    [
        ("a_transformer", 2, {}),
        ("a_norm_in_a_branch", 2, {"clips": "both"}),
        ("replicas_of_ranks", 4, {}),
        ("gathers_of_replicas", 4, {}),
    ],
)
@pytest.mark.long
def test_ranks_of_horovod_train_as_one_device(ask, case, ranks, options):
    pytest.importorskip("horovod.tensorflow")
    ask(case, ranks, horovod_environments, **options)


def test_horovod_exchanges_what_something_reads(ask):
    pytest.importorskip("horovod.tensorflow")
    first, _ = ask("what_horovod_exchanges_in_a_step", of=horovod_environments)
    assert first == {"ALLREDUCE": 2, "ALLGATHER": 0}


def test_a_rank_of_horovod_whose_weight_goes_wrong_is_named(ask):
    pytest.importorskip("horovod.tensorflow")
    for reply in ask("a_weight_goes_wrong", of=horovod_environments, wrong=1, what="whole"):
        assert "different weights in ranks [0] and ranks [1] from one another" in reply["told"]


@pytest.mark.long
def test_other_layers_and_optimizers_train_as_one_device(ask):
    ask("layers_and_optimizers")


@pytest.mark.parametrize(
    "clips",
    [
        "both",
        pytest.param("at the end of an accumulation", marks=pytest.mark.long),
        pytest.param("each at the end of an accumulation", marks=pytest.mark.long),
        pytest.param("where all is finite", marks=pytest.mark.long),
        pytest.param("whole where all is finite", marks=pytest.mark.long),
    ],
)
def test_a_norm_clips_in_a_branch_as_on_one_device(ask, clips):
    assert ask("a_norm_in_a_branch", clips=clips) == [{"finite": True}] * 2


@pytest.mark.parametrize("name", ["clips", pytest.param("whole", marks=pytest.mark.long)])
def test_an_optimizer_in_a_branch_of_a_train_step_updates_as_on_one_device(ask, name):
    assert ask("an_optimizer_in_a_branch", name=name) == [{}] * 2


def test_a_training_goes_on_from_a_backup(ask):
    assert [reply["begun"] for reply in ask("goes_on_from_a_backup")] == [[0, 1, 1]] * 2


def test_what_ranks_cannot_do_is_refused_on_all_of_them(ask):
    for said in ask("refusals"):
        assert "NotImplementedError" in said["function"]
        assert "in a loop, in a tf.function, or" in said["function"]
        assert "read a variable in parts as it is before. Received: assign" in said["assigns"]
        assert "jit_compile=False" in said["jit"]
        for rule in ("rule", "rule in a branch"):
            assert "scale' that another rank stores" in said[rule], said[rule]
        assert "layout='branches'" in said["branches"]
        assert "check_weights_every is a number of steps. Received: 0" in said["steps"]
        assert "Received: layout={'.*up': 0, '.*down': 1}" in said["dict"]
        assert "Received: memory, layout='auto'" in said["memory"]
        assert "a mesh of shape (1, 2), or of several replicas of two or more" in said["mesh"]
        assert (
            "must be one of ('ring', 'horovod'), or None. Received: 'pigeons'" in said["transport"]
        )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"what": "whole"}, "different weights in ranks [0] and ranks [1] from one another"),
        ({"what": "whole", "eagerly": True}, "ranks [0] and ranks [1] from one another"),
        ({"what": "whole", "replicas": 2}, "other weights in rank 1, in step 4"),
        ({"what": "part", "replicas": 2}, "different weights in ranks [1] and ranks [3] from one"),
    ],
    ids=str,
)
def test_a_rank_whose_weight_goes_wrong_is_named_by_all(ask, options, named):
    """After step 3, where every second is compared; a part has a copy in another replica only."""
    for reply in ask("a_weight_goes_wrong", 2 * options.get("replicas", 1), wrong=1, **options):
        assert "WeightsDifferError: Expected all ranks to hold the same weights" in reply["told"]
        assert named in reply["told"]
        assert reply["done"] == [1, 2, 3]


def test_a_part_that_only_one_rank_holds_has_nothing_to_be_compared_with(ask):
    for reply in ask("a_weight_goes_wrong", wrong=1, what="part"):
        assert reply == {"told": "", "done": list(range(1, 9))}


def test_ranks_of_different_layouts_are_told_so(ask):
    with pytest.raises(WorkerFailure) as failure:
        ask("different_layouts")
    for rank in (0, 1):
        assert f"(Rank {rank} is speaking.)" in str(failure.value)
    assert "All ranks must trace the same step, of the same model and layout" in str(failure.value)


def test_a_rank_that_is_killed_is_named(ask):
    with pytest.raises(WorkerFailure) as failure:
        ask("a_rank_is_killed")
    of_first = str(failure.value).partition("worker 0:")[2]
    assert "rank 1" in of_first
