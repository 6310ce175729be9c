"""`jit_compile=True` trains as without it, or says at once why it cannot."""

import keras

from tests.conformance.case import Run, claim
from tests.helpers import BATCH, EVEN_ROWS, assert_same_training


def _train(run: Run, jit_compile: bool):
    def options():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return {"loss": loss, "metrics": ["accuracy"], "jit_compile": jit_compile}

    return run.train(compile_options=options, rows=EVEN_ROWS, batch_size=BATCH)


@claim(core=True)
def jit_compile_works_or_is_refused(run: Run):
    try:
        compiled = _train(run, jit_compile=True)
    except ValueError as error:
        assert run.row.num_replicas > 1, error
        assert "jit_compile" in str(error)
        return
    assert_same_training(_train(run, jit_compile=False), compiled)
