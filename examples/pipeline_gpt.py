r"""Train a small GPT on the source of Python's standard library, its layers on several devices.

Two devices (all GPUs, or two logical CPU devices where there is none), in a few minutes:

    python examples/pipeline_gpt.py

Four stages, another schedule, activations computed again in the backward pass:

    python examples/pipeline_gpt.py --stages 4 --schedule zero_bubble --rematerialize full

One device, for comparison; the losses are the same:

    python examples/pipeline_gpt.py --stages 1

A look at it in seconds:

    python examples/pipeline_gpt.py --quick

It prints what is on which stage, the loss, how busy the devices were in one step, and Python as the
model writes it. Model and text are in `small_gpt.py`.
"""

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from small_gpt import CHARACTERS, CONTEXT, compiled_gpt, open_cpus, training_data

import tfparallel

FLAGS = flags.FLAGS
flags.DEFINE_integer("stages", 2, "How many devices; 1 trains without a pipeline.")
flags.DEFINE_integer("microbatches", 8, "Parts of a batch.")
flags.DEFINE_string("schedule", "1f1b", "gpipe, 1f1b, interleaved_1f1b or zero_bubble.")
flags.DEFINE_string("rematerialize", "none", "none, except_last or full.")

PROMPT = "def "


def main(_: list[str]) -> None:
    """Trains, and prints what is described above."""
    keras.utils.set_random_seed(0)
    strategy = make_strategy()
    with strategy.scope():
        model = compiled_gpt()
    x, y = training_data()
    is_pipeline = FLAGS.stages > 1
    history = model.fit(
        x,
        y,
        batch_size=FLAGS.batch_size,
        shuffle=False,
        verbose=0 if FLAGS.quick else 1,
        callbacks=[tfparallel.callbacks.Measure(verbose=1)],
    )
    if is_pipeline:
        print(strategy.summary(model))
        print(strategy.profile(model, (x[: FLAGS.batch_size], y[: FLAGS.batch_size])))
    print(f"loss {history.history['loss'][-1]:.4f}")
    print(PROMPT + generate(model, PROMPT, 40 if FLAGS.quick else 400))


def make_strategy() -> tf.distribute.Strategy:
    """A pipeline over `--stages` devices, or plain training on one."""
    if FLAGS.stages == 1:
        return tfparallel.OneDeviceStrategy(f"{open_cpus(1)}:0")
    kind = open_cpus(FLAGS.stages)
    return tfparallel.PipelineStrategy(
        [f"{kind}:{i}" for i in range(FLAGS.stages)],
        FLAGS.microbatches,
        FLAGS.schedule,
        rematerialize=FLAGS.rematerialize,
    )


def generate(model: keras.Model, prompt: str, count: int) -> str:
    """`count` characters that follow `prompt`, drawn from the model's probabilities."""
    draw = np.random.default_rng(0)
    text = [ord(character) for character in prompt]
    for _ in range(count):
        seen = text[-CONTEXT:]
        tokens = np.zeros([1, CONTEXT], "int32")
        tokens[0, : len(seen)] = seen
        scores = model.predict_on_batch(tokens)[0, len(seen) - 1].astype("float64") / 0.8
        odds = np.exp(scores - scores.max())
        text.append(int(draw.choice(CHARACTERS, p=odds / odds.sum())))
    return "".join(map(chr, text[len(prompt) :]))


if __name__ == "__main__":
    app.run(main)
