"""Current work of a worker, in memory that the trainer can read even after it has ended."""

from __future__ import annotations

import mmap
import os
import struct
from typing import Self

_WORDS = struct.Struct("<QQQ")


class Running:
    """The operation whose code runs, counts of its kind, and a sign of life of the event loop.

    Args:
        memory: File descriptor that a worker inherits.
    """

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self._words = mmap.mmap(memory, _WORDS.size)
        self._num_steps = self._num_beats = 0

    @classmethod
    def create(cls) -> Self:
        """Allocate the memory in the trainer, before a worker starts."""
        memory = os.memfd_create("running")
        os.truncate(memory, _WORDS.size)
        return cls(memory)

    def close(self) -> None:
        """Release the memory, once nobody reads it."""
        self._words.close()
        os.close(self.memory)

    def begin(self, number: int) -> None:
        """Record that code of an operation begins to run."""
        self._num_steps += 1
        self._write(number)

    def end(self) -> None:
        """Record that the code has returned to the event loop."""
        self._write(0)

    def beat(self) -> None:
        """Record that the event loop goes round."""
        self._num_beats += 1
        self._write(0)

    def _write(self, number: int) -> None:
        _WORDS.pack_into(self._words, 0, number, self._num_steps, self._num_beats)

    def read(self) -> tuple[int, int, int]:
        """Return the running operation (0: none) and the counts; any change is progress."""
        number, num_steps, num_beats = _WORDS.unpack_from(self._words)
        return int(number), int(num_steps), int(num_beats)
