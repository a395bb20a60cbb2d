"""Media files: the error for those that cannot be read, and facts on those that were."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

# Bytes of the shortest signature of a file.
_SIGNATURE_BYTES = 4


class MediaError(ValueError):
    """Error for a medium that cannot be read; the message says which, why, and what to do."""


def is_list_of_bytes(value: object) -> bool:
    """Return whether a value is a list of the encoded bytes of a file, as in JSON."""
    return (
        isinstance(value, list)
        and len(value) > _SIGNATURE_BYTES
        and all(isinstance(item, int) and 0 <= item < 256 for item in value)
    )


# A file system's clock may take this long to advance: a file that has just changed may change
# again and keep its times.
SETTLED_SECONDS = 2.0


@dataclass(slots=True)
class FileFacts:
    """Hash and size of a file.

    Args:
        identity: Device, inode, bytes, and times when content and entry changed, in nanoseconds,
            when the file was checked. Setting back the content's time moves the entry's.
        sha256: Hash of its bytes; "" until it is computed.
        size: Width and height of a whole image, upright; () until they are read.
    """

    identity: tuple[int, ...] = ()
    sha256: str = ""
    size: tuple[int, ...] = ()


class FileFactsByPath:
    """Hashes and sizes of the files that were read.

    Args:
        known: Facts on earlier files, by path.
        settled_seconds: Age in seconds below which facts on a file are not kept.
    """

    def __init__(
        self, known: Mapping[str, FileFacts], *, settled_seconds: float = SETTLED_SECONDS
    ) -> None:
        self.by_path = dict(known)
        self._settled_ns = round(settled_seconds * 1e9)

    def of(self, path: Path) -> FileFacts:
        """Return facts on a file in its current state; empty ones to fill in if it is new."""
        try:
            stat = path.stat()
            name = str(path.absolute())
        except OSError:
            return FileFacts()  # the reader reports the problem
        identity = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        known = self.by_path.get(name)
        if known is not None and known.identity == identity:
            return known
        facts = FileFacts(identity)
        if max(identity[3:]) + self._settled_ns <= time.time_ns():
            self.by_path[name] = facts
        return facts


_NOW: ContextVar[FileFactsByPath | None] = ContextVar("file_facts", default=None)


def facts_of_file(path: Path | None) -> FileFacts:
    """Return facts on a file; empty ones outside of `keeping`, or if there is no file."""
    kept = _NOW.get()
    return FileFacts() if kept is None or path is None else kept.of(path)


@contextmanager
def keeping(facts: FileFactsByPath) -> Iterator[None]:
    """Look up files in `facts` within the context, and add new ones."""
    before = _NOW.set(facts)
    try:
        yield
    finally:
        _NOW.reset(before)
