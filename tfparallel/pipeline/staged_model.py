"""A model whose parts run on their stages while one step is traced.

The model's instances are shadowed, and only for that time: a functional graph runs its nodes stage
by stage, the layers of a subclassed model one by one.
"""

import collections
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.pipeline.deferred_batch_norm import DeferredBatchNorm
from tfparallel.pipeline.executor import Executor
from tfparallel.pipeline.rematerialization import Rematerialization
from tfparallel.pipeline.staged_losses import shadow_losses
from tfparallel.pipeline.stages import Part, Stages, functional_graph
from tfparallel.pipeline.state_changes import StateChanges
from tfparallel.tf_internals import get_keras_mask, set_keras_mask

_TENSORS = (tf.Tensor, tf.SparseTensor, tf.RaggedTensor)


@contextlib.contextmanager
def staged(
    model: keras.Model,
    stages: Stages,
    executor: Executor,
    current_microbatch: Callable,
    deferred: DeferredBatchNorm,
    changes: StateChanges,
    rematerialization: Rematerialization,
) -> Iterator[None]:
    """Within it, `model` computes through `executor`.

    Args:
        stages: of `model`.
        executor: of the step that is being traced.
        current_microbatch: gives the calling thread's microbatch, or None outside of microbatches.
        deferred: layers whose moving averages are assigned when all microbatches have passed.
        changes: what other layers assign.
        rematerialization: the executor's; is told which layer is being traced.
    """
    calls = _Calls(executor, current_microbatch, deferred, changes, rematerialization)
    shadows: list[tuple[dict, str]] = []

    def shadow(instance: Any, name: str, hook: Callable) -> None:
        original = getattr(instance, name)
        vars(instance)[name] = functools.wraps(original)(functools.partial(hook, original))
        shadows.append((vars(instance), name))

    graph = functional_graph(model)
    if graph is not None:
        shadow(graph, "_run_through_graph", _StagedGraph(graph, stages, calls).run)
    else:
        for part, stage in zip(stages.parts, stages.stage_of, strict=True):
            shadow(part.operation, "call", functools.partial(_call_layer, calls, stage, part))

    def call_on_last(name: Any, function: Callable, arguments: tuple) -> Any:
        return _call_nest(calls, calls.last_stage, name, [], function, arguments, {}, False)

    put_back = shadow_losses(model, call_on_last, shadow)
    try:
        yield
    finally:
        put_back()
        for attributes, name in shadows:
            attributes.pop(name, None)


class _Calls:
    """Calls of the executor by the thread of each microbatch."""

    def __init__(
        self,
        executor: Executor,
        current_microbatch: Callable,
        deferred: DeferredBatchNorm,
        changes: StateChanges,
        rematerialization: Rematerialization,
    ):
        self._executor, self.current_microbatch = executor, current_microbatch
        self._deferred, self._changes = deferred, changes
        self._rematerialization = rematerialization
        self.last_stage = executor.num_stages - 1
        self._thread = threading.local()
        self._results: dict[Any, _Result] = {}

    def call(
        self,
        stage: int,
        name: Any,
        layers: Sequence,
        function: Callable,
        inputs: list,
        is_shared: bool = True,
    ) -> Any:
        """`function(inputs)` on `stage`, or on a later stage if this microbatch is there already.

        Args:
            name: of the computation. Its n-th call is the same computation in all microbatches.
            layers: that it calls; losses that they add are carried out of the stage's function.
            function: takes a list of tensors, returns a nest of tensors; both may have Keras masks.
            inputs: tensors, sparse and ragged ones too.
            is_shared: as in `Executor.call`.
        """
        seen = vars(self._thread)
        counts = seen.setdefault("counts", collections.Counter())
        counts[name] += 1
        stage = seen["stage"] = max(stage, seen.get("stage", 0))
        masks = [get_keras_mask(x) for x in inputs]
        given = self._changes.needed_by(layers)
        assigned = tuple(id(change.variable) for change in given)
        key = (name, counts[name], tuple(mask is not None for mask in masks), assigned)

        flat_inputs = _flat(inputs)
        arguments = [*flat_inputs, *_present(masks)]

        def flat_function(*flat: tf.Tensor) -> list:
            flat, state = flat[: len(arguments)], flat[len(arguments) :]
            own_inputs, own_masks = _filled(inputs, flat), flat[len(flat_inputs) :]
            _set_masks(own_inputs, masks, own_masks)
            apart = self._changes.in_function(flat, given, state)
            with self._deferred.collected() as statistics, apart as changed:
                outputs, losses = _losses_apart(function, layers, own_inputs)
            owners = [layer for layer, _ in losses]
            result = _Result(outputs, owners, [v for v, _ in statistics], changed)
            self._results[key] = result
            # Identities: TensorFlow would hand back an input that is returned, and its mask.
            values = _flat(result.tensors)
            tensors = [*values, *result.masks, *(x for _, x in [*losses, *statistics])]
            tensors += [change.value for change in changed]
            return [tf.identity(tensor) for tensor in tensors]

        microbatch = self.current_microbatch()
        state = [change.value for change in given]
        flat = self._executor.call(
            stage, microbatch, key, flat_function, [*arguments, *state], is_shared=is_shared
        )
        result = self._results[key]
        flat, values = _split(flat, len(flat) - len(result.changed))
        self._changes.add(result.changed, values, layers)
        flat, values = _split(flat, len(flat) - len(result.statistics))
        self._deferred.add(microbatch, result.statistics, values)
        return result.filled(flat)

    @contextlib.contextmanager
    def traced(self, stage: int, name: str) -> Iterator[None]:
        """Within it, a layer of `stage` is traced; errors say which.

        Those of operations when they run have both names in the name of the operation.
        """
        try:
            with self._rematerialization.traced(name):
                yield
        except Exception as error:
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"In layer '{name}' on stage {stage} of the pipeline.")
            raise


class _Result:
    """What a traced function returns: the tensors in it, their masks, and the losses added.

    Attributes:
        statistics: the variables that were to be assigned, had that not been deferred.
        changed: what was to be assigned otherwise.
    """

    def __init__(self, outputs: Any, loss_owners: list, statistics: list, changed: list):
        self._structure, self._loss_owners = outputs, loss_owners
        self.statistics, self.changed = statistics, changed
        self._leaves = keras.tree.flatten(outputs)
        self._at = [i for i, leaf in enumerate(self._leaves) if isinstance(leaf, _TENSORS)]
        self.tensors = [self._leaves[i] for i in self._at]
        self._all_masks = [get_keras_mask(tensor) for tensor in self.tensors]
        self.masks = _present(self._all_masks)

    def filled(self, flat: Sequence) -> Any:
        """The same nest of other tensors: `flat` holds tensors, masks and losses in order."""
        leaves, tensors = list(self._leaves), _filled(self.tensors, flat)
        rest = flat[len(_flat(self.tensors)) :]
        _set_masks(tensors, self._all_masks, rest)
        for i, tensor in zip(self._at, tensors, strict=True):
            leaves[i] = tensor
        for layer, loss in zip(self._loss_owners, rest[len(self.masks) :], strict=True):
            layer._losses.append(loss)
        return keras.tree.pack_sequence_as(self._structure, leaves)


class _StagedGraph:
    """Runs the nodes of a functional model, those of one stage together."""

    def __init__(self, graph: Any, stages: Stages, calls: _Calls):
        self._graph, self._calls = graph, calls
        self._parts: dict[int, list[Part]] = collections.defaultdict(list)
        for part, stage in zip(stages.parts, stages.stage_of, strict=True):
            self._parts[stage].append(part)

    def run(
        self, original: Callable, inputs: Any, operation_fn: Any = None, call_fn: Any = None
    ) -> Any:
        """`Functional._run_through_graph`."""
        options = {} if operation_fn is None else {"operation_fn": operation_fn}
        if call_fn is not None or self._calls.current_microbatch() is None:
            return original(inputs, call_fn=call_fn, **options)
        tensors = dict(zip(map(id, self._graph.inputs), keras.tree.flatten(inputs), strict=True))
        for stage in sorted(self._parts):
            needed, produced = self._boundary(stage)
            outputs = self._calls.call(
                stage,
                (id(self._graph), stage),
                [part.operation for part in self._parts[stage]],
                functools.partial(self._run_stage, stage, operation_fn, needed, produced),
                [tensors[key] for key in needed],
            )
            tensors.update(zip(produced, outputs, strict=True))
        outputs = [tensors[id(x)] for x in self._graph.outputs]
        return keras.tree.pack_sequence_as(self._graph._outputs_struct, outputs)

    def _boundary(self, stage: int) -> tuple[list[int], list[int]]:
        """The tensors that a stage takes from earlier ones, and gives to later ones."""
        nodes = [part.node for part in self._parts[stage]]
        made = {id(x) for node in nodes for x in node.outputs}
        needed = dict.fromkeys(
            id(x) for node in nodes for x in node.input_tensors if id(x) not in made
        )
        later = [p.node for s, parts in self._parts.items() if s > stage for p in parts]
        wanted = {id(x) for node in later for x in node.input_tensors}
        wanted |= {id(x) for x in self._graph.outputs}
        return list(needed), [
            key for key in dict.fromkeys(id(x) for n in nodes for x in n.outputs) if key in wanted
        ]

    def _run_stage(
        self, stage: int, operation_fn: Any, needed: list, produced: list, inputs: list
    ) -> list:
        tensors = dict(zip(needed, inputs, strict=True))
        for part in self._parts[stage]:
            args, kwargs = part.node.arguments.fill_in(tensors)
            operation = self._graph._get_operation_for_node(part.node)
            operation = operation if operation_fn is None else operation_fn(operation)
            with self._calls.traced(stage, part.name):
                outputs = keras.tree.flatten(operation(*args, **kwargs))
            tensors.update(zip(map(id, part.node.outputs), outputs, strict=True))
        return [tensors[key] for key in produced]


def _call_layer(
    calls: _Calls, stage: int, part: Part, original: Callable, *args: Any, **kwargs: Any
) -> Any:
    """`layer.call` of a subclassed model's layer."""

    def traced(*args: Any, **kwargs: Any) -> Any:
        with calls.traced(stage, part.name):
            return original(*args, **kwargs)

    return _call_nest(calls, stage, part.name, [part.operation], traced, args, kwargs)


def _call_nest(
    calls: _Calls,
    stage: int,
    name: Any,
    layers: Sequence,
    function: Callable,
    args: tuple,
    kwargs: dict,
    is_shared: bool = True,
) -> Any:
    """`function(*args, **kwargs)`, of nests of tensors, on `stage`."""
    flat = keras.tree.flatten((args, kwargs))
    at = [i for i, value in enumerate(flat) if isinstance(value, _TENSORS)]
    if calls.current_microbatch() is None or not at:
        return function(*args, **kwargs)

    def of_tensors(inputs: list) -> Any:
        filled = list(flat)
        for i, value in zip(at, inputs, strict=True):
            filled[i] = value
        own_args, own_kwargs = keras.tree.pack_sequence_as((args, kwargs), filled)
        return function(*own_args, **own_kwargs)

    return calls.call(stage, name, layers, of_tensors, [flat[i] for i in at], is_shared)


def _losses_apart(function: Callable, layers: Sequence, inputs: list) -> tuple[Any, list[tuple]]:
    """What `function` returns, and the losses that `layers` have added meanwhile, by layer."""
    own = [
        layer
        for each in layers
        if isinstance(each, keras.Layer)
        for layer in each._flatten_layers()
    ]
    own = list({id(layer): layer for layer in own}.values())
    before = [len(layer._losses) for layer in own]
    outputs = function(inputs)
    losses = []
    for layer, count in zip(own, before, strict=True):
        losses += [(layer, loss) for loss in layer._losses[count:]]
        del layer._losses[count:]
    return outputs, losses


def _flat(tensors: Sequence) -> list[tf.Tensor]:
    """The dense tensors that these are made of."""
    return tf.nest.flatten(tensors, expand_composites=True)


def _filled(tensors: Sequence, flat: Sequence) -> list:
    """Tensors like these, made of the first of `flat`."""
    num = len(_flat(tensors))
    return tf.nest.pack_sequence_as(list(tensors), flat[:num], expand_composites=True)


def _set_masks(tensors: Sequence, like: Sequence, masks: Sequence) -> None:
    """Gives the first of `masks` to those tensors that have one in `like`."""
    rest = iter(masks)
    for tensor, mask in zip(tensors, like, strict=True):
        if mask is not None:
            set_keras_mask(tensor, next(rest))


def _split(values: list, at: int) -> tuple[list, list]:
    return values[:at], values[at:]


def _present(masks: Sequence) -> list:
    return [mask for mask in masks if mask is not None]
