r"""Products that a calculator must work out: no tiny model can do it in its head.

The teacher uses the calculator when the prompt says to compute. Asked what a product is, the
teacher mostly guesses, and so does the imitator. Reinforcement finds that asking pays.

    Compute 457*786.    <tool_call>{"name": "calculate", ...}</tool_call>  359202  \boxed{359202}
    What is 457*786?    \boxed{400000}
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lightrft.tools.quickstart.task import Message, is_held_out, make_task

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
