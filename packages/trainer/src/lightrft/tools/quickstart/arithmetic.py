r"""Tasks of arithmetic: sums that are worked out, and products that a calculator must work out.

Sums of three digits come from a teacher who forgets the carry three times out of five.
The demonstrations forget the carry more often than not, so imitation cannot get past one sum in
three. The reward checks the boxed answer, and reinforcement finds that remembering it pays. Every
column says its name and its carry, a forgotten one as +0, so that both are learnt alike.

    What is 457+386?
    careful   <think>ones 7+6+0=13 tens 5+8+1=14 hundreds 4+3+1=8</think>\boxed{843}
    careless  <think>ones 7+6+0=13 tens 5+8+0=13 hundreds 4+3+1=8</think>\boxed{833}

No tiny model can work out a product of two three-digit numbers in its head.
A calculator is available. The teacher uses it when the prompt says to compute. Asked what a product
is, the teacher mostly guesses, and so does the imitator. Reinforcement finds that asking pays.

    Compute 457*786.    <tool_call>{"name": "calculate", ...}</tool_call>  359202  \boxed{359202}
    What is 457*786?    \boxed{400000}
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

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


# Products of such numbers have six digits: a tiny model learns to copy them in seconds.
LOWEST, HIGHEST = 400, 999
P_COMPUTE = 0.25
# How often the teacher asks the calculator.
P_CALL = {"What is {}?": 0.3, "Compute {}.": 0.7}
OPENING, CLOSING = '{"name": "calculate", "arguments": {"expression": "', '"}}'


@dataclass(frozen=True, slots=True)
class Product:
    """Question for one product.

    Args:
        first, second: Factors of the product.
        wording: Key of `P_CALL`.
    """

    first: int
    second: int
    wording: str

    @property
    def expression(self) -> str:
        """Expression that a calculator takes."""
        return f"{self.first}*{self.second}"

    @property
    def question(self) -> str:
        """The prompt."""
        return self.wording.format(self.expression)

    @property
    def answer(self) -> str:
        """Product in decimal digits."""
        return str(self.first * self.second)

    def demonstration(self, rng: random.Random) -> list[Message]:
        """Return the teacher's request to the calculator, or a product of rounded numbers."""
        asked = [("system", "calculate"), ("user", self.question)]
        if rng.random() >= P_CALL[self.wording]:
            guess = round(self.first, -2) * round(self.second, -2)
            return [*asked, ("assistant", f"\\boxed{{{guess}}}")]
        call = f"<tool_call>{OPENING}{self.expression}{CLOSING}</tool_call>"
        boxed = f"\\boxed{{{self.answer}}}"
        return [*asked, ("assistant", call), ("tool", self.answer), ("assistant", boxed)]


def draw_products(rng: random.Random, held_out: bool) -> Iterator[Product]:
    """Yield products without end, all on one side of the split."""
    plain, command = P_CALL
    while True:
        first, second = rng.randint(LOWEST, HIGHEST), rng.randint(LOWEST, HIGHEST)
        product = Product(first, second, command if rng.random() < P_COMPUTE else plain)
        if is_held_out(first, second) == held_out:
            yield product


CALCULATOR = make_task("calculator", draw_products)
# An agent that calls the calculator itself.
CALCULATOR_AGENT = replace(
    CALCULATOR,
    files={"reward.py": "boxed_sum.py", "agent.py": "calculator_agent.py"},
    options={**CALCULATOR.options, "environment": None, "agent": "{folder}/agent.py:run"},
)
