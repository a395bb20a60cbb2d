"""Environments whose answers follow from all that was said before; run in worker processes."""

import os
import random


class Mixer:
    def reset(self, sample_seed: int, target: int = 0, **row):
        self.state = (sample_seed + target) % 1009
        return f" {self.state} {random.randrange(99)}"

    def mix(self, number: int) -> str:
        """Mix a number in.

        Args:
            number: Any.
        """
        self.state = (self.state * 31 + number + random.randrange(9)) % 1009
        return f"now {self.state}"

    def get_reward(self) -> dict:
        return {"mixed": self.state % 7, "drawn": random.random()}


class Late(Mixer):
    """Takes its time, and gives it to others."""

    async def mix(self, number: int) -> str:
        """Mix a number in.

        Args:
            number: Any.
        """
        import asyncio

        await asyncio.sleep(os.urandom(1)[0] / 12800)
        return super().mix(number)


class Moody(Mixer):
    """Answers otherwise from a moment on, which a file says."""

    def mix(self, number: int) -> str:
        """Mix a number in.

        Args:
            number: Any.
        """
        mood = os.path.exists(os.environ["MOOD"])
        return super().mix(number + 500 * mood)


class Talker:
    """In SkyRL-Gym's form: it answers all that is said, and pays by turn."""

    def __init__(self, env_config=None, extras={}):  # noqa: B006
        self.turns, self.state = 0, extras["sample_seed"] % 1009

    def init(self, prompt):
        return prompt, {}

    def step(self, action):
        self.turns += 1
        self.state = (self.state * 31 + len(action) + random.randrange(9)) % 1009
        done = self.turns >= 2 + self.state % 3
        said = [] if done else [{"role": "user", "content": f"{self.state} more"}]
        reward = self.state % 5 / 4
        return {"observations": said, "reward": reward, "done": done, "metadata": {}}

    def close(self):
        pass


def mix(number: int) -> str:
    """Mix a number.

    Args:
        number: Any.
    """
    return f"mixed {number * 7 % 1009}"
