"""An environment that draws between waits; run in worker processes by the tests."""

import asyncio
import random

import numpy as np
import torch


def drawn():
    numbers = random.random(), np.random.rand(), torch.rand(()).item()  # noqa: NPY002
    return " ".join(f"{number:.6f}" for number in numbers)


async def slow_draws(count):
    found = []
    for _ in range(count):
        found.append(drawn())
        await asyncio.sleep(0)
    return found


class Drawing:
    """Draws between waits, in tasks, and in a task that outlives its operation."""

    async def reset(self, **row):
        self.later = asyncio.create_task(slow_draws(3))
        return f" {await slow_draws(2)}"

    async def draw(self, count: int) -> str:
        """Draw.

        Args:
            count: How often.
        """
        before = await slow_draws(count)
        tasks = await asyncio.gather(slow_draws(2), self._nested(), slow_draws(count))
        return f"{before} {tasks} {drawn()}"

    async def _nested(self):
        task = asyncio.create_task(slow_draws(2))
        return [drawn(), await task]

    async def wait_for_the_task(self) -> str:
        """What the task of `reset` drew."""
        return str(await self.later)

    async def get_reward(self):
        await asyncio.sleep(0)
        return random.random()
