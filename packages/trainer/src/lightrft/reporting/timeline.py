"""When each stage of a step ran on each rank: `logs/timeline_N.jsonl` of a run."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightrft.reporting.files import LOG_FOLDER, JsonLines, JsonLinesFile
from lightrft.strategy.distributed.deadlines import StageSpan, span_sink

PREFIX = "timeline_"


def is_kept(step: int) -> bool:
    """Whether the times of a step are written: the first 99, then 90 of each power of ten.

    Step 0 is none: evaluations have it.
    """
    return step > 0 and step % int(10 ** max(0, len(str(step)) - 2)) == 0


@contextmanager
def rank_timeline(folder: Path, rank: int) -> Iterator[None]:
    """Writes the times of this rank's stages into its file of the run.

    What cannot be written, say to a full disk, is left out: a run does not end for it.
    """
    file = JsonLinesFile(folder / LOG_FOLDER / f"{PREFIX}{rank}.jsonl")

    def write(span: StageSpan) -> None:
        if not is_kept(span.step):
            return
        times = {"start": round(span.start, 6), "end": round(span.end, 6)}
        with suppress(OSError):
            file.append({"step": span.step, "stage": span.stage, **times})

    try:
        with span_sink(write):
            yield
    finally:
        with suppress(OSError):
            file.close()


def read_timelines(folder: Path) -> dict[int, list[StageSpan]]:
    """The spans of every rank whose file is there, ascending by rank and time.

    Steps that were done again after a resume count once, as they were done last.
    """
    found: dict[int, list[StageSpan]] = {}
    for path in (folder / LOG_FOLDER).glob(f"{PREFIX}*.jsonl"):
        rank = path.stem.removeprefix(PREFIX)
        if rank.isdecimal() and len(rank) < 9:
            found[int(rank)] = _read(path)
    return dict(sorted(found.items()))


def _read(path: Path) -> list[StageSpan]:
    spans: list[StageSpan] = []
    for step, entry in JsonLines(path):
        stage, *times = (entry.get(name) for name in ("stage", "start", "end"))
        start, end = (float(t) if isinstance(t, int | float) else math.nan for t in times)
        if not isinstance(stage, str) or not start <= end < math.inf:
            continue
        if spans and step < spans[-1].step:
            spans = [span for span in spans if span.step < step]
        spans.append(StageSpan(step, stage, start, end))
    return sorted(spans, key=lambda span: span.start)
