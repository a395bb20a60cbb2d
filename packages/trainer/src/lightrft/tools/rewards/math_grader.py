"""Comparing two mathematical answers by value, in a worker process."""

import json
import logging
import os
import signal
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Never, cast

_VERDICTS = {b"right": True, b"wrong": False, b"failed": None}


class MathGrader:
    """Compares two answers in LaTeX or plain notation by their mathematical value, in a worker.

    math-verify limits its time by SIGALRM, which does not stop native code; here its limits are
    off. Comparisons run in a fork of this process, which is killed when one takes too long and
    forked anew within milliseconds, where a new worker would load the grammar for seconds.
    """

    def __init__(self) -> None:
        import math_verify

        logging.getLogger("math_verify").setLevel(logging.CRITICAL)
        self._parse = math_verify.parse
        self._verify = math_verify.verify
        self._fork: tuple[int, Connection] | None = None
        self._compare("\\frac{1}{2}", "0.5")  # loads the grammar now, not within a deadline

    def describe(self) -> object:
        """Nothing to say."""
        return None

    def __call__(self, request: object) -> bool | None:
        """Whether (answer, gold) are equal by value, found within so many seconds; else None.

        What cannot be parsed has no value. None also where the comparison fails or dies: an answer
        of a model must not end the run.
        """
        answer, gold, seconds = cast("tuple[str, str, float]", request)
        if self._fork is None:
            self._fork = self._start()
        process, channel = self._fork
        try:
            channel.send_bytes(json.dumps((answer, gold)).encode())
            if channel.poll(seconds):
                return _VERDICTS[channel.recv_bytes()]
        except (EOFError, OSError):
            pass
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        channel.close()
        self._fork = None
        return None

    def _start(self) -> tuple[int, Connection]:
        ours, theirs = Pipe()
        process = os.fork()
        if process == 0:
            ours.close()
            self._serve(theirs)
        theirs.close()
        return process, ours

    def _serve(self, channel: Connection) -> Never:
        """Answers until the other end is closed."""
        try:
            while True:
                answer, gold = json.loads(channel.recv_bytes())
                try:
                    verdict = b"right" if self._compare(answer, gold) else b"wrong"
                except Exception:  # noqa: BLE001 - RecursionError, MemoryError and bugs of parsers
                    verdict = b"failed"
                channel.send_bytes(verdict)
        finally:
            os._exit(0)

    def _compare(self, answer: str, gold: str) -> bool:
        parsed_gold = self._parse(f"\\boxed{{{gold}}}", parsing_timeout=None)
        parsed = self._parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
        if not parsed_gold or not parsed:
            return False
        return bool(self._verify(parsed_gold, parsed, timeout_seconds=None))
