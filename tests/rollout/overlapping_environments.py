"""Environments whose operations are coroutines; run in worker processes by the tests."""

import asyncio
import gc
import os
import random
import signal
import struct
import threading
import time


class Meeting:
    """Operations that end only if others are in flight in the same process."""

    two, opened = asyncio.Barrier(2), asyncio.Event()

    def reset(self, **row):
        self.row = row

    async def meet(self) -> int:
        """Wait for another one."""
        await self.two.wait()
        return os.getpid()

    async def wait(self, path: str) -> str:
        """Wait until somebody opens.

        Args:
            path: A file that says so.
        """
        with open(path, "w", encoding="utf-8"):
            pass
        await self.opened.wait()
        return "open"

    def open(self, seconds: float) -> str:
        """Open after a while.

        Args:
            seconds: The while.
        """
        time.sleep(seconds)
        self.opened.set()
        return "opened"

    def rest(self, seconds: float) -> str:
        """Block.

        Args:
            seconds: So long.
        """
        time.sleep(seconds)
        return "rested"

    def own_loop(self) -> str:
        """Run an event loop in a function that is no coroutine."""
        return asyncio.run(asyncio.sleep(0, "ran"))

    async def raise_error(self) -> str:
        """Meet and fail."""
        await self.two.wait()
        raise ValueError("bang")

    async def exit_in_a_task(self) -> str:
        """Fail in a task as `sys.exit` does."""

        async def leave():
            raise SystemExit(3)

        await asyncio.gather(leave())


class Faulty:
    """Operations that end their worker or never end, beside sound ones."""

    def reset(self, **row):
        self.count = 0

    async def act(self, what: str, path: str) -> str:
        """Act.

        Args:
            what: To do.
            path: A file.
        """
        self.count += 1
        if what == "hang":
            await asyncio.Event().wait()
        if what == "unknown signal":
            os.kill(os.getpid(), signal.SIGRTMIN + 6)
        if what.startswith("forge"):
            loops = [each for each in gc.get_objects() if type(each).__name__ == "OperationLoop"]
            body = {"forge a number": b'{"number": 1000000}', "forge text": b"{"}.get(what, b"")
            loops[0].answers.write(struct.pack("<Q", len(body) or 1000) + body)
            loops[0].answers.flush()
            await asyncio.Event().wait()
        if what == "hold on":
            while True:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    continue
        await asyncio.sleep(0.1)
        if what == "block":
            time.sleep(600)
        if what == "exit":
            os._exit(3)
        if what == "be killed" and not os.path.exists(path):
            threading.Thread(target=killed, args=(path,)).start()
            await asyncio.Event().wait()
        if what == "wait":
            await asyncio.sleep(0.5)
        return f"{self.count} {random.random()}"


class Hungry:
    """Holds what it is told to hold while others wait."""

    def reset(self, **row):
        self.kept = b""

    async def hold(self, megabytes: int) -> str:
        """Hold memory.

        Args:
            megabytes: So much.
        """
        self.kept = bytearray(megabytes << 20)
        await asyncio.sleep(1.0)
        return "held"


def killed(path):
    """In a thread: nobody's operation runs."""
    time.sleep(0.3)
    with open(path, "w", encoding="utf-8"):
        pass
    os._exit(9)
