"""The ledger gate finds rows that are trained with anything but what they were given.

Each fault is planted between the place where a fact arises and the update, in the functions that a
step of a run calls.
"""

from dataclasses import replace

import numpy as np
import pytest
from tests.engines.fake_engine import FakeEngine
from tests.rollout.stages import GatePassed, UpToForward

from lightrft.config import TrainConfig
from lightrft.datasets.types import Prompt
from lightrft.engines.types import EngineConfig
from lightrft.experience import delivery, maker
from lightrft.experience.delivery import Delivery
from lightrft.experience.maker import AdvantageSettings, ForwardModels, make_experience
from lightrft.models.layout import LayoutPolicy
from lightrft.rewards.types import RewardError, RewardResult
from lightrft.rollout import dynamic, sampler, scoring
from lightrft.rollout.in_flight import from_parts, to_bytes
from lightrft.rollout.ledger_records import LedgerError
from lightrft.rollout.open_groups import NOTHING_OPEN
from lightrft.rollout.sampler import RolloutSampler
from lightrft.rollout.source import InFlight, SourceParts
from lightrft.strategy import get_fake_strategy
from lightrft.strategy.distributed.deadlines import StepTimer

GROUP = 4


class Letters:
    """Tokens as text."""

    pad_token_id = None

    def decode(self, token_ids, *, skip_special_tokens):
        return " ".join(map(str, token_ids))


class Reward:
    """Two components of a response; it fails for some, and any answer to prompt 2 is right."""

    def score(self, prompts, responses, labels, columns):
        sums = [sum(map(ord, text)) for text in responses]
        if any(number % 5 == 0 for number in sums):
            raise RewardError("too odd")
        return [
            RewardResult(n % 7.0, {"accuracy": float(n % 2 or label == "2"), "size": n + 2.0})
            for n, label in zip(sums, labels, strict=True)
        ]


class UndecidedReward(Reward):
    """One that gives up on some responses, too."""

    def score(self, *given):
        results = super().score(*given)
        return [None if found.reward == 3 else found for found in results]


class ModelScores:
    """A reward model's results."""

    def score(self, rollouts, encoder):
        values = [len(item.response_text) / 3 for item in rollouts]
        return [RewardResult(value, {"model": value}) for value in values]


def train_step(
    monkeypatch, *, is_packed=False, num_steps=1, model_rewards=None, reward=None, **options
):
    """A step from its prompts to the end of the gate."""
    config = TrainConfig(
        **{
            "bf16": False,
            "temperature": 0.7,
            "n_samples_per_prompt": GROUP,
            "rollout_batch_size": 4,
            "train_batch_size": 4 * GROUP,
            "micro_rollout_batch_size": 5,
            "generate_max_len": 9,
            "reward_failure": "mask",
            "enable_engine_sleep": False,
            **options,
        }
    )
    strategy = get_fake_strategy(config)
    strategy.inference_engine = FakeEngine(EngineConfig("fake", "", options={"eos_token_id": 5}))
    strategy.inference_engine.set_weights_version(3)
    parts = SourceParts(strategy.session, config, Letters(), reward or Reward(), model_rewards)
    source = RolloutSampler(parts, needs_greedy=config.advantage_estimator == "remax")
    number = 0

    def draw():
        nonlocal number
        number += 4
        return [prompt(number - 4 + i) for i in range(4)]

    monkeypatch.setattr(maker, "choose_layout", lambda *_: LayoutPolicy(packs_samples=is_packed))
    stream = NOTHING_OPEN
    for step in range(num_steps):
        samples = source.collect(
            draw(), first_request_id=100 * step, timer=StepTimer(), next_prompts=draw, stream=stream
        )
        with pytest.raises(GatePassed):
            make_experience(
                samples,
                ForwardModels(actor=None),
                delivery=Delivery(strategy.context),
                engine=strategy.inference_engine,
                settings=AdvantageSettings(config, None),
                step=0,
                timer=UpToForward(),
            )
        # As a checkpoint keeps it.
        kept = to_bytes(InFlight(stream=samples.stream), 0)
        stream = from_parts([kept], 0, rank=0, world_size=1).stream
    return samples


def prompt(number):
    columns = {"kind": number}
    return Prompt(number, f"question {number}", (number, 7), label=str(number), columns=columns)


DYNAMIC = {"dynamic_sampling": True, "max_num_gen_batches": 2}
REMAX = {"advantage_estimator": "remax"}
OVERLONG = {
    "overlong_buffer": True,
    "overlong_buffer_len": 6,
    "overlong_buffer_penalty_factor": 0.5,
}
FIRE = {"use_fire": True, "first_token_temperature": 3.0}
MODELS = {"model_rewards": ModelScores()}


SOUND = {
    "plain": {},
    "packed": {"is_packed": True},
    "top_p": {"top_p": 0.9},
    "top_k, packed": {"top_k": 3, "is_packed": True},
    "fire": FIRE,
    "fire at one temperature": {**FIRE, "first_token_temperature": 0.7},
    "fire of one token": {**FIRE, "generate_max_len": 1},
    "dynamic, greedy": {**DYNAMIC, **REMAX},
    "dynamic, overlong": {**DYNAMIC, **OVERLONG},
    "reward model": MODELS,
    "undecided": {"reward": UndecidedReward()},
    "undecided, greedy": {"reward": UndecidedReward(), **REMAX},
    "stream": {"stream_chunk": 2, "num_steps": 3},
    "shaped": {"reward_running_norm": True, "reward_clip": 1.0},
}


@pytest.mark.parametrize("name", SOUND)
def test_no_false_alarm(name, monkeypatch):
    assert len(train_step(monkeypatch, **SOUND[name]).table) == 4 * GROUP


def after(module, name, change):
    """A fault that changes what a function returns."""

    def plant(patch):
        right = getattr(module, name)
        patch.setattr(module, name, lambda *args, **named: change(right(*args, **named)))

    return plant


def rows_of(change):
    return after(scoring, "exchange", change)


def column(name, change):
    return lambda table: replace(table, **{name: change(getattr(table, name))})


def exchanged(values):
    """The first two that differ, exchanged."""
    found = values.copy()
    other = int(np.flatnonzero(values != values[0])[0])
    found[[0, other]] = values[[other, 0]]
    return found


def swapped_scores(scored):
    rewards = exchanged(np.array([item.reward for item in scored]))
    return [replace(item, reward=float(r)) for item, r in zip(scored, rewards, strict=True)]


def first_flipped(values):
    found = values.copy()
    found[0] = ~found[0]
    return found


def unmasked(values):
    assert values.any()
    return values & False


def scored_otherwise(change):
    """The reward function is given other rollouts than were sampled."""

    def plant(patch):
        right = scoring.GroupScorer.call_reward

        def call(self, rollouts):
            return right(self, [change(rollout) for rollout in rollouts])

        patch.setattr(scoring.GroupScorer, "call_reward", call)

    return plant


def with_prompt(**changes):
    return scored_otherwise(lambda r: replace(r, prompt=replace(r.prompt, **changes)))


def of_an_earlier_attempt(rollout):
    ids = (1, *rollout.completion.output_token_ids[1:])
    return replace(rollout, completion=replace(rollout.completion, output_token_ids=ids))


def as_evaluated(params):
    return replace(params, temperature=0.2)


def greedy_of_another(samples):
    table = samples.greedy
    return replace(samples, greedy=replace(table, rewards=exchanged(table.rewards)))


def without_a_greedy_sample(samples):
    return replace(samples, greedy=samples.greedy.take(np.arange(1, 4)))


def unpunished(scored):
    return [replace(item, reward=item.unshaped) for item in scored]


def next_failed(results):
    assert None in results
    return [*results[1:], results[0]]


FAULTS = {
    "rewards of two rows": (after(scoring, "score_rollouts", swapped_scores), {}, "rewards differ"),
    "rewards in the exchange": (rows_of(column("rewards", exchanged)), {}, "rewards differ"),
    "rewards rounded": (
        rows_of(column("rewards", lambda v: v.astype(np.float16).astype(np.float64) + 1e-9)),
        {},
        "rewards differ",
    ),
    "results shifted by one": (
        after(scoring.GroupScorer, "results", next_failed),
        {},
        "(rewards|is_masked|accuracies) differ",
    ),
    "groups of two rows": (rows_of(column("group_ids", exchanged)), {}, "group_ids differ"),
    "group of rows on one rank": (
        after(delivery, "deliver_rows", column("group_ids", exchanged)),
        {},
        "group_ids differ",
    ),
    "group in the batch": (
        after(delivery, "collate", column("group_ids", lambda v: v.flip(0))),
        {},
        "group_ids differ",
    ),
    "failed rows are trained": (
        rows_of(column("is_masked", unmasked)),
        {},
        "is_masked differ: True was written down as it arose, False",
    ),
    "failed rows are trained on one rank": (
        after(delivery, "deliver_rows", column("is_masked", unmasked)),
        {},
        "is_masked differ",
    ),
    "sound rows are left out": (
        rows_of(column("is_masked", first_flipped)),
        {},
        "is_masked differ: False was written down",
    ),
    "accuracies of two rows": (rows_of(column("accuracies", exchanged)), {}, "accuracies differ"),
    "components exchanged": (
        rows_of(column("components", lambda v: v[:, ::-1].copy())),
        {},
        "component accuracy differ",
    ),
    "rewards in the batch": (
        after(delivery, "collate", column("rewards", lambda v: v.flip(0))),
        {},
        "rewards differ",
    ),
    "another temperature": (
        after(delivery, "training_params", as_evaluated),
        {},
        "temperature differs: it was sampled at 0.7, the trainer scores at 0.2",
    ),
    "temperature of the evaluation": (
        after(sampler, "training_params", as_evaluated),
        {},
        "temperature differs: it was sampled at 0.2, the trainer scores at 0.7",
    ),
    "another truncation": (
        after(sampler, "training_params", lambda params: replace(params, top_p=0.8)),
        {"top_p": 0.9},
        "top_p, top_k and min_p differ",
    ),
    "nothing is compared": (
        after(delivery, "collate", column("compared_mask", lambda v: None)),
        {},
        "compared mask differ: got False, expected True",
    ),
    "all is compared": (
        after(delivery, "collate", column("compared_mask", lambda v: v | True)),
        FIRE,
        "compared mask differ: got True, expected False",
    ),
    "first tokens are compared": (
        after(delivery, "collate", lambda b: replace(b, compared_mask=b.response_mask)),
        FIRE,
        "compared mask differ: got True, expected False",
    ),
    "truncated rows as finished ones": (
        rows_of(column("is_truncated", np.logical_not)),
        {},
        "is_truncated differ",
    ),
    "lengths of the responses": (
        rows_of(column("sampled_lengths", lambda v: v + 1)),
        {},
        "sampled_lengths differ",
    ),
    "label of another prompt": (with_prompt(label="41"), {}, "the reward got another label"),
    "text of another prompt": (with_prompt(text="q"), {}, "the reward got another text"),
    "column of another prompt": (
        with_prompt(columns={"kind": "other"}),
        {},
        "the reward got another column 'kind'",
    ),
    "reward of an earlier attempt": (
        scored_otherwise(of_an_earlier_attempt),
        {},
        "its reward was given to other tokens",
    ),
    "a filler is trained": (
        after(dynamic, "apply_selection", column("is_masked", lambda v: v & False)),
        {"dynamic_sampling": True, "max_num_gen_batches": 1},
        "is_masked differ",
    ),
    "a greedy sample is lost": (
        after(sampler.GreedySource, "sample", without_a_greedy_sample),
        REMAX,
        "that were written down are missing",
    ),
    "greedy reward of another prompt": (
        after(sampler.GreedySource, "sample", greedy_of_another),
        REMAX,
        "group .*: rewards differ",
    ),
    "the length is not punished": (
        after(scoring, "score_rollouts", unpunished),
        OVERLONG,
        "rewards differ",
    ),
}


@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_row_that_is_trained_with_another_fact_is_found(fault, is_packed, monkeypatch):
    plant, options, message = FAULTS[fault]
    plant(monkeypatch)
    with pytest.raises(LedgerError, match=rf"ledger gate: .*sample.*{message}"):
        train_step(monkeypatch, is_packed=is_packed, **options)
