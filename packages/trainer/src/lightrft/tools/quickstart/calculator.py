r"""The task: products of two three-digit numbers, which no tiny model can work out in its head.

A calculator is available. The teacher uses it when the prompt says to compute. Asked what a product
is, the teacher mostly guesses, and so does the imitator. Reinforcement finds that asking pays.

    Compute 457*786.    <tool_call>{"name": "calculate", ...}</tool_call>  359202  \boxed{359202}
    What is 457*786?    \boxed{400000}
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from lightrft.config import TrainConfig
from lightrft.tools.quickstart.task import Message, Task, is_held_out

# Products of such numbers have six digits: a tiny model learns to copy them in seconds.
LOWEST, HIGHEST = 400, 999
P_COMPUTE = 0.25
# How often the teacher asks the calculator.
P_CALL = {"What is {}?": 0.3, "Compute {}.": 0.7}
OPENING, CLOSING = '{"name": "calculate", "arguments": {"expression": "', '"}}'
# Like the template of an instruct model: it names the tools, writes calls and their answers.
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ '<|system|>' + tool.function.name }}{% endfor %}"
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content }}"
    "{% for call in message.tool_calls or [] %}{{ '<tool_call>' + "
    "({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + "
    "'</tool_call>' }}{% endfor %}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


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


def with_calculator(config: TrainConfig, directory: Path) -> TrainConfig:
    """Return a run whose model may call the calculator in `directory`."""
    return replace(
        config,
        environment=f"{directory / 'environment.py'}:Calculator",
        environment_workers=1,
        max_turns=3,
        max_observation_tokens=96,
        generate_max_len=24,
    )


CALCULATOR = Task(
    lesson="a teacher who mostly guesses instead of asking the calculator",
    flaw=(
        "It copies what the teacher does more often: asked what a product is, it",
        "guesses; it is right only where it is told to compute.",
    ),
    outlook=(
        "Held-out accuracy takes the likeliest answer, the reward is of sampled ones:",
        "those ask the calculator now and then, and only they are rewarded.",
    ),
    roles=("<|system|>", "<|tool|>"),
    whole_tokens=(
        "<tool_call>",
        "</tool_call>",
        OPENING,
        CLOSING,
        "calculate",
        "\\boxed{",
        "What is ",
        "Compute ",
        "[cut]",
    ),
    draw=draw_products,
    reward="boxed_sum.py",
    template=CHAT_TEMPLATE,
    environment="calculator_environment.py",
    adjust=with_calculator,
    numbers={"num_steps": 20, "num_warm_start_steps": 300, "num_eval_prompts": 256},
)


def with_agent(config: TrainConfig, directory: Path) -> TrainConfig:
    """Return the same run with an agent that calls the calculator itself."""
    agent = f"{directory / 'agent.py'}:run"
    return replace(with_calculator(config, directory), environment=None, agent=agent)


CALCULATOR_AGENT = replace(
    CALCULATOR, environment=None, agent="calculator_agent.py", adjust=with_agent
)
