"""Faults behind the endpoint, one by one: the gate finds each, and no other."""

import random
from dataclasses import replace

import pytest
from tests.engines.fake_engine import FakeEngine
from tests.experience.test_ledger_gate import OneRank, check
from tests.rollout.agents.agent_stage import families
from tests.rollout.agents.endpoint_desk import Waiting

from lightrft.datasets.chat_ids import ChatIds, Rendered
from lightrft.datasets.types import Prompt
from lightrft.engines.types import EngineConfig, SamplingParams
from lightrft.records.sample_ledger import FUNCTION, SampleLedger
from lightrft.rewards.types import RewardResult
from lightrft.rollout.agents import conversations
from lightrft.rollout.agents.agents import note_episode
from lightrft.rollout.agents.conversations import AgentEpisode, Conversations
from lightrft.rollout.agents.messages import read_chat
from lightrft.rollout.agents.rounds import AnswerRules, RunSampling, answer_round
from lightrft.rollout.environments.environments import control_token_ids
from lightrft.rollout.ledger_records import LedgerError, deliver_evidence, take_evidence
from lightrft.rollout.scoring import score_rollouts, with_branches
from lightrft.rollout.transcript import Transcript

NUM_EPISODES = 3
TOKENIZERS = {name: families.family_tokenizer(name) for name in ("Qwen2.5", "Llama 3", "Mistral")}


class Played:
    """Episodes of a client that appends, rewrites, branches and calls tools at random."""

    def __init__(self, seed, family="Qwen2.5"):
        self.tokenizer, self.rng = TOKENIZERS[family], random.Random(seed)
        end = self.tokenizer.eos_token_id
        self.chat = ChatIds(self.tokenizer)
        self.engine = FakeEngine(EngineConfig("fake", ""), script=self.say)
        self.engine.eos_ids = (end,)
        self.engine.set_weights_version(3)
        self.strategy = OneRank(self.engine)
        params = SamplingParams(max_tokens=60, stop_token_ids=(end,))
        self.rules = AnswerRules(self.chat, "hermes", RunSampling(params), max_tokens=4000)
        self.episodes = []
        with self.engine.ledger.recording():
            for number in range(NUM_EPISODES):
                self.play(number)

    def say(self, request, index):
        ids = self.tokenizer(f"word {request.request_id % 997}", add_special_tokens=False)
        ids = [*ids["input_ids"], self.tokenizer.eos_token_id]
        return ids, [-0.25 - 0.5 * ((request.request_id + i) % 7) for i in range(len(ids))]

    def play(self, number):
        prompt = Prompt(number, "text", (1, 2), "label", {})
        talk = Conversations(self.chat, 100 + number)
        self.episodes.append(AgentEpisode(number, prompt, number, number, {}, talk))
        histories = [[{"role": "user", "content": f"Question {number}."}]]
        for step in range(self.rng.randint(3, 6)):
            history = list(self.rng.choice(histories[-2:]))
            answer = self.ask(number, history)
            said = {"role": "assistant", "content": answer.message.text}
            if self.rng.random() < 0.2:
                said["content"] += " rewritten"
            text = self.rng.choice(["Go on.", " more\n", "x<|im_end|>y", "{}", "é"])
            histories.append([*history, said, {"role": "user", "content": f"{text}{step}"}])
            if self.rng.random() < 0.3:
                histories.append([*history[:1], *histories[-1][-1:]][-1:])

    def ask(self, number, history):
        call = read_chat({"model": "policy", "messages": history})
        waiting = Waiting(self.episodes[number], call)
        answer_round([waiting], self.rules, lambda p, asked: self.engine.generate(asked, p))
        return waiting.turns[0]

    def scored(self):
        """What the source makes of the episodes."""
        ledger = SampleLedger()
        rows = [episode.rollouts() for episode in self.episodes]
        results = [RewardResult(episode.number / 7) for episode in self.episodes]
        for episode, own, result in zip(self.episodes, rows, results, strict=True):
            episode.reward = RewardResult(0.5)
            note_episode(ledger, episode, own)
            ledger.of(episode.sample_id).reward_is(FUNCTION, result, own[0].token_ids)
        first = score_rollouts(
            [own[0] for own in rows],
            results,
            environment_results=[episode.reward for episode in self.episodes],
            ledger=ledger,
        )
        return with_branches(first, {own[0].sample_id: own[1:] for own in rows}, ledger), ledger

    def gate(self, change=lambda scored: scored):
        """Raises a LedgerError unless what is trained is what was sampled."""
        scored, ledger = self.scored()
        scored = sorted(change(scored), key=lambda item: item.rollout.sample_id)
        taken = take_evidence(
            [item.rollout for item in scored],
            self.strategy,
            ledger=ledger,
            special_ids=control_token_ids(self.tokenizer),
        )
        ids = [[item.rollout.sample_id for item in scored]]
        evidence = deliver_evidence(taken, ids, self.strategy)
        check(scored, self.strategy, evidence=evidence)
        return scored


@pytest.mark.parametrize("family", TOKENIZERS)
def test_no_false_alarm_in_sound_episodes(family):
    num_rows = 0
    for seed in range(24):
        num_rows += len(Played(seed, family).gate())
    assert num_rows > 24 * NUM_EPISODES * 1.5  # with branches


def suffix_with(change):
    """Plants a change in what follows turns."""

    def plant(patch):
        own = ChatIds.suffix

        def suffix(self, turn, calls, messages):
            return change(self, own(self, turn, calls, messages))

        patch.setattr(ChatIds, "suffix", suffix)

    return plant


def prompt_with(change):
    def plant(patch):
        own = ChatIds.prompt
        patch.setattr(
            ChatIds, "prompt", lambda self, talk, tools=(): change(self, own(self, talk, tools))
        )

    return plant


def inserted(found, place, token):
    ids = found.token_ids
    shift = [(a + (a >= place), b + (a >= place)) for a, b in found.text_spans]
    return Rendered((*ids[:place], token, *ids[place:]), tuple(shift))


def begin(chat):
    return chat.tokenizer.convert_tokens_to_ids("<|im_start|>")


def forged(patch):
    """Texts are encoded like the template."""
    own = ChatIds.encode_text
    patch.setattr(ChatIds, "encode_text", lambda self, text, **options: own(self, text))


def wrong_parent(patch):
    """A history is taken for another one of the episode."""
    own = Conversations.place

    def place(self, call):
        parent, before = own(self, call)
        others = [turn for turn in self.turns if turn is not parent and turn.parent is None]
        return (others[0], before) if parent is not None and others else (parent, before)

    patch.setattr(Conversations, "place", place)


def any_history(patch):
    """Messages are compared by their number alone."""
    patch.setattr(
        conversations,
        "chain_of",
        lambda start, messages: [str(n).encode() for n in range(len(messages))],
    )


def ignores_texts(patch):
    patch.setattr(
        conversations,
        "chain_of",
        lambda start, messages: [
            repr([m.role for m in messages[: n + 1]]).encode() for n in range(len(messages))
        ],
    )


def joined_with(change):
    def plant(patch):
        own = Transcript.completion
        patch.setattr(Transcript, "completion", lambda row, number: change(own(row, number)))

    return plant


def sampled_with(change):
    """Rows whose values are others than their turns'."""

    def plant(patch):
        own = Transcript.as_sample

        def as_sample(row, *ids, **values):
            found = own(row, *ids, **values)
            return replace(found, **change(found))

        patch.setattr(Transcript, "as_sample", as_sample)

    return plant


# As many versions as a row has tokens, when one is missing.
shorter_versions = sampled_with(lambda f: {"token_versions": f.token_versions[:-1]})


def without_branch(patch):
    own = Conversations.branches
    patch.setattr(Conversations, "branches", lambda self: own(self)[: max(1, len(own(self)) - 1)])


def with_a_turn_twice(patch):
    own = Conversations.branches

    def branches(self):
        rows = own(self)
        return [*rows, rows[-1][-1:]]

    patch.setattr(Conversations, "branches", branches)


def rolled(values):
    return (*values[1:], values[0])


def texts_retokenised(found):
    ids = (*found.output_token_ids[:-2], 7)
    return replace(
        found,
        output_token_ids=ids,
        output_logprobs=found.output_logprobs[:-1],
        sampled=found.sampled[:-1],
    )


def swapped_branches(scored):
    """Two rows of an episode have each other's tokens."""
    by_length = {}
    for place, item in enumerate(scored):
        by_length.setdefault(item.rollout.group_id, []).append(place)
    first, second, *_ = next(own for own in by_length.values() if len(own) > 1)
    rows = list(scored)
    a, b = rows[first].rollout, rows[second].rollout
    rows[first] = replace(rows[first], rollout=replace(b, sample_id=a.sample_id))
    rows[second] = replace(rows[second], rollout=replace(a, sample_id=b.sample_id))
    return rows


def last(scored, **changes):
    """The last row, a branch, with other values."""
    ordered = sorted(scored, key=lambda item: item.rollout.sample_id)
    return [*ordered[:-1], replace(ordered[-1], **changes)]


def last_rollout(scored, **changes):
    ordered = sorted(scored, key=lambda item: item.rollout.sample_id)
    return last(scored, rollout=replace(ordered[-1].rollout, **changes))


PLANTED = {
    "a second beginning in the suffix": suffix_with(lambda c, f: inserted(f, 0, begin(c))),
    "a second header": suffix_with(lambda c, f: inserted(f, len(f.token_ids), begin(c))),
    "the header is lost": suffix_with(
        lambda c, f: Rendered(f.token_ids[: f.text_spans[-1][1]], f.text_spans)
    ),
    "the suffix twice": suffix_with(lambda c, f: Rendered(f.token_ids * 2, f.text_spans)),
    "a text is cut": suffix_with(
        lambda c, f: Rendered(
            (*f.token_ids[: f.text_spans[0][1] - 1], *f.token_ids[f.text_spans[0][1] :]),
            ((f.text_spans[0][0], f.text_spans[0][1] - 1),),
        )
    ),
    "another text": suffix_with(
        lambda c, f: Rendered(
            tuple(
                token + 1 if f.text_spans[0][0] == place else token
                for place, token in enumerate(f.token_ids)
            ),
            f.text_spans,
        )
    ),
    "texts become special": forged,
    "a second beginning in the prompt": prompt_with(lambda c, f: inserted(f, 0, begin(c))),
    "the prompt is cut": prompt_with(lambda c, f: Rendered(f.token_ids[:-1])),
    "the prompt of another": prompt_with(lambda c, f: Rendered(rolled(f.token_ids))),
    "another branch is continued": wrong_parent,
    "histories by their length": any_history,
    "histories by their roles": ignores_texts,
    "the mask is shifted": joined_with(lambda f: replace(f, sampled=rolled(f.sampled))),
    "all is trained": joined_with(lambda f: replace(f, sampled=(True,) * len(f.sampled))),
    "logprobs are shifted": joined_with(
        lambda f: replace(f, output_logprobs=rolled(f.output_logprobs))
    ),
    "a turn is encoded again": joined_with(texts_retokenised),
    "the end of a turn is lost": joined_with(
        lambda f: replace(
            f,
            output_token_ids=f.output_token_ids[:-1],
            output_logprobs=f.output_logprobs[:-1],
            sampled=f.sampled[:-1],
        )
    ),
    "the prompt of a branch is its parent's": joined_with(
        lambda f: replace(f, prompt_token_ids=f.prompt_token_ids[:-1])
    ),
    "the version of another call": sampled_with(
        lambda f: {"token_versions": (2,) * len(f.completion.output_token_ids)}
    ),
    "the request of another call": sampled_with(
        lambda f: {"segments": tuple(replace(s, request_id=s.request_id + 1) for s in f.segments)}
    ),
    "a branch is never made": without_branch,
    "a turn is in two branches": with_a_turn_twice,
    "turns in another order": sampled_with(lambda f: {"segments": f.segments[::-1]}),
}
CHANGED = {
    "branches are mixed up": swapped_branches,
    "a branch has another reward": lambda s: last(s, reward=7.0),
    "a branch is masked": lambda s: last(s, is_masked=True),
    "a branch has other components": lambda s: last(s, components={"agent": 3.0}),
    "a branch of another group": lambda s: last_rollout(s, group_id=0),
    "a branch is lost": lambda s: sorted(s, key=lambda i: i.rollout.sample_id)[:-1],
    "a branch is another episode's": lambda s: last_rollout(
        s, sample_id=max(i.rollout.sample_id for i in s) - 1
    ),
    "a branch twice": lambda s: [
        *s,
        replace(s[-1], rollout=replace(s[-1].rollout, sample_id=2**28)),
    ],
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_fault_in_the_endpoint_is_found(name, monkeypatch):
    PLANTED[name](monkeypatch)
    if name in ("a turn is encoded again", "the end of a turn is lost"):
        shorter_versions(monkeypatch)
    with pytest.raises(LedgerError):
        Played(5).gate()


@pytest.mark.parametrize("name", CHANGED)
def test_a_fault_in_the_rows_of_branches_is_found(name):
    with pytest.raises(LedgerError):
        Played(5).gate(CHANGED[name])


def test_there_are_thirty():
    assert len(PLANTED) + len(CHANGED) >= 30
