from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from tests.answering import answering
from tests.programs import run_python

from lightrft.config import ConfigError, TrainConfig
from lightrft.datasets.types import Prompt
from lightrft.engines.types import Completion
from lightrft.records.rollout import Rollout
from lightrft.records.table import tabulate
from lightrft.rewards.build import CombinedReward
from lightrft.rewards.types import RewardError, RewardResult
from lightrft.rollout.scoring import GroupScorer, overlong_penalty, require_rewards, score_rollouts
from lightrft.tools.rewards.remote import RemoteReward


@dataclass
class Result:
    reward: float
    components: dict = field(default_factory=dict)


def scored_by(function, rollouts, *, masks_failures=False, **options):
    """Rollouts scored by a function in the columns that they have."""
    columns = {name for item in rollouts for name in item.prompt.columns}
    scorer = GroupScorer(function, columns=columns, masks_failures=masks_failures)
    return score_rollouts(rollouts, scorer.results(rollouts), **options)


class Scorer:
    def __init__(self, results):
        self.results = results
        self.calls = []

    def score(self, prompts, responses, labels, columns):
        self.calls.append((list(prompts), list(responses), list(labels), dict(columns)))
        return self.results


def in_one_group(rollouts):
    return [replace(item, group_id=0) for item in rollouts]


def rollout(i, *, num_tokens=1, columns=None):
    completion = Completion(
        i, 0, (1,), (2,) * num_tokens, (0.0,) * num_tokens, "temperature", "stop"
    )
    row = Prompt(id=i, text=f"p{i}", token_ids=(1,), label=f"l{i}", columns=columns or {})
    return Rollout(row, completion, i, i, f"r{i}")


def test_the_function_sees_prompt_response_label_and_columns_of_each_row():
    scorer = Scorer([Result(0.5, {"a": 1.0}), Result(-1.0)])
    scored = scored_by(scorer, in_one_group([rollout(0, columns={"k": 3}), rollout(1)]))
    said = [[("user", f"p{i}"), ("assistant", f"r{i}")] for i in range(2)]
    ((*texts, columns),) = scorer.calls
    assert texts == [["p0", "p1"], ["r0", "r1"], ["l0", "l1"]]
    shown = columns.pop("conversations")
    assert [[(m["role"], m["content"]) for m in each] for each in shown] == said
    assert columns == {"k": [3, None]}
    assert [item.reward for item in scored] == [0.5, -1.0]
    assert scored[0].components == {"a": 1.0}


def test_no_rollouts_need_no_call():
    scorer = Scorer([])
    assert scored_by(scorer, []) == []
    assert scorer.calls == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_an_error_not_a_zero(value):
    with pytest.raises(RuntimeError, match="finite"):
        scored_by(Scorer([Result(value)]), [rollout(3)])


def test_a_missing_result_is_an_error():
    with pytest.raises(RuntimeError, match="got 1 for 2"):
        scored_by(Scorer([Result(0.0)]), in_one_group([rollout(0), rollout(1)]))


def penalty(max_tokens, buffer, **options):
    config = TrainConfig(
        overlong_buffer=True, generate_max_len=max_tokens, overlong_buffer_len=buffer, **options
    )
    return overlong_penalty(config)


@pytest.mark.parametrize(
    "num_tokens, value", [(70, 0.0), (80, 0.0), (90, -0.5), (100, -1.0), (110, -1.0)]
)
def test_overlong_penalty_follows_its_formula(num_tokens, value):
    assert penalty(100, 20)(num_tokens) == pytest.approx(value)
    twice = penalty(100, 20, overlong_buffer_penalty_factor=2.0)
    assert twice(num_tokens) == pytest.approx(2 * value)


def test_overlong_penalty_is_part_of_the_reward_and_a_component():
    scored = scored_by(
        Scorer([Result(1.0)]), [rollout(0, num_tokens=9)], overlong_penalty=penalty(10, 4)
    )
    assert scored[0].reward == pytest.approx(0.25)
    assert scored[0].components == {"overlong": pytest.approx(-0.75)}


@pytest.mark.parametrize("buffer", [0, 101])
def test_a_buffer_outside_the_budget_is_refused(buffer):
    with pytest.raises(ConfigError, match="overlong_buffer_len"):
        penalty(100, buffer)


def replying(text):
    return replace(rollout(0), response_text=text)


class Fragile:
    """Fails for responses that contain an x, and in a batch with such a response."""

    name = "fragile"
    needs_labels = False

    def __init__(self, value=None):
        self.calls = 0
        self.value = value

    def score(self, prompts, responses, labels, columns):
        self.calls += 1
        if any("x" in text for text in responses):
            if self.value is None:
                raise RewardError("no x please")
            return [RewardResult(self.value if "x" in text else 1.0) for text in responses]
        return [RewardResult(1.0, {"fragile": 1.0}) for _ in responses]


@pytest.mark.parametrize("value", [None, float("nan")])
def test_a_failed_sample_is_masked_and_the_others_keep_their_rewards(value):
    samples = [replying(text) for text in ("a", "x", "b")]
    with pytest.raises(RewardError):
        scored_by(Fragile(value), samples)
    scored = scored_by(Fragile(value), samples, masks_failures=True)
    assert [item.is_masked for item in scored] == [False, True, False]
    assert [item.reward for item in scored] == [1.0, 0.0, 1.0]


def test_a_broken_function_is_not_tried_for_every_sample():
    function = Fragile()
    scored = scored_by(function, [replying("x")] * 50, masks_failures=True)
    assert all(item.is_masked for item in scored)
    assert function.calls == 4  # the batch and three samples


class Unsure:
    """Cannot decide what contains an x."""

    name = "unsure"
    needs_labels = False

    def score(self, prompts, responses, labels, columns):
        return [None if "x" in text else RewardResult(1.0, {"unsure": 1.0}) for text in responses]


@pytest.mark.parametrize("masks_failures", [False, True])
def test_an_undecided_sample_is_left_out_alone_and_counted(masks_failures):
    samples = in_one_group([replying(text) for text in ("a", "x", "b")])
    scored = scored_by(
        Unsure(), samples, masks_failures=masks_failures, overlong_penalty=penalty(2, 2)
    )
    assert [item.is_masked for item in scored] == [False, True, False]
    assert scored[1].components == {"undecided": 1.0}
    assert tabulate(scored).is_undecided.tolist() == [False, True, False]
    require_rewards(tabulate(scored))
    both = CombinedReward([Unsure(), Fragile(2.0)], [1.0, 1.0])
    assert [item.is_masked for item in scored_by(both, samples)] == [False, True, False]


def test_a_step_of_failed_samples_alone_is_an_error_and_of_undecided_ones_none():
    samples = in_one_group([replying("x"), replying("x")])
    unsure = tabulate(scored_by(Unsure(), samples))
    failed = replace(unsure, component_names=(), components=np.zeros((2, 0)))
    require_rewards(unsure)
    require_rewards(failed, unsure)  # without a baseline, which could not be decided
    with pytest.raises(RewardError, match="all 2 samples of the step: there is nothing"):
        require_rewards(failed)
    with pytest.raises(RewardError, match=r"all 2 samples .*, or for the greedy completions"):
        require_rewards(failed, failed)


def test_accuracy_is_taken_before_the_length_shaping():
    (scored,) = scored_by(Fragile(), [replying("a")], overlong_penalty=penalty(2, 2))
    assert scored.reward < 1.0
    assert scored.accuracy == 1.0


PHASE = """
import time
from lightrft.config import TrainConfig
from lightrft.datasets.types import Prompt
from lightrft.engines.types import Completion
from lightrft.engines.types import SamplingParams
from lightrft.records.rollout import Rollout
from lightrft.rollout.scoring import finished_samples, open_scorer
from lightrft.rollout.source import SampleRequests, SourceParts
from lightrft.rewards.types import RewardResult
from lightrft.strategy import get_fake_strategy

class Slow:
    name, needs_labels = "slow", False
    def score(self, prompts, responses, labels, columns):
        time.sleep(float(responses[0]))
        return [RewardResult(1.0) for _ in responses]

config = TrainConfig(timeout_minutes=2 / 60)
parts = SourceParts(get_fake_strategy().session, config, None, Slow())
completion = Completion(0, 0, (1,), (2,), (0.0,), "temperature", "stop")
row = Prompt(id=0, text="p", token_ids=(1,), label=None, columns={})
for seconds in ("0", "100"):
    requests = SampleRequests([row], range(1), 1, SamplingParams())
    rollouts = [Rollout(row, completion, 0, 0, seconds)]
    table = finished_samples(parts, requests, rollouts, scorer=open_scorer(parts, requests)).table
    print("reward", table.rewards.tolist(), flush=True)
"""


@pytest.mark.full
def test_the_reward_phase_keeps_the_deadline_of_every_phase():
    done = run_python("-c", PHASE, timeout_seconds=90)
    assert done.returncode == 7, done.stderr
    assert done.stdout.count("reward [1.0]") == 1
    assert "spent more than 2 s in phase 'reward'" in done.stderr


def test_what_a_service_answers_outside_its_protocol_is_masked_by_rule():
    def answer(path, headers, body):
        return 200, {"rewards": [1.0]} if b"x" not in body else b"[" * 100_000

    samples = [replying(text) for text in ("a", "x", "b")]
    with answering(answer) as url:
        reward = RemoteReward(url, timeout_seconds=30)
        with pytest.raises(RewardError, match="nested too deeply"):
            scored_by(reward, samples)
        scored = scored_by(reward, samples, masks_failures=True)
        reward.close()
    assert [item.is_masked for item in scored] == [False, True, False]
