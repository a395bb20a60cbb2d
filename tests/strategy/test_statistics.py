import io
import json
import sys

import pytest
from PIL import Image

from lightrft.strategy.distributed.collectives import ALONE
from lightrft.strategy.engine.generation import GenLenAnalyser, LengthStatistics, histogram_png


def analyser(plot_every, log_dir=None):
    return GenLenAnalyser(plot_every=plot_every, log_dir=log_dir, group=ALONE)


def size_of_png(data):
    return Image.open(io.BytesIO(data), formats=["PNG"]).size


def test_numbers_of_known_lengths():
    found = LengthStatistics.of([1, 2, 3, 4, 10])
    assert found == LengthStatistics(
        total_samples=5,
        min_length=1,
        max_length=10,
        mean_length=4.0,
        median_length=3.0,
        percentiles={50: 3.0, 80: pytest.approx(5.2), 95: pytest.approx(8.8)},
    )


@pytest.mark.parametrize("every, due", [(1, [0, 1, 2, 3]), (2, [0, 2]), (0, []), (-1, [])])
def test_interval(every, due):
    watcher = analyser(every)
    found = [s for s in range(4) if watcher.collect([3], s, writes_files=True) is not None]
    assert found == due


def test_nothing_generated_is_no_error():
    assert analyser(1).collect([], 0, writes_files=True) is None


def test_files_are_written(tmp_path):
    analyser(2, str(tmp_path / "logs")).collect([1, 2, 2], 4, writes_files=True)
    record = json.loads((tmp_path / "logs/gen_len_step_4.json").read_text())
    assert record["lengths"] == [1, 2, 2]
    assert record["max_length"] == 2
    assert size_of_png((tmp_path / "logs/gen_len_step_4.png").read_bytes()) == (700, 400)
    assert analyser(1, str(tmp_path / "no")).collect([1], 0, writes_files=False) is not None
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("lengths", [[5, 5], list(range(100)), [10**9, 3]])
def test_any_lengths_can_be_drawn(lengths):
    assert size_of_png(histogram_png(lengths, step=1)) == (700, 400)


def test_the_picture_depends_on_the_lengths():
    assert histogram_png([1, 2, 2], step=3) != histogram_png([1, 1, 2], step=3)


def test_pictures_without_matplotlib_are_refused_at_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    analyser(1)
    with pytest.raises(ImportError, match=r"plot_every > 0 .*: install lightrft\[plots\]"):
        analyser(1, "logs")
