"""A model whose parts run on their stages while one step is traced.

The instances of the model, and of models in it, are shadowed, and only for that time. A functional
graph runs its nodes stage by stage, a subclassed model its layers one by one; a nested model whose
parts are all on one stage runs as one. Whatever else a nested model does when it is called (masks,
`training`, a `call` in Python) Keras does as ever.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import keras

from tfparallel.internals.hooks import shadowed, wrapped
from tfparallel.internals.keras_layers import functional_graph
from tfparallel.pipeline.deferred_batch_norm import DeferredBatchNorm
from tfparallel.pipeline.executors import Executors
from tfparallel.pipeline.flat_tensors import TENSORS
from tfparallel.pipeline.places import Places
from tfparallel.pipeline.rematerialization import Rematerialization
from tfparallel.pipeline.stage_calls import StageCalls
from tfparallel.pipeline.staged_graph import StagedGraph
from tfparallel.pipeline.staged_losses import staged_losses
from tfparallel.pipeline.stages import Stages
from tfparallel.replicas.row_seeds import RowSeeds
from tfparallel.replicas.state_changes import StateChanges


@contextlib.contextmanager
def staged(
    model: keras.Model,
    stages: Stages,
    executor: Executors,
    current_microbatch: Callable,
    deferred: DeferredBatchNorm,
    changes: StateChanges,
    rematerialization: Rematerialization,
    row_seeds: RowSeeds | None = None,
) -> Iterator[None]:
    """Within it, `model` computes through `executor`.

    Args:
        stages: of `model`.
        executor: of the step that is being traced.
        current_microbatch: gives the calling thread's microbatch, or None outside of microbatches.
        deferred: layers whose moving averages are assigned when all microbatches have passed.
        changes: what other layers assign.
        rematerialization: the executor's; is told which layer is being traced.
        row_seeds: where layers draw random numbers by row.
    """
    places = Places(stages)
    calls = StageCalls(
        executor, current_microbatch, deferred, changes, rematerialization, row_seeds
    )

    def call_on_last(name: object, function: Callable, arguments: tuple) -> object:
        options = {"is_shared": False, "is_result": True}
        return _call_nest(calls, calls.last_stage, name, [], function, arguments, {}, options)

    models = [model, *(each for part in stages.parts for each in part.models)]
    layers = {id(part.operation): part.operation for part in stages.parts if part.node is None}
    with contextlib.ExitStack() as hooks:
        for each in {id(each): each for each in models}.values():
            graph = functional_graph(each)
            if graph is not None:
                run = StagedGraph(graph, each, places, calls).run
                hooks.enter_context(
                    shadowed(
                        graph,
                        "_run_through_graph",
                        wrapped(graph, "_run_through_graph", run),
                        during="the tracing of a pipeline's step",
                        why="The layers of a graph run on their stages, those of one together.",
                    )
                )
            elif each is not model:
                call_model = functools.partial(_call_model, calls, places, each)
                hooks.enter_context(
                    shadowed(
                        each,
                        "call",
                        wrapped(each, "call", call_model),
                        during="the tracing of a pipeline's step",
                        why="A nested subclassed model runs on its stage, if it has only one.",
                    )
                )
        for layer in layers.values():
            call_layer = functools.partial(_call_layer, calls, places, layer)
            hooks.enter_context(
                shadowed(
                    layer,
                    "call",
                    wrapped(layer, "call", call_layer),
                    during="the tracing of a pipeline's step",
                    why="A subclassed model's layer runs on its stage.",
                )
            )
        hooks.enter_context(staged_losses(model, call_on_last))
        yield


def _call_model(
    calls: StageCalls,
    places: Places,
    model: keras.Model,
    original: Callable,
    *args: object,
    **kwargs: object,
) -> object:
    """`model.call` of a nested subclassed model: on its stage, if it has only one."""
    stages = places.stages_of_model(model, calls.around)
    if len(stages) > 1:
        return original(*args, **kwargs)
    (stage,) = stages
    return _call_on_stage(calls, stage, places.path(model), model, original, args, kwargs)


def _call_layer(
    calls: StageCalls,
    places: Places,
    layer: keras.Layer,
    original: Callable,
    *args: object,
    **kwargs: object,
) -> object:
    """`layer.call` of a subclassed model's layer."""
    part, stage = places.find(layer, (calls.around, id(layer)))
    return _call_on_stage(calls, stage, part.name, layer, original, args, kwargs)


def _call_on_stage(
    calls: StageCalls,
    stage: int,
    path: str,
    layer: keras.Layer,
    original: Callable,
    args: tuple,
    kwargs: dict,
) -> object:
    """`original(*args, **kwargs)` as a part of a stage; within one, as what it is."""

    def traced(*args: object, **kwargs: object) -> object:
        with calls.traced(stage, path):
            return original(*args, **kwargs)

    if calls.is_in_part:
        return traced(*args, **kwargs)
    return _call_nest(calls, stage, (calls.around, id(layer)), [layer], traced, args, kwargs)


def _call_nest(
    calls: StageCalls,
    stage: int,
    name: object,
    layers: Sequence,
    function: Callable,
    args: tuple,
    kwargs: dict,
    options: Mapping[str, bool] | None = None,
) -> object:
    """`function(*args, **kwargs)`, of nests of tensors, on `stage`."""
    flat = keras.tree.flatten((args, kwargs))
    at = [i for i, value in enumerate(flat) if isinstance(value, TENSORS)]
    if not calls.is_in_step or not at:
        return function(*args, **kwargs)

    def of_tensors(inputs: list) -> object:
        filled = list(flat)
        for i, value in zip(at, inputs, strict=True):
            filled[i] = value
        own_args, own_kwargs = keras.tree.pack_sequence_as((args, kwargs), filled)
        return function(*own_args, **own_kwargs)

    inputs = [flat[i] for i in at]
    return calls.call(stage, name, layers, of_tensors, inputs, **(options or {}))
