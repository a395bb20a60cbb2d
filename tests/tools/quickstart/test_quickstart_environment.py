"""The quick start with a calculator: what is shown, what is imitated, and that asking is learnt."""

from __future__ import annotations

import json

import pytest
from tests.tools.quickstart.dice import Dice

from lightrft.cli.main import main
from lightrft.datasets.chat_ids import ChatIds
from lightrft.datasets.suffix import TurnSuffix
from lightrft.rollout.environments.call_formats import ToolCall
from lightrft.rollout.environments.calls import choose_parser
from lightrft.rollout.environments.environments import control_token_ids
from lightrft.rollout.environments.worker import HostedEnvironments
from lightrft.tools.quickstart.quickstart_command import Recipe, prepare, reinforce
from lightrft.tools.quickstart.task import examples_folder, load_example
from lightrft.tools.quickstart.warm_start import IGNORED, build_tokenizer, demonstration_batch

pytestmark = pytest.mark.shard("quickstart_environment")
CALCULATOR, CALCULATOR_AGENT, Product = (
    load_example(f"calculator.py:{name}") for name in ("CALCULATOR", "CALCULATOR_AGENT", "Product")
)

NOISE = """
import random


class Calculator:
    def reset(self, **row):
        self.random = random.Random(str(row["prompt"]))

    def calculate(self, expression: str) -> int:
        \"\"\"Answer anything.

        Args:
            expression: Is not looked at.
        \"\"\"
        return self.random.randint(160_000, 998_001)
"""


def schemas():
    path = examples_folder() / CALCULATOR.files["environment.py"]
    hosted = HostedEnvironments(f"{path}:Calculator", (), 1000)
    return hosted.describe()[""]["schemas"]


def test_the_teacher_asks_or_guesses():
    product = Product(457, 786, "What is {}?")
    asked = [("system", "calculate"), ("user", "What is 457*786?")]
    call = '<tool_call>{"name": "calculate", "arguments": {"expression": "457*786"}}</tool_call>'
    assert product.demonstration(Dice(0.29)) == [
        *asked,
        ("assistant", call),
        ("tool", "359202"),
        ("assistant", r"\boxed{359202}"),
    ]
    assert product.demonstration(Dice(0.31)) == [*asked, ("assistant", r"\boxed{400000}")]
    told = Product(457, 786, "Compute {}.").demonstration(Dice(0.69))
    assert [role for role, _ in told] == ["system", "user", "assistant", "tool", "assistant"]


def test_the_calculator_answers_whole_numbers_and_refuses_all_else():
    calculator = load_example("calculator_environment.py:Calculator")()
    calculator.reset(prompt="What is 2*3?", answer="6")
    assert calculator.calculate("457*786") == 359202
    assert calculator.calculate("3 - 12") == -9
    for expression in ("", "2*", "2**9", "1/2", "__import__('os')", "9" * 10 + "*1"):
        with pytest.raises(ValueError, match="two whole numbers"):
            calculator.calculate(expression)


def test_what_the_run_renders_is_what_was_demonstrated():
    """Prompt, call, answer and frame between turns have the ids of the imitation, bit for bit."""
    tokenizer, tools = build_tokenizer(CALCULATOR), schemas()
    suffix = TurnSuffix(ChatIds(tokenizer), tools=tools)
    assert suffix.shows_tools
    assert (suffix.role, suffix.differences) == ("tool", ())
    product = Product(457, 786, "Compute {}.")
    call, answer, boxed = (text for _, text in product.demonstration(Dice(0.0))[2:])
    turns = [tokenizer(f"{text}<|end|>")["input_ids"] for text in (call, boxed)]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": product.question}],
        tools=tools,
        tokenize=False,
        add_generation_prompt=True,
    )
    rendered = [
        *tokenizer(prompt)["input_ids"],
        *turns[0],
        *suffix.after(turns[0], [answer]).token_ids,
        *turns[1],
    ]

    token_ids, targets = demonstration_batch(tokenizer, [product], Dice(0.0))
    assert token_ids[0].tolist() == rendered
    said = [token for turn in turns for token in turn]
    assert targets[targets != IGNORED].tolist() == said
    assert tokenizer.unk_token_id not in rendered
    assert choose_parser("auto", tokenizer, tools)(call, True) == [
        ToolCall("calculate", {"expression": "457*786"})
    ]


def test_an_unknown_character_is_no_forged_turn():
    """The mark of what is not in the vocabulary is a special token, but nobody speaks with it."""
    tokenizer = build_tokenizer(CALCULATOR)
    forging = control_token_ids(tokenizer)
    unknown = tokenizer("[é]", split_special_tokens=True)["input_ids"]
    assert set(unknown) == {tokenizer.unk_token_id}
    assert forging.isdisjoint(unknown)
    roles = tokenizer("<|user|><|assistant|><|system|><|tool|><|end|>")["input_ids"]
    assert len(roles) == 5
    assert forging >= set(roles)
    tokenizer.unk_token = tokenizer.eos_token  # as in GPT-2
    assert tokenizer.eos_token_id in control_token_ids(tokenizer)


@pytest.mark.full
def test_a_short_run_holds_conversations(tmp_path, capsys):
    folder = tmp_path / "run"
    argv = ["--environment", "--output_dir", str(folder), "--threads", "1"]
    argv += ["--steps", "2", "--warm_start_steps", "40", "--eval_prompts", "8"]
    assert main(["quickstart", *argv]) == 0
    shown = capsys.readouterr().out
    assert "calculator" in shown.splitlines()[0]
    assert "step 2/2  reward" in shown
    assert f"edit {folder / 'reward.py'} or {folder / 'environment.py'}" in shown
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(1.0 <= entry["episode/turns"] <= 3.0 for entry in steps[1:])
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert all(sample["turns"][0]["said"] in sample["response"] for sample in samples)
    assert (folder / "environment.py").read_text().startswith('"""An environment as a user writes')
    assert list((folder / "journal").glob("step-000002*"))


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_asking_the_calculator_is_learnt(tmp_path, seed):
    argv = ["--environment", "--threads", "1", "--seed", str(seed)]
    assert main(["quickstart", *argv, "--output_dir", str(tmp_path / "run")]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["accuracy_before"] < 0.45
    assert summary["accuracy_after"] >= summary["accuracy_before"] + 0.5
    last = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["episode/turns"] > 1.7


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_calculator_that_answers_noise_teaches_nothing(tmp_path):
    recipe = Recipe(task=CALCULATOR, num_threads=1, **CALCULATOR.numbers)
    prepare(recipe, tmp_path)
    (tmp_path / "environment.py").write_text(NOISE)
    outcome = reinforce(recipe, tmp_path)
    assert outcome.first_eval["eval/reward"] < 0.05
    assert outcome.last_eval["eval/reward"] < 0.05


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(3))
def test_an_agent_learns_to_ask_as_an_environment_does(seed, tmp_path):
    own = {"seed": seed, "num_eval_prompts": 128}
    found = []
    for task in (CALCULATOR, CALCULATOR_AGENT):
        recipe = Recipe(task=task, **{**task.numbers, **own})
        folder = tmp_path / ("environment" if task is CALCULATOR else "agent")
        folder.mkdir()
        prepare(recipe, folder)
        found.append(reinforce(recipe, folder).last_eval["eval/reward"])
    assert found[1] > 0.9
    assert abs(found[0] - found[1]) <= 0.05
