"""A model whose parts run on their stages while one step is traced.

The instances of the model, and of models in it, are shadowed, and only for that time. A functional
graph runs its nodes stage by stage, a subclassed model its layers one by one; a nested model whose
parts are all on one stage runs as one. Whatever else a nested model does when it is called (masks,
`training`, a `call` in Python) Keras does as ever.
"""

import collections
import contextlib
import functools
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfparallel.internals import get_keras_mask, set_keras_mask
from tfparallel.internals.hooks import shadowed, wrapped
from tfparallel.internals.keras_layers import (
    add_loss_again,
    added_losses,
    drop_added_losses,
    layers_of,
    operation_of_node,
    outputs_structure,
)
from tfparallel.pipeline.deferred_batch_norm import DeferredBatchNorm
from tfparallel.pipeline.executor import Executor
from tfparallel.pipeline.graph_groups import Item, group_items
from tfparallel.pipeline.parts import Calls, Member, Part, functional_graph, is_opened, members
from tfparallel.pipeline.rematerialization import Rematerialization
from tfparallel.pipeline.staged_losses import staged_losses
from tfparallel.pipeline.stages import Stages
from tfparallel.pipeline.state_changes import StateChanges

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
    places = _Places(stages)
    calls = _Calls(executor, current_microbatch, deferred, changes, rematerialization)

    def call_on_last(name: Any, function: Callable, arguments: tuple) -> Any:
        options = {"is_shared": False, "is_result": True}
        return _call_nest(calls, calls.last_stage, name, [], function, arguments, {}, options)

    models = [model, *(each for part in stages.parts for each in part.models)]
    layers = {id(part.operation): part.operation for part in stages.parts if part.node is None}
    with contextlib.ExitStack() as hooks:
        for each in {id(each): each for each in models}.values():
            graph = functional_graph(each)
            if graph is not None:
                run = _StagedGraph(graph, each, places, calls).run
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


class _Places:
    """Where the parts of a model are."""

    def __init__(self, stages: Stages):
        self._by_key: dict[tuple, tuple[Part, int]] = {}
        self._paths: dict[int, str] = {}
        for part, stage in zip(stages.parts, stages.stage_of, strict=True):
            for depth, model in enumerate(part.models, 1):
                path = "/".join(part.name.split("/")[:depth])
                self._paths.setdefault(id(model), path)
            self._by_key[part.key] = (part, stage)
            # For a call that the division does not know of, such as a user's own of a nested model.
            self._by_key.setdefault(part.key[1:], (part, stage))

    def find(self, key: tuple[Calls, int]) -> tuple[Part, int]:
        """The part of this key, and its stage."""
        return self._by_key[key if key in self._by_key else key[1:]]

    def path(self, model: keras.Model) -> str:
        """The name of a nested model, behind those of the models around it."""
        return self._paths[id(model)]

    def stages(self, member: Member, calls: Calls) -> set[int]:
        """All stages of a member of a model, within `calls`."""
        if is_opened(member.operation):
            return self.stages_of_model(member.operation, member.within(calls))
        return {self.find(member.key(calls))[1]}

    def stages_of_model(self, model: keras.Model, calls: Calls) -> set[int]:
        """All stages of a nested model, within `calls`."""
        return set().union(*(self.stages(member, calls) for member in members(model)))


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
        self._executor, self._current_microbatch = executor, current_microbatch
        self._deferred, self._changes = deferred, changes
        self._rematerialization = rematerialization
        self.last_stage = executor.num_stages - 1
        self._graph = tf.compat.v1.get_default_graph()
        self._thread = threading.local()
        self._results: dict[Any, _Result] = {}

    @property
    def around(self) -> Calls:
        """By which graphs' calls the thread has come to where it is."""
        return getattr(self._thread, "around", ())

    @contextlib.contextmanager
    def entered(self, around: Calls) -> Iterator[None]:
        """Within it, `around` is that."""
        before, self._thread.around = self.around, around
        try:
            yield
        finally:
            self._thread.around = before

    @property
    def is_in_step(self) -> bool:
        """Whether the thread is a microbatch's, and in no part and no branch of the step."""
        in_graph = tf.compat.v1.get_default_graph() is self._graph
        return in_graph and self._current_microbatch() is not None

    @property
    def is_in_part(self) -> bool:
        """Whether the thread traces a part of a stage."""
        return getattr(self._thread, "is_in_part", False)

    def call(
        self,
        stage: int,
        name: Any,
        layers: Sequence,
        function: Callable,
        inputs: list,
        **options: bool,
    ) -> Any:
        """`function(inputs)` on `stage`, or on a later stage if the inputs are made there.

        Args:
            name: of the computation. Its n-th call is the same computation in all microbatches.
            layers: that it calls; losses that they add are carried out of the stage's function.
            function: takes a list of tensors, returns a nest of tensors; both may have Keras masks.
            inputs: tensors, sparse and ragged ones too.
            **options: of `Executor.call`.
        """
        counts = vars(self._thread).setdefault("counts", collections.Counter())
        counts[name] += 1
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
            self._thread.is_in_part = True
            apart = self._changes.in_function(flat, given, state)
            try:
                with self._deferred.collected() as statistics, apart as changed:
                    outputs, losses = _losses_apart(function, layers, own_inputs)
            finally:
                self._thread.is_in_part = False
            owners = [layer for layer, _ in losses]
            result = _Result(outputs, owners, [v for v, _ in statistics], changed)
            self._results[key] = result
            # Identities: TensorFlow would hand back an input that is returned, and its mask.
            values = _flat(result.tensors)
            tensors = [*values, *result.masks, *(x for _, x in [*losses, *statistics])]
            tensors += [change.value for change in changed]
            return [tf.identity(tensor) for tensor in tensors]

        microbatch = self._current_microbatch()
        given_tensors = [*arguments, *(change.value for change in given)]
        stage = self._executor.stage_of_call(stage, microbatch, given_tensors)
        flat = self._executor.call(stage, microbatch, key, flat_function, given_tensors, **options)
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
            end = "of the pipeline."
            is_told = any(note.endswith(end) for note in getattr(error, "__notes__", ()))
            if hasattr(error, "add_note") and not is_told:  # Python 3.11
                error.add_note(f"In layer '{name}' on stage {stage} {end}")
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
            add_loss_again(layer, loss)
        return keras.tree.pack_sequence_as(self._structure, leaves)


class _StagedGraph:
    """Runs the nodes of a functional model, those of one stage together.

    Args:
        graph: the functional model.
        model: that runs it.
    """

    def __init__(self, graph: Any, model: keras.Model, places: _Places, calls: _Calls):
        self._graph, self._places, self._calls = graph, places, calls
        self._members = members(model)
        self._groups: dict[Calls, list[NodeGroup]] = {}

    def run(
        self, original: Callable, inputs: Any, operation_fn: Any = None, call_fn: Any = None
    ) -> Any:
        """`Functional._run_through_graph`."""
        options = {} if operation_fn is None else {"operation_fn": operation_fn}
        is_staged = self._calls.is_in_step or self._calls.is_in_part
        if call_fn is not None or not is_staged:
            return original(inputs, call_fn=call_fn, **options)
        flat = keras.tree.flatten(inputs)
        tensors: dict[Any, Any] = dict(zip(map(id, self._graph.inputs), flat, strict=True))
        around = self._calls.around
        if around not in self._groups:
            self._groups[around] = self._grouped(around)
        for i, group in enumerate(self._groups[around]):
            if group.stage is None or self._calls.is_in_part:
                self._run_members(group, operation_fn, tensors)
                continue
            outputs = self._calls.call(
                group.stage,
                (id(self._graph), around, i),
                [member.operation for member in group.members],
                functools.partial(self._run_group, group, operation_fn),
                [tensors[key] for key in group.needed],
            )
            tensors.update(zip(group.produced, outputs, strict=True))
        outputs = [tensors[id(x)] for x in self._graph.outputs]
        return keras.tree.pack_sequence_as(outputs_structure(self._graph), outputs)

    def _grouped(self, around: Calls) -> list["NodeGroup"]:
        items = [
            Item(
                self._places.stages(member, around),
                [id(x) for x in member.node.input_tensors],
                [id(x) for x in member.node.outputs],
            )
            for member in self._members
        ]
        groups = []
        for chosen in group_items(items, map(id, self._graph.inputs)):
            others = [item for i, item in enumerate(items) if i not in chosen]
            wanted = {id(x) for x in self._graph.outputs}.union(*(each.takes for each in others))
            made = dict.fromkeys(key for i in chosen for key in items[i].makes)
            needed = dict.fromkeys(key for i in chosen for key in items[i].takes)
            stages = {stage for i in chosen for stage in items[i].stages}
            groups.append(
                NodeGroup(
                    next(iter(stages)) if len(stages) == 1 else None,
                    [self._members[i] for i in chosen],
                    [key for key in needed if key not in made],
                    [key for key in made if key in wanted],
                )
            )
        return groups

    def _run_group(self, group: "NodeGroup", operation_fn: Any, inputs: list) -> list:
        tensors = dict(zip(group.needed, inputs, strict=True))
        self._run_members(group, operation_fn, tensors)
        return [tensors[key] for key in group.produced]

    def _run_members(self, group: "NodeGroup", operation_fn: Any, tensors: dict[Any, Any]) -> None:
        around = self._calls.around
        for member in group.members:
            args, kwargs = member.node.arguments.fill_in(tensors)
            operation = operation_of_node(self._graph, member.node)
            operation = operation if operation_fn is None else operation_fn(operation)
            with self._calls.entered(member.within(around)), self._named(member, around):
                outputs = keras.tree.flatten(operation(*args, **kwargs))
            tensors.update(zip(map(id, member.node.outputs), outputs, strict=True))

    def _named(self, member: Member, around: Calls) -> contextlib.AbstractContextManager:
        if is_opened(member.operation):  # its parts have names
            return contextlib.nullcontext()
        part, stage = self._places.find(member.key(around))
        return self._calls.traced(stage, part.name)


@dataclass(frozen=True)
class NodeGroup:
    """Nodes of a graph that run together.

    Attributes:
        stage: on which they run; None for a nested model on several stages.
        members: in their order.
        needed: `id`s of the tensors that they take from others.
        produced: `id`s of the tensors that others take from them.
    """

    stage: int | None
    members: Sequence[Member]
    needed: Sequence[Hashable]
    produced: Sequence[Hashable]


def _call_model(
    calls: _Calls,
    places: _Places,
    model: keras.Model,
    original: Callable,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`model.call` of a nested subclassed model: on its stage, if it has only one."""
    stages = places.stages_of_model(model, calls.around)
    if len(stages) > 1:
        return original(*args, **kwargs)
    (stage,) = stages
    return _call_on_stage(calls, stage, places.path(model), model, original, args, kwargs)


def _call_layer(
    calls: _Calls, places: _Places, layer: Any, original: Callable, *args: Any, **kwargs: Any
) -> Any:
    """`layer.call` of a subclassed model's layer."""
    part, stage = places.find((calls.around, id(layer)))
    return _call_on_stage(calls, stage, part.name, layer, original, args, kwargs)


def _call_on_stage(
    calls: _Calls,
    stage: int,
    path: str,
    layer: Any,
    original: Callable,
    args: tuple,
    kwargs: dict,
) -> Any:
    """`original(*args, **kwargs)` as a part of a stage; within one, as what it is."""

    def traced(*args: Any, **kwargs: Any) -> Any:
        with calls.traced(stage, path):
            return original(*args, **kwargs)

    if calls.is_in_part:
        return traced(*args, **kwargs)
    return _call_nest(calls, stage, (calls.around, id(layer)), [layer], traced, args, kwargs)


def _call_nest(
    calls: _Calls,
    stage: int,
    name: Any,
    layers: Sequence,
    function: Callable,
    args: tuple,
    kwargs: dict,
    options: Mapping[str, bool] | None = None,
) -> Any:
    """`function(*args, **kwargs)`, of nests of tensors, on `stage`."""
    flat = keras.tree.flatten((args, kwargs))
    at = [i for i, value in enumerate(flat) if isinstance(value, _TENSORS)]
    if not calls.is_in_step or not at:
        return function(*args, **kwargs)

    def of_tensors(inputs: list) -> Any:
        filled = list(flat)
        for i, value in zip(at, inputs, strict=True):
            filled[i] = value
        own_args, own_kwargs = keras.tree.pack_sequence_as((args, kwargs), filled)
        return function(*own_args, **own_kwargs)

    inputs = [flat[i] for i in at]
    return calls.call(stage, name, layers, of_tensors, inputs, **(options or {}))


def _losses_apart(function: Callable, layers: Sequence, inputs: list) -> tuple[Any, list[tuple]]:
    """What `function` returns, and the losses that `layers` have added meanwhile, by layer."""
    own = [layer for each in layers if isinstance(each, keras.Layer) for layer in layers_of(each)]
    own = list({id(layer): layer for layer in own}.values())
    before = [len(added_losses(layer)) for layer in own]
    outputs = function(inputs)
    losses = []
    for layer, count in zip(own, before, strict=True):
        losses += [(layer, loss) for loss in drop_added_losses(layer, count)]
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
