"""The judge against the real server of vLLM, on the loopback interface."""

import json

import pytest
from tests.rewards.asking import results_of
from tests.vllm_server import serving_model

from lightrft.config import TrainConfig
from lightrft.rewards import build_reward
from lightrft.tools.model_presets import write_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Of a server with a tiny random model, named `tiny`."""
    folder = tmp_path_factory.mktemp("judge")
    write_tiny_model(folder / "model", "tiny-qwen3", seed=1)
    with serving_model(folder / "model", "tiny") as url:
        yield url


@pytest.fixture
def ask(address, tmp_path):
    """Scores of responses, with fields of the request."""
    template = tmp_path / "template"
    template.write_text("Grade. {mark} {response} {mark}")

    def call(responses, *, model="tiny", seconds=120.0, **fields):
        config = TrainConfig(
            judge_url=address,
            judge_model=model,
            judge_template=str(template),
            judge_args=fields,
            reward_timeout_seconds=seconds,
            output_dir=str(tmp_path),
        )
        with build_reward(["judge"], config=config) as reward:
            found = results_of(reward, responses)
        return [item.reward for item in found]

    return call


# A model that says nothing sensible still keeps to a schema.
SCORES = {"structured_outputs": {"regex": r"Fine\.\nScore: [0-9]"}, "max_tokens": 32}


def test_scores_are_read_from_the_answers_of_the_server(ask, tmp_path):
    responses = [f"response {index}" for index in range(12)]
    scores = ask(responses, **SCORES)
    assert all(score in [digit / 10 for digit in range(10)] for score in scores)
    assert len(set(scores)) > 1
    answers = [
        json.loads(line)["answer"]
        for file in (tmp_path / "judge_cache").iterdir()
        for line in file.read_text().splitlines()
        if line
    ]
    assert sorted(answers) == sorted(f"Fine.\nScore: {10 * score:.0f}" for score in scores)
    # A continued run asks for nothing: nobody answers within this time.
    assert ask(responses, seconds=1e-3, **SCORES) == scores
