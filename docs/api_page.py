"""Writes `docs/api.md` from the public names: `__all__` of the package and of its namespaces.

python docs/api_page.py
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import tfparallel

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "api.md"
_BEFORE = """\
# API reference

Made from the docstrings, and from the public names by `python docs/api_page.py`.
"""
_NAMESPACES = ("callbacks", "compression", "keras_distribution", "launch", "tensor_parallel")


class Section(NamedTuple):
    """A part of the page.

    Attributes:
        title, text: its heading, and what stands under it.
        modules: beginnings of the modules whose public names it has.
        namespaces: whose `__all__` it has, too.
        others: paths that are no name of a namespace and are shown all the same.
    """

    title: str
    text: str
    modules: tuple[str, ...] = ()
    namespaces: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


_SECTIONS = (
    Section(
        "Strategies",
        "All but `TPUStrategy` have [`check`](check.md).",
        ("strategies.",),
        others=(
            "tfparallel.replicas.base.KerasStrategy.check",
            "tfparallel.replicas.checking.report.StepCheck",
            "tfparallel.replicas.checking.report.Difference",
        ),
    ),
    Section(
        "Options of strategies",
        "What several arguments together say, and limits of waiting.",
        (
            "pipeline.pipeline_options",
            "pipeline.plans.",
            "segments.memory_policy",
            "sharded.options",
            "coordination.timeouts",
        ),
        ("tensor_parallel", "keras_distribution"),
    ),
    Section(
        "Losses",
        "[Losses that couple rows](coupled_losses.md).",
        ("replicas.loss_kinds", "replicas.row_chunks"),
    ),
    Section(
        "Pretrained weights",
        "[Read tensor by tensor](pretrained.md), into shards too.",
        ("replicas.pretrained",),
    ),
    Section(
        "Callbacks",
        "[Backup and restore](backup.md) and [where the time goes](measure.md).",
        namespaces=("callbacks",),
        others=("tfparallel.measure.record.Record",),
    ),
    Section("Compression", "[Compressing gradients](compression.md).", namespaces=("compression",)),
    Section(
        "Starting jobs",
        "[Starting several workers](launch.md), [notebooks](notebooks.md), "
        "[elastic jobs](strategies/horovod.md#elastic-jobs).",
        ("elastic", "coordination.cluster"),
        ("launch",),
        (
            "tfparallel.parameter_server.CheckpointsForEvaluator",
            "tfparallel.parameter_server.evaluate_checkpoints",
            "tfparallel.parameter_server.is_evaluator",
        ),
    ),
    Section(
        "What strategies share",
        "Methods not listed here are those of [`tf.distribute.Strategy`]"
        "(https://www.tensorflow.org/api_docs/python/tf/distribute/Strategy).",
        others=("tfparallel.replicas.base.KerasStrategy",),
    ),
    Section(
        "Errors",
        "What a job of several processes raises. Each message says who speaks, and of whom.",
        (
            "callbacks.backup.storage",
            "communication.neighbours",
            "coordination.agreement",
            "coordination.lost_ranks",
            "coordination.patience",
            "coordination.port",
            "parameter_server.recovery",
            "pipeline.remote_stages",
            "replicas.weights_check",
        ),
    ),
)
# Of these classes the methods named are shown, of the others none but where listed in _WITH_ALL.
_MEMBERS = {
    "MultiWorkerMirroredStrategy": "[cluster_resolver]",
    "HorovodStrategy": "[rank, world_size, compression_report]",
    "ElasticJob": "[callback]",
    "ParameterServerStrategy": "[cluster_resolver]",
    "HybridStrategy": "[stages, summary, profile]",
    "PipelineStrategy": "[schedule, stages, stage, summary, profile]",
    "TensorParallelStrategy": "[summary]",
    "GradientCompression": "[reduce, report, set_state]",
}
_WITH_ALL = {
    "ClusterConfig",
    "CompressionReport",
    "Compressor",
    "Difference",
    "Group",
    "KerasStrategy",
    "Record",
    "Schedule",
    "ShardedStrategy",
    "Transport",
    "VariableReport",
}


def _names_of(section: Section) -> Iterator[str]:
    for name, module in tfparallel._MODULES.items():
        if module.removeprefix("tfparallel.").startswith(section.modules or ("-",)):
            yield f"tfparallel.{name}"
    for namespace in section.namespaces:
        for name in _all_of(namespace):
            if name not in tfparallel.__all__:
                yield f"tfparallel.{namespace}.{name}"
    yield from section.others


def _all_of(namespace: str) -> list[str]:
    """`__all__` of a namespace, read and not imported: some need TensorFlow."""
    folder = ROOT / "tfparallel" / namespace
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return ast.literal_eval(node.value)
    raise ValueError(f"Expected __all__ in {file}. Received: none.")


def _entry(path: str) -> str:
    name = path.rpartition(".")[2]
    is_class = name[0].isupper() and name not in _WITH_ALL
    members = _MEMBERS.get(name, "false") if is_class else None
    options = f"    options:\n      members: {members}\n" if members else ""
    return f"\n::: {path}\n{options}"


def page() -> str:
    """The text of `docs/api.md`.

    Raises:
        ValueError: for a public name that no section has.
    """
    parts = [_BEFORE]
    shown: list[str] = []
    for section in _SECTIONS:
        names = list(_names_of(section))
        shown += names
        parts += [f"\n## {section.title}\n\n{section.text}\n", *map(_entry, names)]
    missing = {f"tfparallel.{name}" for name in tfparallel._MODULES} - set(shown)
    if missing or len(set(shown)) != len(shown):
        raise ValueError(f"Expected each public name in one section. Received: {missing or shown}.")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
