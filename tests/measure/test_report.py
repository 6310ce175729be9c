"""The report of a training that ran, and its pictures."""

import html.parser
import json
import subprocess
import sys

import keras
import pytest

import tfparallel
from tests.helpers import tiny_compile_options, tiny_data, tiny_model
from tests.launch.jobs import ROOT
from tfparallel.callbacks import Measure
from tfparallel.measure.html_report import last_training, write_report
from tfparallel.measure.noise_scale import efficiency
from tfparallel.measure.plots import StepModel, draw_goodput, draw_shares
from tfparallel.measure.reading import FILE, read_records

figure = pytest.importorskip("matplotlib.figure")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two replicas; rows repeat, so that gradients are more than noise."""
    folder = tmp_path_factory.mktemp("measured")
    keras.utils.set_random_seed(7)
    strategy = tfparallel.MirroredStrategy(2)
    with strategy.scope():
        model = tiny_model()
        model.compile("sgd", **tiny_compile_options())
    measure = Measure(folder, verbose=0, noise_every=1, peak_flops_per_s=1e12)
    model.fit(*tiny_data(64), batch_size=16, epochs=3, verbose=0, callbacks=[measure])
    strategy.profile(model, tiny_data(16)).save_png(folder / "step.png")
    return folder


class Tags(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.sources = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))


def test_one_file_that_needs_nothing_else(folder, tmp_path):
    write_report(folder, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    tags = Tags(text).tags
    loaded = [
        a.get("src", a.get("href", "")) for tag, a in tags if tag in ("img", "link", "script")
    ]
    assert loaded and all(each.startswith("data:image/png;base64,") for each in loaded)
    assert any(a.get("name") == "viewport" for tag, a in tags if tag == "meta")
    (lanes,) = [a for tag, a in tags if tag == "figure" and a["class"]]
    assert lanes["class"] == "scroll lanes"  # wider than a phone, or nobody could read it
    total = read_records(folder)[-1]
    assert total["verdict"].split(".")[0] in html.unescape(text)
    assert "MFU" in text and "Noise scale" in text and "One step" in text and "goodput" in text
    assert text.count("<tr>") >= 3


def test_the_command(folder):
    done = subprocess.run(
        [sys.executable, "-m", "tfparallel", "report", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (folder / "report.html").exists() and "report.html" in done.stdout


def test_nothing_to_report(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"Measure\(folder"):
        write_report(tmp_path, tmp_path / "report.html")
    (tmp_path / FILE).write_text("")
    with pytest.raises(ValueError, match="epoch"):
        write_report(tmp_path, tmp_path / "report.html")


def test_the_last_of_several_trainings():
    """One that was killed in its third epoch, one that went on, one more that ended."""
    numbers = [0, 1, 1, 2, None, 0, 1, None]
    assert [each["epoch"] for each in last_training([{"epoch": n} for n in numbers])] == [0, 1]
    assert [each["epoch"] for each in last_training([{"epoch": n} for n in numbers[:4]])] == [1, 2]


def test_shares_are_stacked_to_the_wall_time(folder):
    epochs = last_training(read_records(folder))
    axes = figure.Figure().subplots()
    draw_shares(axes, epochs)
    for bars in zip(*(c.patches for c in axes.containers), strict=True):
        top = bars[-1].get_y() + bars[-1].get_height()
        assert top == pytest.approx(1.0, abs=9 * 5e-4)


def test_goodput_over_batch_sizes_marks_the_present_and_the_best():
    """10 ms a step and 1 ms a row, noise scale 100: worth (100 + 10) / (100 + b) * b / time."""
    seconds = dict.fromkeys(("compute", "bubble", "imbalance", "input", "host", "saving"), 0.0)
    record = {"steps": 100, "seconds": {**seconds, "communication": 1.0, "compute": 1.0}}
    step = StepModel(record, 10)
    assert step.rows_per_s(10) == pytest.approx(10 / 0.020)
    axes = figure.Figure().subplots()
    draw_goodput(axes, 100.0, 10, step)
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert lines["present"].get_xdata()[0] == 10
    (best,) = lines["best"].get_xdata()
    # b / ((0.01 + 0.001 b)(100 + b)) is largest at sqrt(10 * 100).
    assert best == pytest.approx(1000**0.5, rel=0.05)
    assert lines["best"].get_ydata()[0] == pytest.approx(
        step.rows_per_s(best) * efficiency(100.0, 10, best)
    )


def test_records_are_one_json_line_each(folder):
    lines = (folder / FILE).read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [0, 1, 2, None]
    assert json.loads(lines[0])["details"]["batch_size"] == 16
