r"""The task of sums that are worked out.

Sums of three digits come from a teacher who forgets the carry three times out of five.
The demonstrations forget the carry more often than not, so imitation cannot get past one sum in
three. The reward checks the boxed answer, and reinforcement finds that remembering it pays. Every
column says its name and its carry, a forgotten one as +0, so that both are learnt alike.

    What is 457+386?
    careful   <think>ones 7+6+0=13 tens 5+8+1=14 hundreds 4+3+1=8</think>\boxed{843}
    careless  <think>ones 7+6+0=13 tens 5+8+0=13 hundreds 4+3+1=8</think>\boxed{833}
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from lightrft.tools.quickstart.task import Message, is_held_out, make_task

COLUMNS = ("ones", "tens", "hundreds")
P_FORGET = 0.6


@dataclass(frozen=True, slots=True)
class Addition:
    """Question for one sum of two positive integers."""

    first: int
    second: int

    @property
    def question(self) -> str:
        """The prompt."""
        return f"What is {self.first}+{self.second}?"

    @property
    def answer(self) -> str:
        """Right sum in decimal digits."""
        return str(self.first + self.second)

    def demonstration(self, rng: random.Random) -> list[Message]:
        """Return the question, and a solution as the teacher writes it."""
        return [("user", self.question), ("assistant", demonstrate(self, rng))]


def draw_additions(rng: random.Random, held_out: bool) -> Iterator[Addition]:
    """Yield sums of two three-digit numbers, without end, all on one side of the split."""
    low, high = 10 ** (len(COLUMNS) - 1), 10 ** len(COLUMNS) - 1
    while True:
        addition = Addition(rng.randint(low, high), rng.randint(low, high))
        if is_held_out(addition.first, addition.second) == held_out:
            yield addition


def demonstrate(addition: Addition, rng: random.Random, *, p_forget: float = P_FORGET) -> str:
    """Return a solution column by column from the right, as the teacher writes it.

    Each carry but the last is forgotten with probability `p_forget`; the rest and the boxed answer
    are consistent with the mistake.
    """
    digits_of = (reversed(str(number)) for number in (addition.first, addition.second))
    steps, digits, carry = [], "", 0
    for column, upper, lower in zip(COLUMNS, *digits_of, strict=True):
        if carry and rng.random() < p_forget:
            carry = 0
        total = int(upper) + int(lower) + carry
        steps.append(f"{column} {upper}+{lower}+{carry}={total}")
        carry, digits = total // 10, f"{total % 10}{digits}"
    return f"<think>{' '.join(steps)}</think>\\boxed{{{'1' if carry else ''}{digits}}}"


ADDITION = make_task("addition", draw_additions)
