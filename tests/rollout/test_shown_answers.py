"""The ledger gate finds episodes that were shown, or paid, anything but their own."""

from dataclasses import replace

import pytest
from tests.rollout.stages import GatePassed, Stage, UpToForward, call

from lightrft.experience import delivery
from lightrft.experience.delivery import Delivery
from lightrft.experience.maker import (
    AdvantageSettings,
    ForwardModels,
    make_experience,
)
from lightrft.rollout.environments.episode_batch import EpisodeBatch
from lightrft.rollout.environments.turns import Observations
from lightrft.rollout.ledger_records import LedgerError


def train_step(folder, script, **options):
    """A step from its prompts to the end of the gate."""
    stage = Stage(folder, script, **options)
    samples = stage.collect()
    with pytest.raises(GatePassed):
        make_experience(
            samples,
            ForwardModels(actor=None),
            delivery=Delivery(stage.strategy.context),
            engine=None,
            settings=AdvantageSettings(stage.config, None),
            step=0,
            timer=UpToForward(),
        )


def counting(request_id):
    """The n-th call is answered by n; the first sample makes one more call in each turn."""
    calls = [call("count_up")] * (2 + request_id % 2)
    return ["\n".join(calls), calls[0], "done"]


def guessing(request_id):
    return [call("guess", number=6 + request_id % 2), "done"]


def rendered(patch, choose):
    """Answers that are rendered are those that `choose` takes, of these and of those before."""
    right, before = Observations.after, []

    def after(self, turn, context_length, answers):
        before.append(answers)
        return right(self, turn, context_length, choose(answers, before))

    patch.setattr(Observations, "after", after)


def neighbours_answers(patch):
    rendered(patch, lambda answers, before: next((b for b in before if b != answers), answers))


def other_calls_answers(patch):
    rendered(patch, lambda answers, before: answers[::-1])


def first_answers_again(patch):
    rendered(patch, lambda answers, before: [answers[0]] * len(answers))


def answers_before_they_are_rendered(patch):
    """As if two episodes that joined late were taken for each other."""
    right = EpisodeBatch.observe

    def observe(self, episode):
        other = self.episodes[1 - episode.number]
        if len(other.answers) == len(episode.answers) and other.answers[-1]:
            episode.answers[-1] = other.answers[-1]
        right(self, episode)

    patch.setattr(EpisodeBatch, "observe", observe)


def answers_of_the_turn_before(patch):
    right = EpisodeBatch.observe

    def observe(self, episode):
        episode.answers[-1] = [episode.answers[0][0]] * len(episode.answers[-1])
        right(self, episode)

    patch.setattr(EpisodeBatch, "observe", observe)


def rewards_of_the_neighbour(patch):
    right = EpisodeBatch.finish

    def turned(self):
        right(self)
        first, second = self.episodes
        first.reward, second.reward = second.reward, first.reward

    patch.setattr(EpisodeBatch, "finish", turned)


def failures_forgotten(patch):
    right = delivery.deliver_rows

    def deliver(*arguments):
        rows = right(*arguments)
        assert rows.is_masked.any()
        return replace(rows, is_masked=rows.is_masked & False)

    patch.setattr(delivery, "deliver_rows", deliver)


SHOWN = "what the model was shown is not what was answered"
COUNTER = {"environment": "Counter"}


@pytest.mark.cover(3)
@pytest.mark.parametrize(
    "fault, script, options, message",
    [
        (neighbours_answers, guessing, {}, SHOWN),
        (answers_before_they_are_rendered, guessing, {}, SHOWN),
        (other_calls_answers, counting, COUNTER, SHOWN),
        (first_answers_again, counting, COUNTER, SHOWN),
        (answers_of_the_turn_before, counting, COUNTER, SHOWN),
        (rewards_of_the_neighbour, guessing, {}, "(rewards|accuracies) differ"),
        (
            failures_forgotten,
            lambda request_id: [call("act", what="exit" if request_id else "none"), "done"],
            {"environment": "Naughty", "reward_failure": "mask"},
            "is_masked differ: True was written down",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_episode_with_anothers_facts_is_found(
    fault, script, options, message, tmp_path, monkeypatch
):
    fault(monkeypatch)
    with pytest.raises(LedgerError, match=rf"ledger gate: sample .*{message}"):
        train_step(tmp_path, script, **options)
