r"""Train a small GPT on a mesh: pipelines beside one another, each with its rows of every batch.

Two pipelines of four stages on eight devices (all GPUs, or eight logical CPU devices where there is
none), in a few minutes:

    python examples/hybrid_gpt.py

Four pipelines of two stages, another schedule:

    python examples/hybrid_gpt.py --pipelines 4 --stages 2 --schedule zero_bubble

Two pipelines of two stages, each stage with the matrices of its layers in parts on two devices:

    python examples/hybrid_gpt.py --pipelines 2 --stages 2 --parts 2

Two processes of two pipelines each, the rows of a batch divided by four:

    horovodrun -np 2 python examples/hybrid_gpt.py --pipelines 2 --stages 2 --processes

A look at it in seconds:

    python examples/hybrid_gpt.py --quick

The losses are those of one device, `python examples/pipeline_gpt.py --stages 1`, whatever the mesh.
It prints what is on which stage, the loss, and how busy the first pipeline was in one step. Model
and text are in `small_gpt.py`, options of the pipeline in `pipeline_gpt.py`.
"""

import keras
import pipeline_gpt  # noqa: F401 (its flags)
import tensorflow as tf
from absl import app, flags
from small_gpt import compiled_gpt, open_cpus, training_data

import tfparallel

FLAGS = flags.FLAGS
flags.DEFINE_integer("pipelines", 2, "Places along the axis of data.")
flags.DEFINE_integer("parts", 1, "Places along the axis of the model.")
flags.DEFINE_bool("processes", False, "Whether horovodrun has started several of these.")
flags.FLAGS.set_default("stages", 4)
flags.FLAGS.set_default("microbatches", 4)


def main(_: list[str]) -> None:
    """Trains, and prints what is described above."""
    keras.utils.set_random_seed(0)
    strategy = make_strategy()
    on_mesh = strategy.inner if FLAGS.processes else strategy
    with strategy.scope():
        model = compiled_gpt()
    x, y = training_data()
    history = model.fit(
        x,
        y,
        batch_size=FLAGS.batch_size,
        shuffle=False,
        verbose=0,
        callbacks=[tfparallel.callbacks.Measure(verbose=1)],
    )
    print(on_mesh.summary(model))
    print(on_mesh.profile(model, (x[: FLAGS.batch_size], y[: FLAGS.batch_size])))
    print(f"loss {history.history['loss'][-1]:.4f}")


def make_strategy() -> tf.distribute.Strategy:
    """A mesh of `--pipelines` x `--stages` x `--parts` devices, in each process that trains."""
    open_cpus(FLAGS.pipelines * FLAGS.stages * FLAGS.parts)
    return tfparallel.HorovodStrategy(inner=make_mesh) if FLAGS.processes else make_mesh()


def make_mesh() -> tf.distribute.Strategy:
    """The mesh of one process."""
    axes = {"data": FLAGS.pipelines, "pipeline": FLAGS.stages}
    options = tfparallel.PipelineOptions(
        FLAGS.microbatches, FLAGS.schedule, rematerialize=FLAGS.rematerialize
    )
    if FLAGS.parts == 1:
        return tfparallel.HybridStrategy(axes, pipeline=options)
    return tfparallel.HybridStrategy(
        {**axes, "model": FLAGS.parts}, pipeline=options, layout_map=layout_of_blocks()
    )


def layout_of_blocks() -> keras.distribution.LayoutMap:
    """Attention by heads; the two layers behind it by columns, then rows."""
    layout_map = keras.distribution.LayoutMap(None)  # of the strategy's mesh
    layout_map[".*attention/(query|key|value)/kernel"] = (None, "model", None)
    layout_map[".*attention/(query|key|value)/bias"] = ("model", None)
    layout_map[".*attention/attention_output/kernel"] = ("model", None, None)
    layout_map[".*widen/kernel"] = (None, "model")
    layout_map[".*widen/bias"] = ("model",)
    layout_map[".*narrow/kernel"] = ("model", None)
    return layout_map


if __name__ == "__main__":
    app.run(main)
