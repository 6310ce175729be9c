"""Two real workers whose gradients are compressed."""

import functools

import numpy as np
import pytest

from tests.communication.compression.worker import COMPRESSIONS
from tests.multi_process.pool import WorkerPool, cluster_environments

pytestmark = pytest.mark.turns


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    folder = {"COMPRESSION_FOLDER": str(tmp_path_factory.mktemp("compression"))}
    pool = WorkerPool(
        ["-m", "tests.communication.compression.worker"],
        lambda: [{**environment, **folder} for environment in cluster_environments(2)],
    )
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def uncompressed(workers):
    return workers.ask({"compression": "none"})[0]


def trained(workers, **request):
    """What rank 0 replies, after both are found to have trained alike."""
    first, second = workers.ask(request)
    for key in ("history", "weights", "shared", "iterations", "scale"):
        assert first[key] == second[key], key
    if first["residuals"] and np.any(first["residuals"][0]):  # Adaptive may send all as it is
        assert first["residuals"] != second["residuals"]
    pairs = zip(first["residuals"], second["residuals"], strict=True)
    return first | {"all residuals": [np.add(a, b) for a, b in pairs]}


@pytest.mark.parametrize(
    ("compression", "distance"),
    [
        ("fp16", 1e-3),
        ("bf16", 1e-2),
        ("power_sgd", 0.1),
        ("top_k", 0.3),
        ("random_k", 0.3),
        ("qsgd", 1e-2),
        ("adaptive", 0.1),
    ],
)
def test_workers_train_alike_and_close_to_uncompressed(
    workers, uncompressed, compression, distance
):
    result = trained(workers, compression=compression)
    assert abs(result["history"][-1] - uncompressed["history"][-1]) < distance
    assert result["history"][-1] < result["history"][0]
    if compression != "adaptive":  # which may well send everything as it is
        assert result["weights"] != uncompressed["weights"]
    expected = repr(COMPRESSIONS[compression]()) if compression not in ("fp16", "bf16") else "Cast"
    assert expected.strip("'").lower()[:4] in result["reports"][0].lower()


def test_a_checkpoint_of_the_optimizer_holds_the_state(workers):
    result = trained(workers, compression="power_sgd")
    assert any(name.endswith("residual/.ATTRIBUTES/VARIABLE_VALUE") for name in result["saved"])
    assert any(name.endswith("q/.ATTRIBUTES/VARIABLE_VALUE") for name in result["saved"])


@pytest.mark.parametrize("compression", ["power_sgd", "adaptive"])
def test_in_the_loop_of_steps_per_execution(workers, compression):
    separate = trained(workers, compression=compression)
    together = trained(workers, compression=compression, steps_per_execution=2)
    if compression != "adaptive":  # whose decisions depend on times
        for a, b in zip(separate["weights"], together["weights"], strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_gradients_are_accumulated_after_they_are_summed(workers):
    result = trained(workers, compression="power_sgd", accumulate=2)
    assert result["iterations"] == 12 // 2
    assert result["history"][-1] < result["history"][0]


def test_sparse_gradients_are_sent_as_they_are(workers):
    result = trained(workers, compression="power_sgd", table=True)
    assert result["history"][-1] < result["history"][0]


@pytest.mark.parametrize("compression", ["power_sgd", "top_k", "fp16", "adaptive"])
def test_an_overflow_on_one_worker_skips_the_step_on_all(workers, compression):
    """Once an epoch: the loss scale is halved three times, and nothing becomes NaN."""
    result = trained(workers, compression=compression, wrap="overflow")
    assert result["scale"] == 1024.0 / 8
    assert result["iterations"] == 12 - 3
    for values in [*result["weights"], *result["residuals"]]:
        assert np.all(np.isfinite(values))


def test_the_loss_scale_does_not_matter(workers):
    plain = trained(workers, compression="power_sgd")
    scaled = trained(workers, compression="power_sgd", wrap="scale")
    for a, b in zip(plain["weights"], scaled["weights"], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


MESHES = {
    "shard x pipeline": {"sizes": {"shard": 2, "pipeline": 2}},
    "data x pipeline": {"sizes": {"data": 2, "pipeline": 2}},
    "pipeline x model": {"sizes": {"pipeline": 2, "model": 2}},
    "data x model": {"sizes": {"data": 2, "model": 2}},
    "shard x model": {"sizes": {"shard": 2, "model": 2}},
    "data x shard": {"sizes": {"data": 2, "shard": 2}},
    "shard, ZeRO 1": {"sizes": {"shard": 2}, "what": "optimizer"},
    "shard, ZeRO 2": {"sizes": {"shard": 2}, "what": "gradients"},
}
BY_DEFAULT = ("shard x pipeline", "overflow")


@pytest.fixture(scope="module")
def of_one_device(workers):
    """What workers of one device each give, asked once."""

    @functools.cache
    def ask(**options):
        return trained(workers, **options, batch_size=12)

    return ask


@pytest.mark.parametrize(
    ("mesh", "compression", "wrap"),
    [
        pytest.param(mesh, *rest, marks=[] if (mesh, rest[1]) == BY_DEFAULT else pytest.mark.long)
        for mesh in MESHES
        for rest in [("power_sgd", "overflow"), ("fp16", "")]
    ],
)
def test_a_mesh_in_each_worker_sends_what_one_device_would(
    workers, of_one_device, mesh, compression, wrap
):
    """Whatever a process has in parts, compressors see whole gradients.

    Which worker has which rows differs: PowerSGD is linear in the sum, a half rounds a little.
    """
    options = {"compression": compression, "wrap": wrap}
    alone = of_one_device(**options)
    on_mesh = trained(workers, **options, batch_size=12, mesh=MESHES[mesh])
    atol = 5e-4 if compression == "fp16" else 2e-5  # a half may round to its neighbour
    for key, factor in (("weights", 1), ("shared", 1), ("all residuals", alone["scale"] or 1)):
        for a, b in zip(alone[key], on_mesh[key], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=atol * factor, err_msg=key)


@pytest.mark.long
@pytest.mark.parametrize(
    "mesh", ["data x pipeline", "shard x pipeline", "data x model", "data x shard"]
)
def test_meshes_in_workers_train_alike_with_compression_that_decides(workers, uncompressed, mesh):
    result = trained(workers, compression="adaptive", mesh=MESHES[mesh])
    assert abs(result["history"][-1] - uncompressed["history"][-1]) < 0.1
    assert result["history"][-1] < result["history"][0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"data": 2, "shard": 2, "pipeline": 2}, {}),
        ({"data": 4, "pipeline": 2}, {}),
        ({"data": 2, "pipeline": 2, "model": 2}, {}),
        ({"data": 8}, {}),
        ({"data": 2, "shard": 4}, {"what": "gradients", "transport": "collectives"}),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("compression", "wrap"), [("power_sgd", "overflow"), ("fp16", ""), ("top_k", "")]
)
def test_a_mesh_over_workers_sends_what_one_with_such_an_inner_does(
    workers, sizes, options, compression, wrap
):
    """To the bit: of the mesh each worker has what would be its `inner`."""
    asked = {"compression": compression, "wrap": wrap, "batch_size": 12}
    of_worker = {**sizes, "data": sizes["data"] // 2}
    inside = {"sizes": of_worker, **{k: v for k, v in options.items() if k == "what"}}
    expected = trained(workers, **asked, mesh=inside)
    received = trained(workers, **asked, over={"sizes": sizes, **options})
    for key in ("history", "weights", "shared", "residuals", "scale", "reports"):
        assert received[key] == expected[key], key


def test_a_level_that_sends_once_waits_once(workers):
    """Exact gradients go in one collective a step, factors of a rank in two."""
    exact, factors = workers.ask({"compression": "adaptive", "levels": [0, 2]})[0]["collectives"]
    num_steps = 3 * 4
    assert factors - exact == num_steps
