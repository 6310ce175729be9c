"""What creates a variable under a strategy: optimizers and seed generators get their hooks then."""

import keras
import tensorflow as tf

from tfparallel.internals import (
    BaseOptimizer,
)
from tfparallel.replicas.optimizer_hooks import hook_optimizer
from tfparallel.replicas.seed_hooks import hook_seed_generator


def hook_owner(owner: object, strategy: tf.distribute.Strategy) -> None:
    """Hooks the optimizer or seed generator that creates a variable under `strategy`."""
    if isinstance(owner, BaseOptimizer):
        hook_optimizer(owner, strategy)
    elif isinstance(owner, keras.random.SeedGenerator):
        hook_seed_generator(owner, strategy)
