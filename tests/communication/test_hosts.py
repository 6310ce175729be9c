"""Six ranks on three hosts: network namespaces with a link between each two."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.communication.hosts_worker import SIZES, numbers

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import network  # noqa: E402


@pytest.mark.long
@pytest.mark.skipif(network.missing() is not None, reason=str(network.missing()))
@pytest.mark.parametrize("ranks_of_hosts", [(2, 3, 1), (2, 2, 2)])
def test_collectives_of_six_ranks_on_three_hosts(tmp_path, ranks_of_hosts):
    with network.meshed_hosts(len(ranks_of_hosts)) as hosts:
        places = [h for h, ranks in zip(hosts, ranks_of_hosts, strict=True) for _ in range(ranks)]
        addresses = [host.address for host in places]
        module = "tests.communication.hosts_worker"
        workers = [
            subprocess.Popen(
                [*host.prefix, sys.executable, "-m", module, str(rank), str(tmp_path), *addresses],
                cwd=REPOSITORY,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, host in enumerate(places)
        ]
        try:
            errors = [worker.communicate(timeout=400)[1] for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
        assert [worker.returncode for worker in workers] == [0] * len(places), errors
        # Bytes of the ring did cross the links between hosts.
        crossed = [_sent_bytes(hosts[0], "to1"), _sent_bytes(hosts[1], "to2")]
    assert min(crossed) > 4 * SIZES[-1]
    num_ranks = len(places)
    for rank in range(num_ranks):
        results = np.load(tmp_path / f"result.{rank}.npz")
        for size in SIZES:
            own = [numbers(other, size) for other in range(num_ranks)]
            rows = [each[: size - size * r // 10] for r, each in enumerate(own)]
            expected = {
                "sum": np.sum(own, 0),
                "each": np.concatenate(own),
                "rows": np.concatenate(rows),
                "scattered": np.sum(own, 0) + num_ranks * rank,
            }
            for name, array in expected.items():
                np.testing.assert_array_equal(results[f"{name} {size}"], array, err_msg=name)


def _sent_bytes(host: network.Host, device: str) -> int:
    path = f"/sys/class/net/{device}/statistics/tx_bytes"
    return int(subprocess.check_output([*host.prefix, "cat", path]))
