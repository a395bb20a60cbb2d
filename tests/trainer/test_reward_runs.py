"""One step of `lightrft train` with each reward that does not compute in the trainer's process."""

import json

import pytest
from tests.answering import answering
from tests.runs import lines, rollout_options, words, write_inputs

from lightrft.cli.main import main

ASYNC = """
import asyncio


async def grade(response):
    await asyncio.sleep(0.01)
    return float(sum(map(ord, response)) % 3)


async def each(responses):
    return [grade(response) for response in responses]
"""
TESTS = '[{"input": "1 2\\n", "output": "3\\n"}]'


@pytest.fixture
def metrics_of(tmp_path, tiny_model):
    """`metrics_of(reward)`: metrics of the one step of a run."""
    rows = [{"prompt": f"add {i} and 2", "answer": TESTS} for i in range(4)]
    write_inputs(tmp_path, rows, reward=ASYNC)

    def run(reward, **changes):
        common = {
            "pretrain": tiny_model,
            "reward_fn": reward,
            "label_key": "answer",
            "max_steps": 1,
            "n_samples_per_prompt": 2,
            "micro_train_batch_size": 4,
            "prompt_max_len": 256,
            "reward_workers": 2,
        }
        assert main(["train", *words(rollout_options(tmp_path, **common | changes))]) == 0
        return lines(tmp_path / "run/metrics.jsonl")[-1]

    return run


def test_the_judge(metrics_of):
    """It scores a question by its length."""

    def answer(path, headers, body):
        message = {"role": "assistant", "content": f"Well.\nScore: {len(body) % 7}"}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return 200, {"id": "x", "object": "chat.completion", "choices": [choice]}

    with answering(answer) as url:
        metrics = metrics_of("judge", judge_url=f"{url}/v1", judge_model="m")
    assert 0 < metrics["reward/judge"] <= 0.6


def test_a_service_beside_a_function(metrics_of, tmp_path):
    def answer(path, headers, body):
        return 200, {"rewards": [0.25] * len(json.loads(body)["queries"])}

    functions = f"{tmp_path / 'reward.py'}:each"
    with answering(answer) as url:
        options = {"remote_rm_url": url, "reward_weights": (2.0, 10.0)}
        metrics = metrics_of(functions, **options)
    assert metrics["reward/remote"] == 0.25
    assert metrics["reward"] == pytest.approx(2 * metrics["reward/each"] + 2.5)


def test_unit_tests(metrics_of):
    metrics = metrics_of("unit_tests")
    # No random text is a program that adds.
    assert metrics["reward/unit_tests"] == metrics["reward/tests_passed"] == 0
    assert metrics["reward/timeout"] == 0


@pytest.mark.full
def test_a_task_of_reasoning_gym(metrics_of):
    task = "reasoning_gym:letter_counting"
    data = f"{task}?min_words=2&max_words=4"
    metrics = metrics_of(task, prompt_data=data, input_key="input", label_key="label")
    assert 0 <= metrics["reward/letter_counting"] <= 1
    assert metrics["reward/scorer_failed"] == 0
