"""All looks at a machine, in the order in which they are told."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from tfparallel.coordination.cluster import ClusterConfigError, read_tf_config
from tfparallel.machine.disks import check_folder, check_open_files
from tfparallel.machine.finding import Finding
from tfparallel.machine.gpus import check_gpus
from tfparallel.machine.link import check_links
from tfparallel.machine.network import check_congestion_control, check_tf_config
from tfparallel.machine.packages import (
    check_clashes,
    check_import,
    check_requirements,
    check_versions,
    installed,
)
from tfparallel.machine.processors import check_cores, check_load, check_memory, check_threads


def examine(
    environ: Mapping[str, str] = os.environ,
    *,
    folder: Path | None = None,
    link_s: float = 0.0,
    imports: bool = True,
) -> Iterator[Finding]:
    """Everything that can be wrong with a machine before a job runs on it.

    Args:
        environ: of the job.
        folder: that the job writes to, if it shall be looked at.
        link_s: how long to wait for the doctors of the other hosts; 0 asks them nothing.
        imports: whether TensorFlow is imported, in a process of its own.
    """
    versions = installed()
    yield from check_clashes(versions)
    yield from check_versions(versions)
    yield from check_requirements(versions)
    if imports:
        yield from check_import()
    yield from check_gpus(versions, environ)
    yield from check_cores()
    yield from check_threads(environ)
    yield from check_memory()
    yield from check_load()
    yield from check_open_files()
    yield from check_congestion_control()
    yield from check_tf_config(environ)
    if folder is not None:
        yield from check_folder(folder, is_shared=_num_hosts(environ) > 1)
    if link_s:
        yield from _links(environ, folder, link_s)


def _num_hosts(environ: Mapping[str, str]) -> int:
    try:
        config = read_tf_config(environ)
    except ClusterConfigError:
        return 1
    addresses = [] if config is None else [a for tasks in config.cluster.values() for a in tasks]
    return len({address.rpartition(":")[0] for address in addresses})


def _links(environ: Mapping[str, str], folder: Path | None, limit_s: float) -> Iterator[Finding]:
    try:
        config = read_tf_config(environ)
    except ClusterConfigError:
        return  # told by `check_tf_config`
    if config is None or config.address is None:
        yield Finding("link", "problem", "no TF_CONFIG names other hosts", "set TF_CONFIG")
        return
    others = [a for tasks in config.cluster.values() for a in tasks if a != config.address]
    try:
        yield from check_links(config.address, others, folder, limit_s)
    except OSError as error:
        yield Finding("link", "problem", f"{config.address}: {error.strerror}", "see port, address")
