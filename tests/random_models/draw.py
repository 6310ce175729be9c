"""How random trainings are drawn; everything that is drawn can be built and trained by Keras."""

from hypothesis import strategies as st

from tests.random_models.layers import KINDS, shape_of, shapes_of
from tests.random_models.pools import POOLS
from tests.random_models.spec import (
    Distribution,
    Fit,
    Layer,
    Model,
    Nested,
    Node,
    Output,
    Shape,
    Trial,
)

INPUTS = ((3,), (4,), (4, 3), (4, 4, 2), ("tokens",))
TARGETS = {
    "mse": 2,
    "huber": 1,
    "sparse_categorical_crossentropy": 3,
    "of_probabilities": 3,
    "sum_of_squares": 2,
    "weighted_ratio": 1,
}
REDUCTIONS = ("sum_over_batch_size", "sum", "mean", "mean_with_sample_weight")
_OF_CLASSES = ("sparse_categorical_accuracy", "sparse_categorical_crossentropy")
METRICS = {
    "mse": ("mae", "mse"),
    "huber": ("mae", "mse"),
    "sum_of_squares": ("mae", "mse"),
    "weighted_ratio": ("mae", "mse"),
    "sparse_categorical_crossentropy": _OF_CLASSES,
    "of_probabilities": _OF_CLASSES,
}
OPTIMIZERS = {
    "SGD": {"learning_rate": 0.05, "momentum": 0.9},
    "Adam": {"learning_rate": 0.01},
    "RMSprop": {"learning_rate": 0.01},
    "AdamW": {"learning_rate": 0.01, "weight_decay": 0.1},
}
OPTIMIZER_OPTIONS = (
    {},
    {"clipnorm": 0.05},
    {"global_clipnorm": 0.1},
    {"clipvalue": 0.02},
    {"use_ema": True, "ema_momentum": 0.5},
    {"use_ema": True, "ema_overwrite_frequency": 2},
    {"gradient_accumulation_steps": 2},
)
SCHEDULES = ("1f1b", "gpipe", "zero_bubble", "interleaved_1f1b")
# What a replica or microbatch computes of its own rows only, by design.
OWN_MASKS = ("dropout",)
OWN_ROWS = ("own_batch_norm",)
# What a pipeline refuses, as microbatches follow one another.
ALL_ROWS = ("batch_norm",)
MESHES = (
    {"data": 2, "shard": 2},
    {"data": 2, "pipeline": 2},
    {"data": 2, "model": 2},
    {"shard": 2, "pipeline": 2},
    {"shard": 2, "model": 2},
    {"pipeline": 2, "model": 2},
)
LOW_PRECISION = ("float32", "mixed_bfloat16", "mixed_float16")


@st.composite
def layers(draw, shapes: tuple[Shape, ...], without: tuple[str, ...] = ()) -> Layer:
    """A layer that can be called with values of `shapes`."""
    kinds = [
        name
        for name, kind in KINDS.items()
        if name not in without and _takes(name, kind.takes, shapes)
    ]
    name = draw(st.sampled_from(kinds))
    options = {key: draw(st.sampled_from(of)) for key, of in KINDS[name].options.items()}
    return Layer(name, options)


def _takes(name: str, takes, shapes: tuple[Shape, ...]) -> bool:
    if (name == "embedding") != (("tokens",) in shapes):
        return False
    try:
        return takes(*shapes)
    except TypeError:  # of one value, and there are two
        return False


@st.composite
def nested(draw, shape: Shape, without: tuple[str, ...]) -> Nested:
    """A model of one to three layers."""
    kind = draw(st.sampled_from(("sequential", "functional", "subclassed")))
    found = []
    for _ in range(draw(st.integers(1, 3))):
        found.append(draw(layers((shape,), without)))
        shape = shape_of(found[-1], shape)
    return Nested(kind, tuple(found))


@st.composite
def models(draw, min_layers: int, without: tuple[str, ...]) -> Model:
    """A model of at least `min_layers` nodes, its heads not counted."""
    inputs = draw(st.lists(st.sampled_from(INPUTS), min_size=1, max_size=2).map(tuple))
    shapes: list[Shape] = list(inputs)
    nodes: list[Node] = []

    def add(node: Node) -> None:
        layer = node.layer if node.again is None else nodes[node.again].layer
        nodes.append(node)
        shapes.append(shape_of(layer, *(shapes[value] for value in node.values)))

    for value, shape in enumerate(inputs):
        if shape == ("tokens",):
            add(Node((value,), draw(layers((shape,)))))
    usable = [value for value, shape in enumerate(shapes) if shape != ("tokens",)]
    unused = set(usable)
    for _ in range(draw(st.integers(min_layers, min_layers + 5))):
        value = draw(st.sampled_from(usable[-3:] + sorted(unused)))
        node = draw(_nodes(value, shapes, nodes, usable, without))
        add(node)
        usable.append(len(shapes) - 1)
        unused = (unused - set(node.values)) | {len(shapes) - 1}
    outputs = tuple(draw(_outputs(value)) for value in sorted(unused))
    policy = draw(st.sampled_from(("float64", "float64", "float64", *LOW_PRECISION)))
    heads = ("float32", policy) if policy in LOW_PRECISION else (policy,)
    return Model(inputs, tuple(nodes), outputs, policy, draw(st.sampled_from(heads)))


@st.composite
def _nodes(draw, value: int, shapes: list, nodes: list, usable: list, without: tuple) -> Node:
    shape = shapes[value]
    again = [
        i
        for i, node in enumerate(nodes)
        if node.again is None and len(node.values) == 1 and shapes[node.values[0]] == shape
    ]
    alike = [other for other in usable if shapes[other] == shape]
    how = draw(st.sampled_from(("layer", "layer", "merge", "nested", "again")))
    if how == "again" and again:
        return Node((value,), again=draw(st.sampled_from(again)))
    if how == "merge":
        values = (value, draw(st.sampled_from(alike)))
        return Node(values, draw(layers((shape, shape), without)))
    if how == "nested":
        return Node((value,), draw(nested(shape, without)))
    return Node((value,), draw(layers((shape,), without)))


@st.composite
def _outputs(draw, value: int) -> Output:
    loss = draw(st.sampled_from(sorted(TARGETS)))
    some = st.lists(st.sampled_from(METRICS[loss]), max_size=1).map(tuple)
    return Output(
        value,
        TARGETS[loss],
        loss,
        draw(st.sampled_from(REDUCTIONS)),
        draw(st.sampled_from((1.0, 0.3))),
        draw(some),
        draw(some),
    )


@st.composite
def fits(draw, model: Model) -> Fit:
    """Two steps; of low precision by SGD, as the others divide by what may be rounding."""
    of_low = model.policy in LOW_PRECISION
    optimizer = draw(st.sampled_from(("SGD",) if of_low else sorted(OPTIMIZERS)))
    batch_size = draw(st.integers(1, 7))
    weights = ["sample", None]
    first = model.outputs[0]
    judges_rows = len(model.outputs) == 1 and len(shapes_of(model)[first.value]) == 1
    if judges_rows and first.loss == "sparse_categorical_crossentropy":
        weights.append("class")
    return Fit(
        optimizer,
        OPTIMIZERS[optimizer] | draw(st.sampled_from(OPTIMIZER_OPTIONS)),
        batch_size,
        draw(st.integers(1, batch_size)),
        draw(st.sampled_from(weights)),
        draw(st.sampled_from((1, 1, 2))),
    )


@st.composite
def local_trials(draw) -> Trial:
    """Under replicas in this process, or one device."""
    name = draw(st.sampled_from(("Mirrored", "Mirrored", "CentralStorage", "OneDevice")))
    if name == "OneDevice":
        arguments = {"device": "CPU:0"}
    else:
        arguments = {"devices" if name == "Mirrored" else "compute_devices": draw(_devices(2, 4))}
    model = draw(models(1, () if name == "OneDevice" else (*OWN_MASKS, *OWN_ROWS)))
    return Trial(model, draw(fits(model)), Distribution(name, arguments))


@st.composite
def sharded_trials(draw) -> Trial:
    """Under shards of weights and slots, or of layers."""
    if draw(st.booleans()):
        arguments = {
            "devices": draw(_devices(2, 4)),
            "shard": draw(st.sampled_from(("parameters", "gradients", "optimizer"))),
            "min_size": draw(st.sampled_from((1, 10))),
        }
        distribution = Distribution("Sharded", arguments)
    else:
        mesh = draw(st.sampled_from(((1, 2), (2, 2), (1, 3), (1, 4))))
        distribution = Distribution("TensorParallel", {"mesh": mesh})
    model = draw(models(1, (*OWN_MASKS, *OWN_ROWS)))
    return Trial(model, draw(fits(model)), distribution)


@st.composite
def pipeline_trials(draw) -> Trial:
    """Under pipelines, whose stages need a layer each."""
    devices = draw(_devices(1, 3))
    schedule = draw(st.sampled_from(SCHEDULES))
    is_interleaved = schedule == "interleaved_1f1b"
    arguments = {
        "devices": devices,
        "num_microbatches": draw(st.integers(1, 4)),
        "schedule": schedule,
        "rematerialize": draw(st.sampled_from(("none", "none", "full", "except_last"))),
    }
    own_rows = () if arguments["num_microbatches"] == 1 else OWN_ROWS
    without = (*OWN_MASKS, *ALL_ROWS, *own_rows)
    model = draw(models(len(devices) * (2 if is_interleaved else 1), without))
    return Trial(model, draw(fits(model)), Distribution("Pipeline", arguments))


@st.composite
def hybrid_trials(draw) -> Trial:
    """On meshes of two axes; where seeds are by row, Dropout is that of one device."""
    sizes = draw(st.sampled_from(MESHES))
    seed_by = draw(st.sampled_from(("replica", "row")))
    masks = OWN_MASKS if seed_by == "replica" else ()
    without = (*masks, *OWN_ROWS, *(ALL_ROWS if "pipeline" in sizes else ()))
    model = draw(models(sizes.get("pipeline", 1), without))
    distribution = Distribution("Hybrid", {"sizes": sizes, "seed_by": seed_by})
    return Trial(model, draw(fits(model)), distribution)


@st.composite
def worker_trials(draw) -> Trial:
    """Under processes that stay up, a pool for each of `pools.POOLS`."""
    name = draw(st.sampled_from(tuple(POOLS)))
    model = draw(models(1, (*OWN_MASKS, *OWN_ROWS)))
    return Trial(model, draw(fits(model)), Distribution("Workers", {"pool": name}))


def _devices(least: int, most: int) -> st.SearchStrategy[list[str]]:
    return st.integers(least, most).map(lambda count: [f"CPU:{i}" for i in range(count)])
