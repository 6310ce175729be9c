import dataclasses
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import keras
import numpy as np
import pytest

from tfparallel.coordination.timeouts import WorkerTimeouts
from tfparallel.launch.config import ConfigError, build_strategy, load_config
from tfparallel.launch.option_sections import Compression, WaitLimits
from tfparallel.launch.strategy_sections import STRATEGIES

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def write(tmp_path):
    def write_file(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return write_file


def problems_of(path, overrides=()) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as info:
        load_config(path, overrides)
    return info.value.problems


def name_of(section) -> str:
    return get_args(section.model_fields["name"].annotation)[0]


# ---- reading -------------------------------------------------------------------------------------


def test_what_a_file_leaves_out_has_a_default(write):
    config = load_config(write(""))
    assert config.strategy.name == "one_device"
    assert config.data.global_batch_size == 64


def test_a_section_without_keys_has_its_defaults(write):
    assert load_config(write("training:\n  # epochs: 1\n")).training.epochs == 3


def test_strategy_section_holds_the_arguments_of_its_strategy(write):
    config = load_config(write("strategy: {name: mirrored, devices: ['CPU:0', 'CPU:1']}"))
    assert config.strategy.devices == ["CPU:0", "CPU:1"]


def test_exponent_without_a_point_is_a_number(write):
    assert load_config(write("optimizer: {learning_rate: 1e-3}")).optimizer.learning_rate == 0.001


def test_sections_can_share_keys_by_a_merge(write):
    text = "training: &base {epochs: 5, seed: 1}\n"
    assert load_config(write(text)).training.epochs == 5
    with pytest.raises(ConfigError, match="base: unknown key"):
        load_config(write("base: &base {epochs: 5}\ntraining: {<<: *base, epochs: 2}"))


# ---- overrides -----------------------------------------------------------------------------------


def test_overrides_win_over_the_file_and_later_ones_over_earlier(write):
    path = write("training: {epochs: 1, seed: 1}")
    config = load_config(path, ["training.epochs=2", "training.epochs=3"])
    assert (config.training.epochs, config.training.seed) == (3, 1)


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("training.epochs=7", "training", "epochs", 7),
        ("optimizer.learning_rate=1e-4", "optimizer", "learning_rate", 1e-4),
        ("optimizer.global_clipnorm=null", "optimizer", "global_clipnorm", None),
        ("optimizer.name=adam", "optimizer", "name", "adam"),
        ("model.filters=[8, 8]", "model", "filters", [8, 8]),
    ],
)
def test_override_values_are_yaml(write, override, section, key, value):
    config = load_config(write(""), [override])
    assert getattr(getattr(config, section), key) == value


@pytest.mark.parametrize("override", ["training.epochs", "=3", "training.=3", ".epochs=3"])
def test_rejects_an_override_without_path_or_value(write, override):
    assert problems_of(write(""), [override]) == (
        f"expected section.key=value. Received: {override!r}.",
    )


def test_rejects_an_override_below_a_value(write):
    assert problems_of(write(""), ["training.epochs=1", "training.epochs.more=2"]) == (
        "training.epochs.more: expected a section at training.epochs. Received: 1.",
    )


# ---- mistakes ------------------------------------------------------------------------------------


def test_all_mistakes_come_at_once(write):
    path = write(
        """
        strategy: {name: mirrored, devices: [CPU:0, 1]}
        training: {epochs: 0}
        trainng: {}
        data: {global_batch_size: many}
        """
    )
    assert problems_of(path, ["model.dropout=1.5", "seed"]) == (
        "expected section.key=value. Received: 'seed'.",
        "strategy.devices.1: should be a valid string. Received: 1.",
        "model.dropout: should be less than 1. Received: 1.5.",
        "data.global_batch_size: should be a valid integer. Received: 'many'.",
        "training.epochs: should be greater than or equal to 1. Received: 0.",
        "trainng: unknown key. Did you mean training?",
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        # the same section
        ("training: {epoch: 1}", "training.epoch: unknown key. Did you mean training.epochs?"),
        (
            "strategy: {name: mirrored, device: x}",
            "strategy.device: unknown key. Did you mean strategy.devices?",
        ),
        (
            "strategy: {name: multi_worker_mirrored, communication: {timeout_s: 1.0}}",
            "strategy.communication.timeout_s: unknown key. "
            "Did you mean strategy.communication.timeout_seconds?",
        ),
        # another section
        ("epochs: 1", "epochs: unknown key. Did you mean training.epochs?"),
        (
            "training: {learning_rate: 0.1}",
            "training.learning_rate: unknown key. Did you mean optimizer.learning_rate?",
        ),
        # nothing close
        (
            "data: {xyzzy: 1}",
            "data.xyzzy: unknown key. "
            "Known keys: data.train_examples, data.global_batch_size, data.drop_remainder.",
        ),
    ],
)
def test_unknown_key_comes_with_a_suggestion(write, text, problem):
    assert problems_of(write(text)) == (problem,)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "strategy: {name: mirored}",
            "strategy.name: should be one of 'one_device', 'mirrored', 'sharded', "
            "'tensor_parallel', 'multi_worker_mirrored', 'horovod', 'central_storage', "
            "'parameter_server', 'pipeline', 'hybrid', 'tpu'. Received: 'mirored'. "
            "Did you mean mirrored?",
        ),
        ("strategy: {devices: [a]}", "strategy.name: is required. Received: nothing."),
        (
            "strategy: mirrored",
            "strategy: should be a section of its own, `key: value`. Received: 'mirrored'.",
        ),
        (
            "optimizer: {name: SGD}",
            "optimizer.name: should be 'sgd', 'adam' or 'adamw'. Received: 'SGD'. "
            "Did you mean sgd?",
        ),
        (
            "optimizer: {name: adam, momentum: 0.9}",
            "optimizer: momentum must be left out for adam, which has its own. Received: 0.9.",
        ),
        ("training: {epochs: true}", "training.epochs: should be a valid integer. Received: True."),
        # YAML 1.2 knows no yes and no base 60
        ("training: {epochs: yes}", "training.epochs: should be a valid integer. Received: 'yes'."),
        ("training: {seed: 1:30}", "training.seed: should be a valid integer. Received: '1:30'."),
        ("training: {seed: '3'}", "training.seed: should be a valid integer. Received: '3'."),
        (
            "optimizer: {learning_rate: .nan}",
            "optimizer.learning_rate: should be a finite number. Received: nan.",
        ),
        ("[1, 2]", "expected sections such as `training:`. Received: [1, 2]."),
    ],
)
def test_mistake_names_expectation_and_what_arrived(write, text, problem):
    assert problems_of(write(text)) == (problem,)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("training:\n  epochs: [1\ndata: {}\n", "line 3, column 5: expected YAML."),
        ("training:\n\tepochs: 1\n", "line 2, column 1: expected YAML."),
        ("data: {}\ntraining:\n  epochs: 1\n  epochs: 2\n", "line 4, column 3: expected YAML."),
    ],
)
def test_malformed_yaml_names_the_line(write, text, where):
    (problem,) = problems_of(write(text))
    assert problem.startswith(where)


def test_malformed_override_names_itself(write):
    (problem,) = problems_of(write(""), ["training.epochs=[1"])
    assert problem.startswith("training.epochs: in 'training.epochs=[1', line 1, column 3:")


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"when: 2024-99-99"])
def test_content_that_yaml_cannot_decode_is_a_config_error(tmp_path, content):
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    assert problems_of(path)[0].startswith("expected YAML.")


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml has 1 mistake(.|\n)*No such file"):
        load_config(tmp_path / "nowhere.yaml")


# ---- strategies ----------------------------------------------------------------------------------


@pytest.mark.timeout(60)  # it took that long when keys were compared with one another
def test_a_file_of_many_keys_is_read_in_time(write):
    with pytest.raises(ConfigError, match="5999"):
        load_config(write("".join(f"key{i}: 1\n" for i in range(6000))))


@pytest.mark.parametrize(
    "text",
    ["[" * 5000, "a: " + "{a: " * 5000, "? [a]\n: 1\n? [a]\n: 1"],
    ids=["lists", "sections", "keys"],
)
def test_yaml_that_no_settings_need_is_a_config_error(write, text):
    with pytest.raises(ConfigError) as raised:
        load_config(write(text))
    assert len(str(raised.value)) < 3000


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_config_in_the_repository_is_valid_and_named_after_its_strategy(path):
    name = load_config(path).strategy.name
    assert path.stem == name or path.stem.startswith(f"{name}_")


def test_every_strategy_has_a_config_in_the_repository():
    assert {name_of(section) for section in STRATEGIES} == {
        load_config(path).strategy.name for path in CONFIGS.glob("*.yaml")
    }


@pytest.mark.parametrize(
    ("text", "class_name", "num_replicas"),
    [
        ("{name: one_device, device: 'CPU:1'}", "OneDeviceStrategy", 1),
        ("{name: mirrored, devices: ['CPU:0', 'CPU:1']}", "MirroredStrategy", 2),
        (
            "{name: mirrored, devices: ['CPU:0', 'CPU:1'], "
            "cross_device_ops: reduction_to_one_device}",
            "MirroredStrategy",
            2,
        ),
        (
            "{name: central_storage, compute_devices: ['CPU:0', 'CPU:1'], "
            "parameter_device: 'CPU:0'}",
            "CentralStorageStrategy",
            2,
        ),
        (
            "{name: pipeline, devices: ['CPU:0', 'CPU:1'], num_microbatches: 3}",
            "PipelineStrategy",
            1,
        ),
    ],
)
def test_builds_the_strategy_that_is_named(write, text, class_name, num_replicas):
    strategy = build_strategy(load_config(write(f"strategy: {text}")).strategy)
    assert type(strategy).__name__ == class_name
    assert strategy.num_replicas_in_sync == num_replicas


def test_every_strategy_takes_the_arguments_of_its_section(write):
    pytest.importorskip("horovod.tensorflow")
    import tfparallel

    for section in STRATEGIES:
        strategy = load_config(write(f"strategy: {{name: {name_of(section)}}}")).strategy
        strategy_class = getattr(tfparallel, strategy.class_name)
        inspect.signature(strategy_class).bind(**strategy.arguments())


@pytest.mark.parametrize(
    "name",
    ["one_device", "mirrored", "central_storage", "sharded", "hybrid", "tensor_parallel"],
)
def test_what_is_kept_reaches_the_strategy(write, name):
    memory = "memory: {rematerialize: [nothing], offload: full}"
    strategy = build_strategy(load_config(write(f"strategy: {{name: {name}, {memory}}}")).strategy)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"`rematerialize` must name a layer. Received: 'nothing'"):
        model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)


@pytest.mark.parametrize("name", ["one_device", "mirrored", "central_storage", "sharded", "hybrid"])
def test_batches_ahead_reach_the_strategy(write, name):
    text = f"strategy: {{name: {name}, prefetch_batches: 3}}"
    strategy = build_strategy(load_config(write(text)).strategy)
    assert strategy.extended._num_batches_ahead == 3


def test_what_is_kept_is_a_word_or_patterns(write):
    text = "strategy: {name: mirrored, memory: {offload: all}}"
    assert "strategy.memory.offload" in problems_of(write(text))[0]


def test_communication_options_reach_the_strategy(write):
    text = (
        "{name: multi_worker_mirrored, communication: {implementation: RING, timeout_seconds: 5}}"
    )
    options = load_config(write(f"strategy: {text}")).strategy.arguments()["communication_options"]
    assert options.implementation.name == "RING"
    assert options.timeout_seconds == 5


def test_how_gradients_cross_processes_reaches_a_mesh(write):
    keys = "transport: ring, compression: {name: power_sgd, rank: 3}, check_weights_every: 7"
    text = f"strategy: {{name: hybrid, mesh: {{data: 4}}, {keys}}}"
    arguments = load_config(write(text)).strategy.arguments()
    assert (arguments["transport"], arguments["check_weights_every"]) == ("ring", 7)
    assert repr(arguments["compression"]) == "PowerSGD(rank=3)"


def test_a_mesh_over_processes_is_given(write):
    (problem,) = problems_of(write("strategy: {name: hybrid, transport: auto}"))
    assert "transport=auto is between the processes" in problem and "no mesh" in problem


def test_ranks_of_a_model_are_the_workers_of_tf_config(write, monkeypatch):
    workers = [f"{name}:1" for name in "abcdef"]
    config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    keys = "transport: ring, sequence_parallel: true, replicas: 2, timeouts: {silent_s: 5}"
    keys += ", check_weights_every: 9"
    text = f"strategy: {{name: tensor_parallel, {keys}, layout: {{kernel: [null, model]}}}}"
    arguments = load_config(write(text)).strategy.arguments()
    layout = arguments.pop("layout")
    assert arguments == {
        "transport": "ring",
        "sequence_parallel": True,
        "timeouts": WorkerTimeouts(silent_s=5),
        "check_weights_every": 9,
    }
    assert layout["kernel"].axes == (None, "model")
    assert layout.device_mesh.shape == (2, 3)
    found = load_config(write(f"strategy: {{name: tensor_parallel, layout: auto, {keys}}}"))
    arguments = found.strategy.arguments()
    assert (arguments["layout"], arguments["device_mesh"].shape) == ("auto", (2, 3))


def test_ranks_of_a_model_may_be_those_of_horovod(write, monkeypatch):
    pytest.importorskip("horovod.tensorflow")
    monkeypatch.setenv("HOROVOD_SIZE", "4")
    monkeypatch.setenv("HOROVOD_LOCAL_SIZE", "2")
    keys = "transport: horovod, replicas: 2, layout: auto"
    arguments = load_config(
        write(f"strategy: {{name: tensor_parallel, {keys}}}")
    ).strategy.arguments()
    assert (arguments["transport"], arguments["device_mesh"].shape) == ("horovod", (2, 2))


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ("transport: ring, devices: [a], memory: {}", "Received: also devices, memory"),
        ("timeouts: {silent_s: 5}", "timeouts: of processes. Received: no transport"),
        ("check_weights_every: 9", "check_weights_every: of processes. Received: no transport"),
        ("layout: autp", "layout"),
    ],
)
def test_ranks_of_a_model_take_what_they_can(write, keys, problem):
    assert problem in problems_of(write(f"strategy: {{name: tensor_parallel, {keys}}}"))[0]


@pytest.mark.parametrize("name", ["multi_worker_mirrored", "sharded", "hybrid"])
def test_how_long_workers_wait_reaches_the_strategy(write, name):
    section = f"strategy: {{name: {name}, timeouts: {{silent_s: 5, stall_s: null}}}}"
    timeouts = load_config(write(section)).strategy.arguments()["timeouts"]
    assert timeouts == WorkerTimeouts(silent_s=5, stall_s=None)
    default = load_config(write(f"strategy: {{name: {name}}}")).strategy.arguments()
    assert default["timeouts"] is None
    wrong = f"strategy: {{name: {name}, timeouts: {{silent_s: 0}}}}"
    assert "strategy.timeouts.silent_s: should be greater than 0" in problems_of(write(wrong))[0]


def test_the_timeouts_of_a_config_are_those_of_the_strategy():
    own = {k: f.default for k, f in WaitLimits.model_fields.items()}
    assert own == dataclasses.asdict(WorkerTimeouts())


def test_the_limits_of_horovod_reach_the_strategy(write):
    section = "strategy: {name: horovod, start_timeout_s: 7, stall_timeout_s: null}"
    arguments = load_config(write(section)).strategy.arguments()
    assert (arguments["start_timeout_s"], arguments["stall_timeout_s"]) == (7, None)


@pytest.mark.parametrize(
    ("text", "shape", "parts"),
    [
        ("{name: fixed, max_parts: 3}", (9, 4), [3, 1]),
        ("{name: min_size, bytes: 64, max_parts: 2}", (9, 4), [2, 1]),
        ("{name: max_size, bytes: 64}", (8, 4), [1, 1]),
        ("{name: max_size, bytes: 64, max_parts: 8}", (8, 4), [2, 1]),
    ],
)
def test_partitioner_reaches_the_strategy(write, text, shape, parts):
    import tensorflow as tf

    section = f"strategy: {{name: parameter_server, partitioner: {text}}}"
    partition = load_config(write(section)).strategy.arguments()["variable_partitioner"]
    assert list(partition(tf.TensorShape(shape), tf.float32)) == parts


@pytest.mark.parametrize("name", ["multi_worker_mirrored", "horovod", "parameter_server"])
def test_compression_reaches_the_strategy(write, name):
    section = f"strategy: {{name: {name}, compression: {{name: top_k, ratio: 0.2}}}}"
    arguments = load_config(write(section)).strategy.arguments()
    assert repr(arguments["compression"]) == "TopK(0.2)"
    assert (
        load_config(write(f"strategy: {{name: {name}}}")).strategy.arguments()["compression"]
        is None
    )


def test_compressors_have_one_name():
    from tfparallel.communication.compression.names import NAMES

    assert {"none", *NAMES} == set(get_args(Compression.model_fields["name"].annotation))
    for name, make in NAMES.items():
        assert repr(Compression(name=name).compressor()) == repr(make())


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ("{name: top_k, rank: 2}", "top_k takes ratio. Received: rank"),
        ("{name: fp16, bits: 8}", "fp16 takes no option. Received: bits"),
        ("{name: powersgd}", "power_sgd"),
    ],
)
def test_compressors_take_their_own_options_only(write, section, problem):
    with pytest.raises(ConfigError, match=problem):
        load_config(write(f"strategy: {{name: horovod, compression: {section}}}"))


def test_reading_a_config_does_not_import_tensorflow(write):
    code = (
        "import sys; from tfparallel.launch.config import load_config; "
        f"load_config({str(write('strategy: {name: mirrored}'))!r}); "
        "sys.exit('tensorflow' in sys.modules or 'keras' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
