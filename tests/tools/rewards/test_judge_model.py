"""A judge of a folder: a model in a process of its own."""

import json
import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import psutil
import pytest
from tests.machine import seconds
from tests.ranks import run_multiprocess
from tests.rewards.asking import numbers_of
from tests.runs import interrupted, train_on_ranks
from tests.tools.rewards.chain_model import write_chain_model
from tests.tools.rewards.judge_world import (
    TEXTS,
    config_of,
    first_rows,
    judge_of,
    run_options,
)

from lightrft.config import TrainConfig
from lightrft.rewards import RewardError, build_reward
from lightrft.strategy.config import ConfigError
from lightrft.tools.plan.memory import MemoryTerm, model_terms
from lightrft.tools.plan.setup import Setup
from lightrft.tools.plan.sizes import read_model_size
from lightrft.tools.rewards.judge import CACHE_FOLDER


def worker(reward):
    """The process that holds the model; its parent is the supervisor."""
    [judge] = reward.functions
    found = psutil.Process(judge.server.workers.workers[0].pid).children()
    return found[0]


@pytest.mark.full
def test_an_answer_follows_from_the_weights_and_its_question_alone(folder):
    with judge_of(folder) as reward:
        first = numbers_of(reward, TEXTS)
        tallies = reward.take_tallies()
    assert set(first) == {0.3, 0.7}
    assert tallies["judge/requests"] == (12, None)
    assert tallies["judge/completion_tokens"] == (12 * len("Score: 7!"), 12)
    with judge_of(folder) as reward:
        apart = [numbers_of(reward, [text])[0] for text in reversed(TEXTS)]
    assert apart[::-1] == first


@pytest.mark.full
def test_other_weights_do_not_find_old_answers(folder, tmp_path):
    shutil.copytree(folder / "scorer", tmp_path / "model")
    config = replace(config_of(folder), output_dir=str(tmp_path), judge_model=f"{tmp_path}/model")
    with build_reward(["judge"], config=config) as reward:
        numbers_of(reward, TEXTS[:2])
    assert (tmp_path / CACHE_FOLDER).is_dir()
    write_chain_model(tmp_path / "model", "Score: ", "2")
    with build_reward(["judge"], config=config) as reward:
        assert numbers_of(reward, TEXTS[:2]) == [0.2, 0.2]


@pytest.mark.full
def test_a_judge_that_refuses_or_dies_is_named_and_goes_on(folder):
    with judge_of(folder) as reward:
        with pytest.raises(RewardError, match=r"sample 1: .*8192"):
            numbers_of(reward, [TEXTS[0], "long " * 2000, TEXTS[1]])
        before = numbers_of(reward, TEXTS[:2])  # which that cost nothing
        assert reward.take_tallies()["judge/requests"] == (2, None)
        worker(reward).kill()
        with pytest.raises(RewardError, match=r"scorer, sample 0: .*SIGKILL.*\(3 answers") as found:
            numbers_of(reward, TEXTS[4:7])
        assert "\n" not in str(found.value)
        assert numbers_of(reward, TEXTS[:2]) == before  # of the cache
        assert len(numbers_of(reward, TEXTS[4:7])) == 3


@pytest.mark.full
def test_a_judge_that_hangs_is_ended_at_the_deadline(folder):
    config = config_of(folder, reward_timeout_seconds=seconds(3))
    with build_reward(["judge"], config=config) as reward:
        numbers_of(reward, TEXTS[:1])
        process = worker(reward)
        process.suspend()
        with pytest.raises(RewardError, match="2 questions were not answered within"):
            numbers_of(reward, TEXTS[1:3])
        assert not process.is_running()


def without_template(folder):
    shutil.copytree(folder / "scorer", folder / "plain", dirs_exist_ok=True)
    (folder / "plain" / "chat_template.jinja").unlink(missing_ok=True)
    file = folder / "plain" / "tokenizer_config.json"
    values = json.loads(file.read_text())
    values.pop("chat_template", None)
    file.write_text(json.dumps(values))
    return "plain"


@pytest.mark.full
@pytest.mark.parametrize(
    "model, options, message",
    [
        ("nowhere", {}, "is no folder of a model: give one, of a run RUN/model, or --judge_url"),
        ("scorer", {"judge_args": {"top_p": 2}}, "judge_args: .*top_p=2"),
        ("scorer", {"judge_args": {"n": 2}}, "judge_args: n, stream and logprobs"),
        ("scorer", {"judge_args": {"max_tokens": 0}}, "judge_args: max_tokens must be a whole"),
        ("scorer", {"judge_args": {"speed": 1}}, "judge_args: speed is not supported"),
        (without_template, {}, "plain: its chat template renders no question"),
    ],
)
def test_what_cannot_judge_is_refused_at_the_start(folder, model, options, message):
    name = model if isinstance(model, str) else model(folder)
    with pytest.raises(ConfigError, match=message) as found:
        judge_of(folder, name, **options)
    assert "\n" not in str(found.value)


def test_a_plan_counts_the_judge_on_the_host(folder):
    size = read_model_size(str(folder / "policy"))
    config = config_of(folder)
    for has_gpu in (False, True):
        setup = Setup(config, size, 2, 2, has_gpu, 1e12, "hf")
        judge = read_model_size(config.judge_model)
        assert MemoryTerm("judge", 4 * judge.parameters, has_gpu) in list(model_terms(setup))
    served = replace(config, judge_url="http://127.0.0.1:1/v1")
    assert Setup(served, size, 2, 2, False, 1e12, "hf").judge is None


def cut(rank, world_size, options):
    """A run that ends in its second step."""
    from lightrft.run.assembly import run_training

    def trainer(config):
        return SimpleNamespace(train=partial(run_training, config, stage="policy"))

    interrupted(trainer, TrainConfig(**options), 2)


@pytest.mark.full
def test_a_run_is_judged_alike_on_two_ranks_and_after_an_interruption(folder, tmp_path):
    whole, parts, two = (
        run_options(folder, tmp_path / name, n_samples_per_prompt=2, save_steps=1)
        for name in ("whole", "parts", "two")
    )
    ((summary,),) = train_on_ranks(1, [whole])
    assert 0.3 < summary["last_metrics"]["reward"] < 0.7
    assert summary["last_metrics"]["judge/requests"] > 0
    run_multiprocess(cut, 1, timeout_seconds=300, args=(parts,))
    train_on_ranks(1, [parts])
    assert first_rows(tmp_path / "parts", 99) == first_rows(tmp_path / "whole", 99)
    train_on_ranks(2, [two])
    assert first_rows(tmp_path / "two", 8) == first_rows(tmp_path / "whole", 8)
    judge = json.loads((tmp_path / "whole" / "run.json").read_text())["models"]["judge_model"]
    assert judge["path"] == str(folder / "scorer")
    assert len(judge["weights_sha256"]) == 64
