from __future__ import annotations

import json
import struct
import zlib

import numpy as np
import pytest

from lightrft.strategy.distributed import ALONE
from lightrft.strategy.histogram_picture import histogram_png
from lightrft.strategy.statistics import GenLenAnalyser, LengthStatistics

BAR = (68, 114, 168)


def analyser(plot_every, log_dir=None):
    return GenLenAnalyser(plot_every=plot_every, log_dir=log_dir, group=ALONE)


def read_png(data):
    """[height, width, 3] of an unfiltered RGB file, every checksum verified."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, position = {}, 8
    while position < len(data):
        (size,) = struct.unpack(">I", data[position : position + 4])
        kind, body = data[position + 4 : position + 8], data[position + 8 : position + 8 + size]
        (checksum,) = struct.unpack(">I", data[position + 8 + size : position + 12 + size])
        assert checksum == zlib.crc32(kind + body)
        chunks[kind] = body
        position += 12 + size
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, -1)
    assert not lines[:, 0].any()
    return lines[:, 1:].reshape(height, width, 3)


def heights_of_bars(picture):
    columns = (picture == np.array(BAR)).all(axis=-1).sum(axis=0)
    starts = np.flatnonzero((columns[1:] > 0) & (columns[:-1] == 0)) + 1
    return columns[starts].tolist()


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
    picture = read_png((tmp_path / "logs" / "gen_len_step_4.png").read_bytes())
    assert heights_of_bars(picture) == [150, 300]
    assert analyser(1, str(tmp_path / "no")).collect([1], 0, writes_files=False) is not None
    assert not (tmp_path / "no").exists()


def test_any_number_of_bars_can_be_drawn():
    assert heights_of_bars(read_png(histogram_png([5, 5], step=1))) == [300]
    assert len(heights_of_bars(read_png(histogram_png(list(range(100)), step=1)))) == 40
    # Numbers of any size are cut at the border instead of failing.
    read_png(histogram_png([10**9, 3], step=10**12))


def test_other_programs_read_the_picture():
    image = pytest.importorskip("PIL.Image")
    import io

    data = histogram_png([1, 2, 2], step=3)
    assert (np.asarray(image.open(io.BytesIO(data))) == read_png(data)).all()
