"""Answers by the hash of their question, kept in a folder of the run."""

import contextlib
import json
import os
import threading
from pathlib import Path


class AnswerCache:
    """Texts by key; each rank appends to a file of its own and reads those of all.

    Args:
        folder: Made with the first answer if the folder above it exists; if not, answers are kept
            in memory only.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._answers: dict[str, str] = {}
        for file in sorted(folder.glob("*.jsonl")):
            for line in file.read_bytes().splitlines():
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
        line = json.dumps({"key": key, "answer": answer}).encode() + b"\n"
        name = f"rank_{os.environ.get('RANK', '0')}.jsonl"
        file = os.open(self._folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            # A line that a killed run left unfinished ends here, not in the middle of this one.
            end = os.lseek(file, 0, os.SEEK_END)
            os.write(file, (b"\n" if end else b"") + line)
        finally:
            os.close(file)

    def _take(self, line: bytes) -> None:
        """One line; what a killed run left unfinished is none."""
        with contextlib.suppress(ValueError, KeyError, TypeError):
            entry = json.loads(line)
            key, answer = entry["key"], entry["answer"]
            if isinstance(key, str) and isinstance(answer, str):
                self._answers[key] = answer
