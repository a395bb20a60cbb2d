"""Times of the stages of each rank: `logs/timeline_N.jsonl` of a run."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightrft.reporting.files import LOG_FOLDER, TIMELINE_BEGIN, TIMELINE_PREFIX, JsonLinesFile
from lightrft.strategy.distributed.deadlines import span_sink


def is_kept(step: int) -> bool:
    """Return whether a step's times are written: the first 99, then 90 of each power of ten.

    Step 0 is not: evaluations have it.
    """
    return step > 0 and step % int(10 ** max(0, len(str(step)) - 2)) == 0


@contextmanager
def rank_timeline(folder: Path, rank: int) -> Iterator[None]:
    """Write the times of this rank's stages into its file of the run.

    What cannot be written, say to a full disk, is left out: a run does not end for it.
    """
    file = JsonLinesFile(folder / LOG_FOLDER / f"{TIMELINE_PREFIX}{rank}.jsonl")
    begins = [{"step": 0, "stage": TIMELINE_BEGIN}]

    def write(step: int, stage: str, start: float, end: float) -> None:
        if not is_kept(step):
            return
        times = {"start": round(start, 6), "end": round(end, 6)}
        with suppress(OSError):
            while begins:
                file.append(begins.pop())
            file.append({"step": step, "stage": stage, **times})

    try:
        with span_sink(write):
            yield
    finally:
        with suppress(OSError):
            file.close()
