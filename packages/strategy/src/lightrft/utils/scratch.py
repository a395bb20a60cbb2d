"""Temporary folders that end with their process, however that ends."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "lightrft_scratch_"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a temporary folder of this process; remove those that killed processes left.

    Each is locked by its process, and the system drops the lock however that process ends.
    """
    remove_left_folders()
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        with contextlib.suppress(OSError):  # another process took it for one that was left
            descriptor = _lock(folder)
            break
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def remove_left_folders() -> None:
    """Remove the folders of this user whose processes have ended."""
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        # Held by a process that runs, of another user, or gone meanwhile.
        with contextlib.suppress(OSError):
            descriptor = _lock(left)
            try:
                shutil.rmtree(left)
            finally:
                os.close(descriptor)


def _lock(folder: Path) -> int:
    """Return a descriptor that holds the lock of one of our folders; raise an OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not folder.exists() or os.fstat(descriptor).st_uid != os.getuid():
            raise FileNotFoundError(folder)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
