"""Misuse that would train wrongly or crash far away is refused here, in the user's words."""

import dataclasses
import difflib
import inspect
import types
from collections.abc import Iterable, Mapping

import keras
import tensorflow as tf

from tfparallel.coordination.cluster import read_tf_config
from tfparallel.internals import DistributedVariable
from tfparallel.internals.distribute import num_replicas
from tfparallel.internals.keras_distribution_hooks import is_distribution_watched
from tfparallel.internals.keras_layers import behind, layers_of, losses_asked_for
from tfparallel.internals.keras_trainer import strategy_of
from tfparallel.replicas.device_names import Devices, all_devices_here, device_names, devices_here
from tfparallel.replicas.model_optimizers import optimizers_of

_THREE_LINES = (
    "Build and compile the model inside `with strategy.scope():` of the strategy it trains under, "
    "and call fit, evaluate and predict outside of any other strategy's scope."
)
_COPY_IT = (
    "A model that is there already is copied into the scope: `copy = keras.models.clone_model("
    "model); copy.set_weights(model.get_weights())`, and the copy compiled there. One of a file is "
    "loaded there: `keras.models.load_model(path)`."
)
ONE_SCOPE_AT_A_TIME = (
    "A model is built, compiled and trained under one strategy: leave the outer scope first, and "
    "call fit, evaluate and predict outside of any other strategy's scope."
)


def check_is_model(model: object) -> None:
    """Refuses what is no model, where a user names one.

    Raises:
        TypeError: saying what it is.
    """
    if not isinstance(model, keras.Model):
        kind = type(model).__name__
        raise TypeError(f"Expected a keras.Model. Received: {model!r}, of type {kind}.")


def check_model(strategy: tf.distribute.Strategy, model: keras.Model) -> None:
    """Refuses a model that was not built and compiled under `strategy`.

    Raises:
        TypeError: for what is no model.
        ValueError: naming what was created outside of the scope.
    """
    check_is_model(model)
    current = tf.distribute.get_strategy() if tf.distribute.has_strategy() else strategy
    if current is not strategy:
        raise ValueError(
            f"A model trains under the strategy it was built under. Received: model "
            f"'{model.name}' built under {_name(strategy)}, used inside the scope of another "
            f"strategy, {_name(current)}. {_THREE_LINES}"
        )
    if strategy_of(model) is not strategy:
        raise ValueError(
            f"Expected a model built under this {_name(strategy)}. Received: model "
            f"'{model.name}' built outside of its scope. {_THREE_LINES} {_COPY_IT}"
        )
    variables = [*model.variables, *(v for metric in model.metrics for v in metric.variables)]
    attributes = [getattr(loss, "__dict__", {}).values() for loss in losses_asked_for(model)]
    variables += [v for own in attributes for v in own if isinstance(v, keras.Variable)]
    outside = list(dict.fromkeys(v.path for v in variables if not belongs_to(v, strategy)))
    if outside:
        raise ValueError(
            f"Expected all variables of model '{model.name}', its metrics and losses to be created "
            f"in the scope of this {_name(strategy)}. Received: {len(outside)} created outside of "
            f"it: {outside[:5]}. {_THREE_LINES} {_COPY_IT}"
        )
    for optimizer in optimizers_of(model):
        for part in (optimizer, getattr(optimizer, "inner_optimizer", optimizer)):
            if not all(belongs_to(v, strategy) for v in part.variables):
                raise ValueError(
                    f"Expected model '{model.name}' to be compiled, and its optimizer to be "
                    f"created, in the scope of this {_name(strategy)}. Received: optimizer "
                    f"'{part.name}' created outside of it. {_THREE_LINES}"
                )


def check_compiled(model: keras.Model, what: str) -> None:
    """Refuses a model that is not compiled, for `what` takes a step of it."""
    if not model.compiled:
        raise ValueError(
            f"{what} takes a compiled model. Received: model '{model.name}', which is not. Call "
            "its compile() in the strategy's scope."
        )


def check_trained(
    strategy: tf.distribute.Strategy, optimizer: keras.Optimizer, variables: Iterable
) -> None:
    """Refuses variables that are not of the strategy which an optimizer was created under.

    Such an optimizer would train them on one device, without a word.

    Raises:
        ValueError: naming them, before the optimizer makes its slots.
    """
    trained = [v for v in variables if isinstance(v, keras.Variable)]
    outside = [v.path for v in trained if not belongs_to(v, strategy)]
    if outside:
        raise ValueError(
            f"Expected the variables that optimizer '{optimizer.name}' trains to be created in the "
            f"scope of this {_name(strategy)}, as it was itself. Received: {len(outside)} created "
            f"outside of it: {outside[:5]}. {_THREE_LINES} {_COPY_IT}"
        )


def check_is_method(step_function: object) -> None:
    """Refuses a step of a model that is a `tf.function` itself, or no method of the model.

    Raises:
        ValueError: at the first step.
    """
    if isinstance(step_function, tf.types.experimental.PolymorphicFunction):
        received = "a method decorated with @tf.function. Remove the decorator."
    elif not (
        isinstance(step_function, types.MethodType)
        and isinstance(step_function.__self__, keras.Model)
    ):
        received = f"{step_function!r}. Define it in the class, or set types.MethodType(it, model)."
    else:
        return
    raise ValueError(
        "train_step and test_step must be plain methods: the strategy splits the batch and joins "
        f"the gradients around them, and Keras compiles the whole. Received: {received}"
    )


def check_jit_compile(strategy: tf.distribute.Strategy, model: keras.Model) -> None:
    """Refuses `jit_compile=True` where one XLA program would need several devices.

    Raises:
        ValueError: at the first step, before XLA sees it.
    """
    if not model.jit_compile:
        return
    devices = strategy.extended.worker_devices
    parameter_devices = strategy.extended.parameter_devices
    if len(devices) == 1 and set(parameter_devices) != set(devices):
        raise ValueError(
            "jit_compile=True needs the variables where XLA computes. Received: variables on "
            f"{', '.join(parameter_devices)}, computation on {devices[0]}. Take one device for "
            "both, or compile the model with jit_compile=False."
        )
    if num_replicas(strategy) == 1:
        if (tf.DeviceSpec.from_string(devices[0]).device_index or 0) > 0:
            raise ValueError(
                "jit_compile=True needs the first device of its kind, for which XLA compiles. "
                f"Received: {devices[0]}. Take that device's number 0 (hide the others with "
                "tf.config.set_visible_devices), or compile the model with jit_compile=False."
            )
        return
    if len(devices) > 1:
        raise ValueError(
            "jit_compile=True needs one replica per process: XLA compiles a step for one device. "
            f"Received: {len(devices)} replicas in this process ({', '.join(devices)}). Compile "
            "the model with jit_compile=False, or start one process per device."
        )
    raise ValueError(
        "jit_compile=True needs one process: XLA compiles one group of collectives into a program, "
        "and a step of several workers has two, for gradients and for metrics. Received: "
        f"{type(strategy).__name__} of {num_replicas(strategy)} workers. Compile the model with "
        "jit_compile=False."
    )


def check_states_of_rows(strategy: tf.distribute.Strategy, model: keras.Model) -> None:
    """Refuses `stateful=True`, a state for each row that goes on from batch to batch.

    Raises:
        ValueError: naming the layers.
    """
    found = [x for x in layers_of(model) if isinstance(x, keras.layers.RNN) and x.stateful]
    if found:
        raise ValueError(
            "stateful=True keeps a state for each row of the batch, from one batch to the next, "
            "and needs one device that computes all rows of all batches. Received: layers "
            f"{[layer.name for layer in found][:5]} of model '{model.name}' under "
            f"{_name(strategy)}, which divides rows or batches. Give the states to the model as "
            "inputs (initial_state) and take them from its outputs (return_state=True), or use "
            "stateful=False."
        )


def check_jit_compile_of_predict(strategy: tf.distribute.Strategy, model: keras.Model) -> None:
    """Refuses `jit_compile=True` where a replica cannot predict by itself.

    Raises:
        ValueError: at the first batch, before XLA sees it.
    """
    if model.jit_compile and not strategy.extended._xla_can_predict:
        raise ValueError(
            "jit_compile=True needs the whole model on each device that predicts. Received: "
            f"{_name(strategy)}, which has it on others. Compile the model with jit_compile=False."
        )


def check_keywords(strategy_class: type, keywords: Mapping[str, object]) -> None:
    """Refuses keywords that a strategy's constructor does not have.

    Raises:
        TypeError: with the keyword that was probably meant.
    """
    parameters = inspect.signature(strategy_class).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    groups = getattr(strategy_class, "_groups_of_options", {})
    for keyword in keywords:
        if keyword not in parameters:
            for name, group in groups.items():
                if keyword in {field.name for field in dataclasses.fields(group)}:
                    raise TypeError(
                        f"{strategy_class.__name__} has no argument '{keyword}'. It is one of "
                        f"{name}=tfparallel.{group.__name__}({keyword}={keywords[keyword]!r})."
                    )
            alike = difflib.get_close_matches(keyword, parameters, n=1, cutoff=0.5)
            hint = f"Did you mean '{alike[0]}'? " if alike else ""
            raise TypeError(
                f"{strategy_class.__name__} has no argument '{keyword}'. {hint}"
                f"Its arguments are {', '.join(parameters)}."
            )


def check_scopes(strategy: tf.distribute.Strategy) -> None:
    """Refuses a scope inside of another strategy's.

    Raises:
        RuntimeError: naming both.
    """
    if not tf.distribute.has_strategy():
        return
    outer = tf.distribute.get_strategy()
    if outer is not strategy:
        raise RuntimeError(
            f"Expected one strategy's scope at a time. Received: the scope of {strategy!r} inside "
            f"of that of {described(outer)}. {ONE_SCOPE_AT_A_TIME}"
        )


def check_keras_distribution(strategy: tf.distribute.Strategy) -> None:
    """Refuses a `keras.distribution` that is set beside a strategy: Keras would follow neither.

    Raises:
        RuntimeError: naming both.
    """
    distribution = keras.distribution.distribution()
    if distribution is not None and not is_distribution_watched():
        raise RuntimeError(
            f"Expected {strategy!r} to be the only one that says where the model is. Received: "
            f"also keras.distribution's {type(distribution).__name__}, set by "
            "`keras.distribution.set_distribution`. Unset it with "
            "`keras.distribution.set_distribution(None)`; or use it alone, after "
            "`tfparallel.keras_distribution.enable()`."
        )


def check_is_keras_3(function: object) -> None:
    """Refuses the steps of Keras 2 (`tf_keras`), which would not train as one device does.

    Raises:
        RuntimeError: with what turns Keras 3 on.
    """
    module = getattr(getattr(function, "python_function", function), "__module__", "") or ""
    if module.partition(".")[0] == "tf_keras":
        raise RuntimeError(
            "Expected a model of Keras 3. Received: one of Keras 2 (the package tf_keras, which "
            "`tf.keras` is where TF_USE_LEGACY_KERAS=1 is set). Unset TF_USE_LEGACY_KERAS, and use "
            "`import keras` instead of `import tf_keras`."
        )


def check_devices(devices: Devices | None, what: str = "devices") -> list[str] | None:
    """The names of devices; refuses those that do not exist, or one device named twice.

    Args:
        devices: as `device_names` takes them, or None for all.
        what: the argument's name, for the message.

    Raises:
        ValueError: listing the devices that exist.
    """
    if devices is None:
        return None
    devices = device_names(devices, what)
    if not devices:
        raise ValueError(f"`{what}` needs at least one device. Received: an empty list.")
    existing = {(d.device_type, _index(d.name)): d.name for d in devices_here()}
    seen: dict[tuple, str] = {}
    for device in devices:
        key = _parse(device, what)
        if key not in existing:
            raise ValueError(
                f"`{what}` must name devices of this process. Received: {device!r}. There are: "
                f"{sorted(existing.values())}. Logical CPU devices are made by "
                "`tf.config.set_logical_device_configuration` before TensorFlow starts."
            )
        if key in seen:
            raise ValueError(
                f"`{what}` must name each device once. Received: {seen[key]!r} and {device!r}, "
                "the same device."
            )
        seen[key] = device
    return devices


def devices_of_process(devices: Devices | None, what: str = "devices") -> list[str] | None:
    """As `check_devices`; without any, all that this process has, also among others of a cluster.

    None where `TF_CONFIG` names a cluster, of which TensorFlow has something to say.
    """
    if devices is None and read_tf_config() is None:
        return all_devices_here()
    return check_devices(devices, what)


def check_device(device: Devices, what: str = "device") -> list[str]:
    """A list of the name of one device, given in any way that `check_devices` takes; or its number.

    Raises:
        ValueError: for none or several, or one that does not exist.
    """
    names = check_devices([device] if isinstance(device, int) else device, what) or []
    if len(names) != 1:
        raise ValueError(
            f"`{what}` must be one device, such as 'GPU:0'. Received: {device!r}. For several, "
            "take MirroredStrategy or another strategy."
        )
    return names


def _parse(device: object, what: str) -> tuple[str, int]:
    try:
        spec = tf.DeviceSpec.from_string(str(device) if "/" in str(device) else f"/device:{device}")
    except ValueError as error:
        raise ValueError(
            f"`{what}` takes names such as 'GPU:0'. Received: {device!r} ({error})."
        ) from error
    return (spec.device_type or "").upper(), spec.device_index or 0


def _index(name: str) -> int:
    return tf.DeviceSpec.from_string(name).device_index


def belongs_to(variable: keras.Variable, strategy: tf.distribute.Strategy) -> bool:
    """Whether `variable` was created in the scope of `strategy`, or has not been created yet."""
    value = behind(variable)
    if value is None:
        return True
    return isinstance(value, DistributedVariable) and value.distribute_strategy is strategy


def described(strategy: tf.distribute.Strategy) -> str:
    """A strategy for a message; TensorFlow's own have no `repr` that says what they are."""
    if _is_tensorflows(strategy):
        return f"{_name(strategy)} of {strategy.num_replicas_in_sync} replicas"
    return repr(strategy)


def _name(strategy: tf.distribute.Strategy) -> str:
    name = type(strategy).__name__
    return f"tf.distribute.{name}" if _is_tensorflows(strategy) else name


def _is_tensorflows(strategy: tf.distribute.Strategy) -> bool:
    return type(strategy).__module__.startswith("tensorflow.")
