"""Shards over processes, each of which computes with a pipeline, or with groups of devices.

                         rank 0                                     rank 1
    a step               its rows, all layers                       its rows, all layers
    gradients            summed over both
    an update            pieces 0 of all weights, with their        pieces 1, with theirs
                         slots, which nobody else has
    behind it            all pieces are gathered: each has all weights

Processes meet where a step has its gradients, and where it has updated its pieces: no stage of a
pipeline and no layer waits for another process. Weights that are in pieces too are gathered where a
step begins instead (`gathered_weights.py`).

An optimizer that looks at whole weights, or a constraint, has slots gathered instead: each process
computes the update of whole weights, as one device does, and keeps its pieces of the slots.

Source: Rajbhandari et al., ZeRO, https://arxiv.org/abs/1910.02054, stages 1 to 3.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard, TypeVar

import keras
import tensorflow as tf

from tfparallel.communication.collectives import Collectives
from tfparallel.hybrid.gathered_weights import (
    GatheredGroupWeight,
    GatheredStageWeight,
    GatheredWeight,
)
from tfparallel.hybrid.groups_as_stages import PipelinesOfGroupsExtended
from tfparallel.hybrid.numbers_of_processes import (
    averaging_wholes,
    known_finite,
    numbers_of_all,
)
from tfparallel.hybrid.pieces_of_parts import (
    PiecesOfParts,
    PlaceOfPart,
    gathered,
    summed_and_scattered,
)
from tfparallel.hybrid.pieces_of_processes import (
    GroupSlot,
    GroupWeight,
    SlotInPieces,
    StageSlot,
    StageWeight,
    WeightInPieces,
)
from tfparallel.hybrid.sharded_groups import ShardedGroupsExtended
from tfparallel.hybrid.shards import HoldsShards
from tfparallel.internals import BaseOptimizer, distribute_lib, record, values_util
from tfparallel.internals.keras_layers import behind, trained_by
from tfparallel.internals.keras_trainer import ends_with_update
from tfparallel.pipeline.extended import Homes
from tfparallel.pipeline.gradient_sums import Functions
from tfparallel.replicas.axis_of_processes import Gradient
from tfparallel.replicas.drawn_values import Drawn
from tfparallel.replicas.known_layers import layers_known_to
from tfparallel.replicas.optimizer_hooks import (
    GradientSource,
    build_optimizer,
    gradient_source,
)
from tfparallel.sharded.shard_view import GlobalNumbers, shard_view
from tfparallel.tensor_parallel.drawn_pieces import NewPieces
from tfparallel.tensor_parallel.gradient_in_parts import GradientInParts
from tfparallel.tensor_parallel.gradients import in_parts, sum_parts
from tfparallel.tensor_parallel.known_parts import known_parts
from tfparallel.tensor_parallel.rows import Rows
from tfparallel.tensor_parallel.split_variable import SplitVariable, split_of

_Weight = TypeVar("_Weight", bound=WeightInPieces)


class SharesAmongProcesses(HoldsShards):
    """Mixed into an extended of a process that has others around it, which share the state."""

    _weight_class: type[WeightInPieces]
    _gathered_class: type[GatheredWeight]
    _slot_class: type[SlotInPieces]
    _is_in_step = _ends_with_update = False
    _run_now: Callable | None = None
    _batch: Sequence[tf.Tensor] = ()  # some of what the step that begins takes

    @property
    def between_processes(self) -> Collectives:
        """The collectives of those that share the state."""
        assert self._workers is not None
        return self._workers._collectives

    # ---- where variables live --------------------------------------------------------------------

    @property
    def _pieces_of_part(self) -> int:
        return self._num_workers

    @property
    def _split_class(self) -> type[SplitVariable]:  # type: ignore[override]
        if getattr(self._thread, "leader", None) is not None:
            return self._slot_class
        is_apart = self.sharding is not None and self.sharding.shard == "parameters"
        return self._gathered_class if is_apart else self._weight_class

    def _create_variable(self, next_creator: Callable, **kwargs: object) -> tf.Variable:
        leader, is_weight = kwargs.get("colocate_with"), self._shape_of_weight(kwargs) is not None
        has_pieces = isinstance(leader, WeightInPieces) and leader.pieces_of_parts is not None
        self._thread.leader = leader if has_pieces else None
        try:
            variable = super()._create_variable(next_creator, **kwargs)
        finally:
            self._thread.leader = None
        if isinstance(variable, SlotInPieces) and isinstance(leader, WeightInPieces):
            variable.beside(leader)
        elif isinstance(variable, WeightInPieces) and is_weight and self._is_cut(variable):
            variable.cut_over(self._num_workers, self._id_in_cluster)
            if isinstance(variable, GatheredWeight) and not self._is_in_step:
                with tf.init_scope():
                    variable.store_pieces()
        return variable

    def _is_new_in_pieces(self, shards: int) -> bool:
        """As the base's, or a slot beside a weight in pieces."""
        return (
            super()._is_new_in_pieces(shards) or getattr(self._thread, "leader", None) is not None
        )

    def _is_cut(self, weight: SplitVariable) -> bool:
        smallest = min(weight.rows.sizes) // weight.rows.blocks
        return self._is_large(weight.shape.as_list()) and smallest >= self._num_workers

    def _new_pieces(self, value: tf.Tensor | Drawn, stored: Rows, leader: object) -> NewPieces:
        cut = leader.pieces_of_parts if isinstance(leader, WeightInPieces) else None
        return super()._new_pieces(value, stored, leader) if cut is None else _OwnNew(value, cut)

    # ---- weights that a step gathers -------------------------------------------------------------

    def prepare_for(self, fn: Callable, args: tuple) -> None:
        """As the base's; notes what is run, and what its gathers have to wait for.

        Where a step takes its batch from an iterator, TensorFlow ends the one that finds none while
        it runs: one process would have begun to gather, and another not.
        """
        leaves = tf.nest.flatten(args, expand_composites=True)
        self._run_now = fn
        self._batch = [leaf for leaf in leaves if isinstance(leaf, tf.Tensor)][:1]
        super().prepare_for(fn, args)

    @contextlib.contextmanager
    def _step_of(self, model: keras.Model) -> Iterator[None]:
        self._ends_with_update = ends_with_update(model)
        with super()._step_of(model), self._gathered(model.variables):
            yield

    def _call_for_each_replica(self, fn: Callable, args: tuple, kwargs: dict) -> object:
        """As the base's; a function of the user finds the weights of the layers that it names."""
        if self._is_in_step:
            return super()._call_for_each_replica(fn, args, kwargs)
        self._ends_with_update = False
        layers = [] if self._run_now is None else layers_known_to(self._run_now)
        with self._gathered([variable for layer in layers for variable in layer.variables]):
            return super()._call_for_each_replica(fn, args, kwargs)

    @contextlib.contextmanager
    def _gathered(self, variables: Sequence[keras.Variable]) -> Iterator[None]:
        """Within it, a step, all of each weight among `variables` is in each process."""
        known = {id(variable): behind(variable) for variable in variables}
        weights = _apart_among(list(known.values()))
        with tf.control_dependencies(self._batch):
            for weight, parts in self._gathered_among_processes(weights):
                weight.fill(parts)
        self._is_in_step, self._run_now, self._batch = True, None, ()
        try:
            yield
        finally:
            self._is_in_step = False
            for weight in weights:
                weight.free()

    # ---- how gradients meet ----------------------------------------------------------------------

    def _sums_to_note(self, reduced: list) -> list:
        """As the base's; of what is in pieces the first replica of each process notes its own."""
        source = gradient_source()
        if source is None or not self._is_updated_in_pieces(source):
            return super()._sums_to_note(reduced)
        told = [_in_pieces(g, v) for g, v in zip(reduced, source.variables, strict=True)]
        wholes = [g for g, each in zip(reduced, told, strict=True) if not _has_pieces(each)]
        pieces = [x for each in told if _has_pieces(each) for x in each.numbers()]
        is_first = values_util.get_current_replica_id_as_int() == 0
        return super()._sums_to_note(wholes) + (pieces if is_first else [])

    def _is_updated_in_pieces(self, source: GradientSource | None) -> bool:
        """Whether this process needs its pieces only of the sums of gradients."""
        return source is not None and self._updates_parts(source.optimizer, source.variables)

    def _scattered_among_processes(self, places: Sequence[PlaceOfPart | None], sums: list) -> list:
        """Sums over processes of those of this one; where there is a place, its piece only."""
        cut = {k: place for k, place in enumerate(places) if place is not None}
        rest = [k for k, place in enumerate(places) if place is None]
        whole = self._sum_gradients_across_workers([sums[k] for k in rest], None)
        results = dict(zip(rest, whole, strict=True))
        with tf.device(self._host_device):
            own = [sums[k] for k in cut]
            pieces = summed_and_scattered(self.between_processes, list(cut.values()), own)
        results.update(zip(cut, pieces, strict=True))
        return [results[k] for k in range(len(sums))]

    # ---- how a variable is updated ---------------------------------------------------------------

    def _optimizer_hooks(self, optimizer: BaseOptimizer) -> Mapping[str, Callable]:
        return averaging_wholes(known_finite(super()._optimizer_hooks(optimizer)))

    def _updates_parts(self, optimizer: BaseOptimizer, variables: Sequence[keras.Variable]) -> bool:
        unconstrained = all(getattr(each, "constraint", None) is None for each in variables)
        return super()._updates_parts(optimizer, variables) and unconstrained

    def _apply_reduced(
        self, apply: Callable, gradients: list, variables: Sequence[keras.Variable] | None
    ) -> object:
        optimizer: Any = apply.__self__  # type: ignore[attr-defined]
        own = list(variables or trained_by(optimizer))
        pairs = list(zip(gradients, own, strict=False))
        present = [v for g, v in pairs if g is not None]
        weights = [split_of(v) for v in present]
        cut = [w for w in weights if isinstance(w, WeightInPieces) and w.pieces_of_parts]
        is_cut = bool(cut) and self._updates_parts(optimizer, present)
        if not is_cut or len(own) != len(gradients):  # Keras refuses the latter
            return super()._apply_reduced(apply, gradients, variables)
        build_optimizer(optimizer, own)
        with shard_view(GlobalNumbers(None, None)):
            gradients = [_in_pieces(gradient, variable) for gradient, variable in pairs]
            numbers = numbers_of_all(optimizer, gradients, own, self._sum_over_processes)
        for weight in cut:
            weight.take()
        with shard_view(numbers):
            super()._apply_reduced(apply, gradients, variables)
        self._publish(cut)
        return None

    def _sum_over_processes(self, numbers: tf.Tensor) -> tf.Tensor:
        """Of what all replicas of a process have alike; called in a replica context."""

        def merge(_: tf.distribute.Strategy, numbers: object) -> tf.Tensor:
            return self._sum_across_workers(self._local_results(numbers)[0])

        return distribute_lib.get_replica_context().merge_call(merge, args=(numbers,))

    def _publish(self, weights: Sequence[WeightInPieces]) -> None:
        """Ends an update: every process gets the pieces of all, for who reads them behind it."""

        def merge(_: tf.distribute.Strategy) -> None:
            unread = _apart_among(weights) if self._ends_with_update else []
            for weight in unread:
                weight.end_update()
            known = {id(weight) for weight in unread}
            read = [weight for weight in weights if id(weight) not in known]
            for weight, parts in self._gathered_among_processes(read):
                weight.publish(parts)

        distribute_lib.get_replica_context().merge_call(merge)

    def _gathered_among_processes(
        self, weights: Sequence[_Weight]
    ) -> Iterator[tuple[_Weight, list[tf.Tensor]]]:
        """The parts of each of some weights, of all processes' pieces."""
        places = [place for weight in weights for place in weight.places_of_parts()]
        pieces = [piece for weight in weights for piece in weight.read_pieces()]
        with record.stop_recording(), tf.device(self._host_device):
            parts = iter(gathered(self.between_processes, places, pieces))
        for weight in weights:
            yield weight, [next(parts) for _ in weight.rows.sizes]


class GroupsOfProcessesExtended(SharesAmongProcesses, ShardedGroupsExtended):
    """Groups of devices in a process that shares copies of the state with others."""

    _weight_class, _gathered_class, _slot_class = GroupWeight, GatheredGroupWeight, GroupSlot

    def _sum_parts(self, parts: list[list[tf.Tensor]], variables: list) -> list[list[tf.Tensor]]:
        """The sums of parts over replicas, and of pieces of them over processes."""
        if not self._is_updated_in_pieces(gradient_source()):
            return super()._sum_parts(parts, variables)
        places = [place for variable in variables for place in _places(variable)]
        firsts = [variable.rows.first for variable in variables]
        scattered = functools.partial(self._scattered_among_processes, places)
        return sum_parts(parts, firsts, self._groups, scattered)


class PipelinesOfProcessesExtended(SharesAmongProcesses, PipelinesOfGroupsExtended):
    """Pipelines in a process that shares copies of the state with others."""

    _weight_class, _gathered_class, _slot_class = StageWeight, GatheredStageWeight, StageSlot
    _scattering: list[PlaceOfPart | None] | None = None  # of sums on their way to processes

    def _sum_over_pipelines(
        self,
        sums: list[list],
        functions: Functions,
        source: GradientSource | None,
        homes: Homes | None,
    ) -> list:
        if source is None or homes is None or not self._is_updated_in_pieces(source):
            return super()._sum_over_pipelines(sums, functions, source, homes)
        self._scattering = list(_places_among(sums[0], source.variables))
        try:
            return super()._sum_over_pipelines(sums, functions, source, homes)
        finally:
            self._scattering = None

    def _sum_gradients_across_workers(self, gradients: list, source: GradientSource | None) -> list:
        places, self._scattering = self._scattering, None
        if places is None:
            return super()._sum_gradients_across_workers(gradients, source)
        return self._scattered_among_processes(places, gradients)


class _OwnNew(NewPieces):
    """What this process has of a slot under creation."""

    def __init__(self, value: tf.Tensor | Drawn, cut: PiecesOfParts):
        super().__init__(value, cut.every)
        self._pieces = cut

    def piece(self, index: int, device: str) -> tf.Tensor:
        """As the base's, of pieces of this process."""
        return super().piece(index * self._pieces.count + self._pieces.index, device)


def _apart_among(variables: Sequence) -> list[GatheredWeight]:
    return [each for each in variables if isinstance(each, GatheredWeight) and each.is_apart]


def _in_pieces(
    gradient: Gradient | None, variable: keras.Variable
) -> Gradient | GradientInParts | None:
    """The gradient of all rows as this process's pieces, if `variable` is in pieces."""
    weight = split_of(variable)
    if gradient is None or not isinstance(weight, WeightInPieces) or not weight.pieces_of_parts:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return GradientInParts(weight, slices=gradient)
    cut, known = weight.pieces_of_parts, known_parts(gradient)
    if known is not None and tuple(x.shape[cut.own.dim] for x in known[1]) == cut.own.sizes:
        return GradientInParts(weight, list(known[1]))
    pieces = []  # where all was summed: no Keras step was traced
    for k, part in enumerate(in_parts(gradient, weight) or []):
        with tf.device(part.device):
            pieces.append(cut.own_of(k, part))
    return GradientInParts(weight, pieces)


def _has_pieces(gradient: Gradient | GradientInParts) -> TypeGuard[GradientInParts]:
    """Whether it is this process's pieces: of a sparse one each process has the whole."""
    return isinstance(gradient, GradientInParts) and gradient.slices is None


def _places(variable: SplitVariable) -> list[PlaceOfPart | None]:
    """Of each part of a variable; None where that is not in pieces."""
    if isinstance(variable, WeightInPieces) and variable.pieces_of_parts is not None:
        return [*variable.places_of_parts()]
    return [None] * len(variable.rows.sizes)


def _places_among(sums: Sequence, variables: Sequence) -> Iterator[PlaceOfPart | None]:
    """Of each of some sums: of a dense gradient of a variable in parts there is one for each."""
    position = 0
    for variable in variables:
        split, is_sparse = split_of(variable), isinstance(sums[position], tf.IndexedSlices)
        places = [None] if split is None or is_sparse else _places(split)
        yield from places
        position += len(places)
