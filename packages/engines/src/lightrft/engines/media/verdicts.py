"""Verdicts on files of media, which need not be read again while they do not change."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

# A clock of a file system may take this long to its next number: a file that changed a moment ago
# may change again and have the same times.
SETTLED_SECONDS = 2.0


@dataclass(slots=True)
class Verdict:
    """Hash and size of a file.

    Args:
        identity: Of the file as it was when it was looked at: device, inode, bytes, and when its
            content and its entry changed, in nanoseconds. Whoever sets back the former time
            moves the latter.
        sha256: Of its bytes; "" before it is asked.
        size: Width and height of a whole image, upright; () before it is asked.
    """

    identity: tuple[int, ...] = ()
    sha256: str = ""
    size: tuple[int, ...] = ()


class Verdicts:
    """The verdicts of the files that were looked at.

    Args:
        known: Of earlier ones, by path.
        settled_seconds: Younger files are looked at and not kept.
    """

    def __init__(
        self, known: Mapping[str, Verdict], *, settled_seconds: float = SETTLED_SECONDS
    ) -> None:
        self.by_path = dict(known)
        self._settled_ns = round(settled_seconds * 1e9)

    def of(self, path: Path) -> Verdict:
        """What is known of a file as it is now; an empty one, to be filled in, of another file."""
        try:
            own = path.stat()
            name = str(path.absolute())
        except OSError:
            return Verdict()  # whoever reads it says what is wrong
        identity = (own.st_dev, own.st_ino, own.st_size, own.st_mtime_ns, own.st_ctime_ns)
        known = self.by_path.get(name)
        if known is not None and known.identity == identity:
            return known
        found = Verdict(identity)
        if max(identity[3:]) + self._settled_ns <= time.time_ns():
            self.by_path[name] = found
        return found


_NOW: ContextVar[Verdicts | None] = ContextVar("verdicts", default=None)


def verdict_of(path: Path | None) -> Verdict:
    """What is known of a file; an empty one outside of `keeping`, or if there is no file."""
    kept = _NOW.get()
    return Verdict() if kept is None or path is None else kept.of(path)


@contextmanager
def keeping(verdicts: Verdicts) -> Iterator[None]:
    """Within it files are looked up among these verdicts, and further ones are added."""
    before = _NOW.set(verdicts)
    try:
        yield
    finally:
        _NOW.reset(before)
