"""When each pass of one training step starts and ends, of a step that leaves no trace."""

import keras
import tensorflow as tf

from tfparallel.internals.keras_trainer import build_from_shapes
from tfparallel.pipeline.no_trace import python_as_it_was, variables_as_they_were
from tfparallel.pipeline.summary import short_name
from tfparallel.pipeline.swimlane import Swimlane, swimlane
from tfparallel.replicas.checks import check_compiled, check_model


def measure_step(strategy: tf.distribute.Strategy, model: keras.Model, batch: object) -> Swimlane:
    """Runs two steps, and measures the second; see `PipelineStrategy.profile`."""
    extended = strategy.extended
    strategy = extended.outermost()
    check_model(strategy, model)
    check_compiled(model, "profile")
    batch = keras.tree.map_structure(tf.convert_to_tensor, batch)
    with strategy.scope():
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        build_from_shapes(model, (x, y, weight))
        model.optimizer.build(model.trainable_variables)

        @tf.function
        def step(batch: object) -> list[tf.Tensor]:
            strategy.run(model.train_step, args=(batch,))
            times.update(extended._times)
            return [times[action] for action in times]

        times: dict = {}
        with python_as_it_was(model):
            with extended._with_clock():
                traced = step.get_concrete_function(batch)
            with variables_as_they_were(traced):
                step(batch)
                measured = step(batch)
    times_s = {action: tuple(own.numpy()) for action, own in zip(times, measured, strict=True)}
    together = extended._pipelines_together()
    return swimlane(together, times_s, list(map(short_name, together.devices)))
