"""The run's own policy as the judge, through the engine that samples."""

import json
import shutil
from dataclasses import asdict

import pytest
from tests.ranks import run_multiprocess
from tests.rewards.asking import numbers_of
from tests.runs import train
from tests.tools.rewards.judge_world import TEXTS, config_of, judge_of, rewards_of, run_options

from lightrft.config import ConfigError
from lightrft.engines.factory import build_engine
from lightrft.engines.types import EngineConfig
from lightrft.rewards import RewardError


@pytest.fixture
def engine(folder):
    engine = build_engine(EngineConfig("hf", str(folder / "scorer"), options={"device": "cpu"}))
    yield engine
    engine.close()


@pytest.mark.full
def test_an_answer_follows_from_the_weights_and_its_question_alone(folder, engine):
    with judge_of(folder) as reward:
        reward.use_engine(engine)
        expected = [numbers_of(reward, [text])[0] for text in reversed(TEXTS)][::-1]
    with judge_of(folder) as reward:
        assert (reward.whole_batch, reward.parallel_calls) == (True, 0)
        reward.use_engine(engine)
        assert numbers_of(reward, [*TEXTS, TEXTS[0]]) == [*expected, expected[0]]
        tallies = reward.take_tallies()
    assert set(expected) == {0.3, 0.7}
    assert tallies["judge/requests"] == (12, None)
    assert tallies["judge/completion_tokens"] == (12 * len("Score: 7!"), 12)
    assert not engine.ledger.take()


def test_answers_are_kept_as_long_as_the_weights(folder, engine):
    def requests(reward, texts):
        numbers_of(reward, texts)
        return reward.take_tallies()["judge/requests"][0]

    with judge_of(folder) as reward:
        reward.use_engine(engine)
        assert [requests(reward, TEXTS[:3]), requests(reward, TEXTS[:4])] == [3, 1]
        engine.set_weights_version(1)
        assert requests(reward, TEXTS[:3]) == 3


def test_a_question_that_is_too_long_is_named_and_the_others_are_answered(folder, engine):
    with judge_of(folder) as reward:
        reward.use_engine(engine)
        with pytest.raises(RewardError, match=r"judge policy, sample 1: .*8192"):
            numbers_of(reward, [TEXTS[0], "long " * 2000, TEXTS[1]])
        assert len(numbers_of(reward, TEXTS[:2])) == 2
        assert reward.take_tallies()["judge/requests"] == (2, None)


def test_without_an_engine_there_is_no_policy_to_ask(folder):
    with (
        judge_of(folder) as reward,
        pytest.raises(RewardError, match="only a run with an engine has a policy"),
    ):
        numbers_of(reward, TEXTS[:1])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"stream_chunk": 4}, "judge_model policy: the engine is asked where it has no open"),
        ({"engine_tp_size": 2}, "judge_model policy: each rank asks an engine of its own"),
    ],
)
def test_what_leaves_no_engine_free_is_refused(folder, options, message):
    with pytest.raises(ConfigError, match=message):
        config_of(folder, **options)


def without_template(folder):
    shutil.copytree(folder / "scorer", folder / "plain", dirs_exist_ok=True)
    (folder / "plain" / "chat_template.jinja").unlink(missing_ok=True)
    file = folder / "plain" / "tokenizer_config.json"
    values = json.loads(file.read_text())
    values.pop("chat_template", None)
    file.write_text(json.dumps(values))
    return "plain"


@pytest.mark.parametrize(
    "make, options, message",
    [
        (None, {"judge_args": {"top_p": 2}}, "judge_args: .*top_p=2"),
        (None, {"judge_args": {"n": 2}}, "judge_args: n, stream and logprobs"),
        (None, {"judge_args": {"max_tokens": 0}}, "judge_args: max_tokens must be a whole"),
        (None, {"judge_args": {"speed": 1}}, "judge_args: speed is not supported"),
        (without_template, {}, "judge_model policy: its chat template renders no question"),
    ],
)
def test_what_cannot_judge_is_refused_at_the_start(folder, make, options, message):
    name = "scorer" if make is None else make(folder)
    with pytest.raises(ConfigError, match=message) as found:
        judge_of(folder, pretrain=str(folder / name), **options)
    assert "\n" not in str(found.value)


def train_apart(rank, world_size, options):
    """Where some ranks only generate, each side has a group of its own."""
    return asdict(train(options))["last_metrics"]


def run(folder, world_size, name, **changes):
    """The metrics of the last step, and the reward of each sample."""
    output = folder / f"{name}_{world_size}"
    options = {"pretrain": str(folder / "scorer"), "apply_chat_template": True, **changes}
    options = {"train_batch_size": 16, "actor_learning_rate": 1e-5, "save_steps": -1, **options}
    options = run_options(folder, output, generate_max_len=10, **options)
    ranks = run_multiprocess(train_apart, world_size, timeout_seconds=400, args=(options,))
    return ranks[0], rewards_of(output)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_policy_that_judges_is_trained_alike_on_one_process_and_two(folder):
    metrics, rewards = run(folder, 1, "alone")
    assert set(rewards.values()) == {0.3, 0.7}
    assert len(rewards) == 32
    assert metrics["judge/requests"] <= 16
    assert metrics["grad_norm"] > 0
    assert run(folder, 2, "both")[1] == rewards
    # Rows of the second step are sampled, and judged, by the weights of the first.
    _, with_lag = run(folder, 1, "lag", rollout_lag=1)
    assert len(with_lag) == 32
    assert set(with_lag.values()) == {0.3, 0.7}
    assert run(folder, 2, "split", rollout_lag=1, rollout_ranks=1)[1] == with_lag


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_policy_that_vllm_samples_judges_through_it(folder):
    metrics, rewards = run(folder, 1, "vllm", engine_type="vllm", max_len=1024)
    assert set(rewards.values()) == {0.3, 0.7}
    assert 0 < metrics["judge/requests"] <= 16
