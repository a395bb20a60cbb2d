from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from lightrft.strategy.distributed import ALONE
from lightrft.strategy.statistics import GenLenAnalyser, LengthStatistics, draw_histogram

SVG = "{http://www.w3.org/2000/svg}"


def analyser(plot_every, log_dir=None):
    return GenLenAnalyser(plot_every=plot_every, log_dir=log_dir, group=ALONE)


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


@pytest.mark.parametrize(("every", "due"), [(1, [0, 1, 2, 3]), (2, [0, 2]), (0, []), (-1, [])])
def test_interval(every, due):
    watcher = analyser(every)
    found = [s for s in range(4) if watcher.collect([3], s, writes_files=True) is not None]
    assert found == due


def test_nothing_generated_is_no_error():
    assert analyser(1).collect([], 0, writes_files=True) is None


def test_files_are_written(tmp_path):
    analyser(2, str(tmp_path / "logs")).collect([1, 2, 2], 4, writes_files=True)
    record = json.loads((tmp_path / "logs" / "gen_len_step_4.json").read_text())
    assert record["lengths"] == [1, 2, 2]
    assert record["max_length"] == 2
    picture = ElementTree.parse(tmp_path / "logs" / "gen_len_step_4.svg").getroot()
    heights = [float(bar.get("height")) for bar in picture.iter(f"{SVG}rect")]
    assert heights == [150.0, 300.0]
    assert analyser(1, str(tmp_path / "no")).collect([1], 0, writes_files=False) is not None
    assert not (tmp_path / "no").exists()


def test_equal_lengths_can_be_drawn():
    assert draw_histogram([5, 5], "t").count("<rect") == 1
    assert draw_histogram(list(range(100)), "t").count("<rect") == 40
