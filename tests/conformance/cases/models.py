"""Every model trains, evaluates and predicts as on one device, with an uneven last batch."""

import time

import keras
import tensorflow as tf

from tests.conformance.case import Run, add_case, case
from tests.conformance.models import MODELS
from tests.helpers import (
    BATCH,
    ODD_BATCH,
    SEED,
    UNEVEN_ROWS,
    Training,
    momentum_sgd,
    numbered,
    tiny_compile_options,
    tiny_data,
    tiny_model,
)


def _train_evaluate_predict(run: Run, model: str) -> dict:
    training = run.train(model, rows=UNEVEN_ROWS, batch_size=BATCH)
    x, y = MODELS[model].data(ODD_BATCH)
    evaluated = training.model.evaluate(x, y, ODD_BATCH, verbose=0, return_dict=True)
    predicted = training.model.predict(x, ODD_BATCH, verbose=0)
    return {
        **training.results(),
        **{f"evaluate/{name}": value for name, value in evaluated.items()},
        **numbered("predict", keras.tree.flatten(predicted)),
    }


for _name in MODELS:
    add_case(
        f"models.{_name}",
        lambda run, name=_name: _train_evaluate_predict(run, name),
        core=_name in ("mlp", "cnn", "embedding", "grouped_convolution"),
    )


@case(core=True)
def initial_weights_are_those_of_the_first_worker(run: Run):
    """Workers that draw different ones start from the same."""
    keras.utils.set_random_seed(run.rank)
    with run.scope():
        model = tiny_model()
        model.compile(optimizer=momentum_sgd(), **tiny_compile_options())
    initial = numbered("initial", model.get_weights())
    keras.utils.set_random_seed(SEED)  # of which the order of the data would depend
    x, y = tiny_data(ODD_BATCH)
    history = model.fit(x, y, batch_size=ODD_BATCH, shuffle=False, verbose=0).history
    return Training(model, history, initial).results()


class TimedDense(keras.layers.Dense):
    """May take long where it is run outside of a graph, as a pipeline measures its layers."""

    def __init__(self, units: int, seconds: float):
        super().__init__(units)
        self.seconds = seconds

    def call(self, inputs):
        if tf.executing_eagerly():
            time.sleep(self.seconds)
        return super().call(inputs)


@case()
def layers_that_take_other_times_on_each_worker(run: Run):
    """Whoever divides layers by their times must divide them alike in every process."""
    seconds = (0.05, 0.0, 0.0, 0.0) if run.rank == 0 else (0.0, 0.0, 0.0, 0.05)

    def build():
        layers = [TimedDense(*each) for each in zip((8, 4, 5, 3), seconds, strict=True)]
        return keras.Sequential([keras.Input((6,)), *layers])

    import tfparallel  # in the process of the strategy

    training = run.train(build=build)
    if isinstance(pipeline := getattr(run.strategy, "inner", None), tfparallel.PipelineStrategy):
        stages = pipeline.stages(training.model).stage_of
        (run.folder / f"stages{run.rank}").write_text(str(stages))
        run.barrier()
        assert len({file.read_text() for file in run.folder.glob("stages*")}) == 1
    return training.results()
