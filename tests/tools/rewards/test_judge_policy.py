"""The run's own policy as the judge, through the engine that samples."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from tests.ranks import RankFailure, run_multiprocess
from tests.tools.rewards.chain_model import write_chain_model

from lightrft.config import ConfigError, TrainConfig
from lightrft.engines.factory import build_engine
from lightrft.engines.types import EngineConfig
from lightrft.reporting.rollouts import read_rollout
from lightrft.rewards import RewardError, build_reward
from lightrft.tools.model_presets import write_tiny_model

DRAWN = {"temperature": 1, "max_tokens": 16}
TEXTS = [f"answer {number}" for number in range(12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judging")
    write_chain_model(folder / "scorer", "Score: ", "37")
    write_tiny_model(folder / "mute", "tiny-qwen3", seed=1)
    (folder / "question.txt").write_text("{prompt} <{mark}>{response}<{mark}>")
    rows = [json.dumps({"prompt": f"say {'aeiou'[i % 5] * (1 + i)}"}) for i in range(8)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return folder


def config_of(folder, judge="policy", **options) -> TrainConfig:
    return TrainConfig(
        pretrain=str(folder / "scorer"),
        reward_fn=("judge",),
        judge_model=judge,
        judge_template=str(folder / "question.txt"),
        judge_args=DRAWN,
        output_dir=str(folder / "none" / "run"),
        **options,
    )


@pytest.fixture
def engine(folder):
    engine = build_engine(EngineConfig("hf", str(folder / "scorer"), options={"device": "cpu"}))
    yield engine
    engine.close()


def grades(reward, texts):
    return [each.reward for each in reward.score(["task"] * len(texts), texts, [None] * 99, {})]


@pytest.mark.full
def test_one_batch_has_the_answers_of_a_judge_of_the_same_folder(folder, engine):
    with build_reward(["judge"], config=config_of(folder, str(folder / "scorer"))) as reward:
        expected = grades(reward, TEXTS)
    with build_reward(["judge"], config=config_of(folder)) as reward:
        assert (reward.whole_batch, reward.parallel_calls) == (True, 0)
        reward.use_engine(engine)
        assert grades(reward, [*TEXTS, TEXTS[0]]) == [*expected, expected[0]]
        tallies = reward.take_tallies()
    assert set(expected) == {0.3, 0.7}
    assert tallies["judge/requests"] == (12, None)
    assert tallies["judge/completion_tokens"] == (12 * len("Score: 7!"), 12)
    assert not engine.ledger.take()


def test_answers_are_kept_as_long_as_the_weights(folder, engine):
    def requests(reward, texts):
        grades(reward, texts)
        return reward.take_tallies()["judge/requests"][0]

    with build_reward(["judge"], config=config_of(folder)) as reward:
        reward.use_engine(engine)
        assert [requests(reward, TEXTS[:3]), requests(reward, TEXTS[:4])] == [3, 1]
        engine.set_weights_version(1)
        assert requests(reward, TEXTS[:3]) == 3


def test_a_question_that_is_too_long_is_named_and_the_others_are_answered(folder, engine):
    with build_reward(["judge"], config=config_of(folder)) as reward:
        reward.use_engine(engine)
        with pytest.raises(RewardError, match=r"judge policy, sample 1: .*8192"):
            grades(reward, [TEXTS[0], "long " * 2000, TEXTS[1]])
        assert len(grades(reward, TEXTS[:2])) == 2
        assert reward.take_tallies()["judge/requests"] == (2, None)


def test_without_an_engine_there_is_no_policy_to_ask(folder):
    with (
        build_reward(["judge"], config=config_of(folder)) as reward,
        pytest.raises(RewardError, match="only a run with an engine has a policy"),
    ):
        grades(reward, TEXTS[:1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stream_chunk": 4}, "judge_model policy: the engine is asked where it has no open"),
        ({"engine_tp_size": 2}, "judge_model policy: each rank asks an engine of its own"),
    ],
)
def test_what_leaves_no_engine_free_is_refused(folder, options, message):
    with pytest.raises(ConfigError, match=message):
        config_of(folder, **options)


def test_a_field_without_effect_is_refused_before_a_model_is_built(folder):
    config = config_of(folder)
    config.judge_args = {"n": 2}
    with pytest.raises(ConfigError, match="judge_args: n, stream and logprobs"):
        build_reward(["judge"], config=config)


def train_each(rank, world_size, runs):
    from lightrft.run.assembly import run_training
    from lightrft.strategy.distributed.process_groups import start_process_group

    if not runs[0].get("rollout_ranks"):  # each side has a group of its own
        start_process_group(None)
    return [asdict(run_training(TrainConfig(**values)))["last_metrics"] for values in runs]


def run(folder, world_size, name, **options):
    """The metrics of the last step, and the reward of each sample of it."""
    output = folder / f"{name}_{world_size}"
    values = {
        **vars(config_of(folder)),
        "prompt_data": str(folder / "rows.jsonl"),
        "input_key": "prompt",
        "apply_chat_template": True,
        "fsdp": True,
        "bf16": False,
        "engine_type": "hf",
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 4,
        "train_batch_size": 16,
        "micro_train_batch_size": 4,
        "generate_max_len": 10,
        "prompt_max_len": 64,
        "max_steps": 2,
        "actor_learning_rate": 1e-5,
        "save_rollouts": True,
        "save_steps": -1,
        "output_dir": str(output),
        **options,
    }
    ranks = run_multiprocess(train_each, world_size, timeout_seconds=400, args=([values],))
    samples = [
        read_rollout(line, "a line")
        for line in (output / "rollouts.jsonl").read_bytes().splitlines()
    ]
    rewards = {(each.step, each.sample_id): each.reward for each in samples}
    return ranks[0][0], rewards


@pytest.mark.full
@pytest.mark.multiprocess
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
@pytest.mark.multiprocess
@pytest.mark.timeout(900)
def test_a_policy_that_vllm_samples_judges_through_it(folder):
    metrics, rewards = run(folder, 1, "vllm", engine_type="vllm", max_len=1024)
    assert set(rewards.values()) == {0.3, 0.7}
    assert 0 < metrics["judge/requests"] <= 16


@pytest.mark.multiprocess
@pytest.mark.timeout(600)
def test_a_policy_without_a_usable_answer_ends_the_run(folder):
    with pytest.raises(RankFailure, match="the reward failed for all 16 samples of the step"):
        run(folder, 1, "mute", pretrain=str(folder / "mute"), reward_failure="mask")
