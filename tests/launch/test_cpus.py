import pytest

from tfparallel.launch.cpus import share_cpus


def machine(folder, places):
    """The kernel's folder about CPUs: `places` holds (socket, core) of each."""
    for cpu, (socket, core) in enumerate(places):
        topology = folder / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{socket}\n")
        (topology / "core_id").write_text(f"{core}\n")
    return folder


def test_both_threads_of_a_core_go_to_one_process(tmp_path):
    # As Linux numbers them: first threads of all cores, then second threads.
    topology = machine(tmp_path, [(0, 0), (0, 1), (0, 2), (0, 3)] * 2)
    assert share_cpus(range(8), 2, topology) == [[0, 4, 1, 5], [2, 6, 3, 7]]


def test_a_process_stays_within_a_socket(tmp_path):
    # Even CPUs on one socket, odd ones on the other.
    topology = machine(tmp_path, [(cpu % 2, cpu // 2) for cpu in range(8)])
    assert share_cpus(range(8), 2, topology) == [[0, 2, 4, 6], [1, 3, 5, 7]]


@pytest.mark.parametrize("num_cpus, num_processes, sizes", [
    (4, 2, [2, 2]), (5, 2, [2, 3]), (7, 3, [2, 2, 3]), (3, 3, [1, 1, 1]), (4, 1, [4]),
])  # fmt: skip
def test_every_cpu_is_used_once(num_cpus, num_processes, sizes, tmp_path):
    shares = share_cpus(range(10, 10 + num_cpus), num_processes, tmp_path / "tells nothing")
    assert [len(share) for share in shares] == sizes
    assert [cpu for share in shares for cpu in share] == list(range(10, 10 + num_cpus))


def test_refuses_more_processes_than_cpus(tmp_path):
    with pytest.raises(ValueError, match="a CPU for each process. Received: 3 processes, 2 CPUs"):
        share_cpus([0, 1], 3, tmp_path)
