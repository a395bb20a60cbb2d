"""FileFactsByPath on files of media, which need not be read again while they do not change."""

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
class FileFacts:
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


class FileFactsByPath:
    """Hashes and sizes of the files that were read.

    Args:
        known: Of earlier ones, by path.
        settled_seconds: Younger files are looked at and not kept.
    """

    def __init__(
        self, known: Mapping[str, FileFacts], *, settled_seconds: float = SETTLED_SECONDS
    ) -> None:
        self.by_path = dict(known)
        self._settled_ns = round(settled_seconds * 1e9)

    def of(self, path: Path) -> FileFacts:
        """What is known of a file as it is now; an empty one, to be filled in, of another file."""
        try:
            own = path.stat()
            name = str(path.absolute())
        except OSError:
            return FileFacts()  # whoever reads it says what is wrong
        identity = (own.st_dev, own.st_ino, own.st_size, own.st_mtime_ns, own.st_ctime_ns)
        known = self.by_path.get(name)
        if known is not None and known.identity == identity:
            return known
        found = FileFacts(identity)
        if max(identity[3:]) + self._settled_ns <= time.time_ns():
            self.by_path[name] = found
        return found


_NOW: ContextVar[FileFactsByPath | None] = ContextVar("file_facts", default=None)


def facts_of_file(path: Path | None) -> FileFacts:
    """What is known of a file; an empty one outside of `keeping`, or if there is no file."""
    kept = _NOW.get()
    return FileFacts() if kept is None or path is None else kept.of(path)


@contextmanager
def keeping(facts: FileFactsByPath) -> Iterator[None]:
    """Within it files are looked up in `facts`, and further ones are added."""
    before = _NOW.set(facts)
    try:
        yield
    finally:
        _NOW.reset(before)
