"""What the tests of meshes share."""

import keras
import pytest


@pytest.fixture(autouse=True)
def _layers_are_numbered_from_zero():
    """`LayoutOfAnything` goes by the numbers in layers' names."""
    keras.backend.clear_session()
