"""Answers by the hash of their question, kept in a folder of the run."""

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path


class AnswerCache:
    """Texts by key; each rank appends to a file of its own and reads those of all.

    Args:
        folder: Made with the first answer if the folder above it exists; if not, answers are kept
            in memory only.
        check: Raises a ValueError for a text that is no answer; a line that was changed since it
            was written, or whose text fails, is left out, so that its question is asked again.
    """

    def __init__(self, folder: Path, *, check: Callable[[str], object]) -> None:
        self._folder = folder
        self._check = check
        self._lock = threading.Lock()
        self._answers: dict[str, str] = {}
        for file in sorted(folder.glob("*.jsonl")):
            with contextlib.suppress(OSError):
                for line in file.read_bytes().split(b"\n"):
                    self._take(line)

    def get(self, key: str) -> str | None:
        """The answer, or None."""
        return self._answers.get(key)

    def put(self, key: str, answer: str) -> None:
        """Keeps an answer, unless another thread was first with one."""
        with self._lock:
            if key in self._answers:
                return
            self._answers[key] = answer
        if not self._folder.parent.is_dir():
            return
        self._folder.mkdir(exist_ok=True)
        entry = {"key": key, "answer": answer, "digest": _digest(key, answer)}
        line = json.dumps(entry).encode() + b"\n"
        name = f"rank_{os.environ.get('RANK', '0')}.jsonl"
        file = os.open(self._folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            # A line that a killed run left unfinished ends here, not in the middle of this one.
            end = os.lseek(file, 0, os.SEEK_END)
            os.write(file, (b"\n" if end else b"") + line)
        finally:
            os.close(file)

    def _take(self, line: bytes) -> None:
        """One line; what a killed run left unfinished, or something changed, is none."""
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            entry = json.loads(line)
            key, answer = entry["key"], entry["answer"]
            if entry["digest"] == _digest(key, answer):
                self._check(answer)
                self._answers[key] = answer


def _digest(key: str, answer: str) -> str:
    return hashlib.sha256(f"{key}\n{answer}".encode("utf-8", "surrogatepass")).hexdigest()
