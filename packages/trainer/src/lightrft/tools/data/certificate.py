"""Scores of a reward for answers of known quality: right ones, and those that must not pass."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from types import FrameType

from lightrft.config import TrainConfig
from lightrft.rewards import build_reward
from lightrft.rewards.build import CombinedReward, reward_urls
from lightrft.rewards.types import RewardError
from lightrft.tools.data.probes import FORMS, Probe, final_answer, gold_text, probes_of
from lightrft.tools.data.row_checks import CheckedRow

MAX_ROWS, MAX_PROBED_ROWS = 500, 50
GRACE_SECONDS = 10.0
# Answers made without the label may be right by chance; as many, or as many as one answer given to
# all rows, are no doubt.
_CHANCE = 0.1


@dataclass(frozen=True, slots=True)
class Certificate:
    """Scores of the reward and the doubts that follow.

    Args:
        name: Of the rewards.
        num_rows: Rows whose reference answers were scored, the first ones.
        means: Mean reward by form of the reference answer, then by kind of the other answers.
        problems: One line for each row whose reference answer cannot be scored, or gets less than
            1 in every form from a reward that knows right from wrong.
        doubts: What the reward lets pass, one sentence each.
        best_wrong: Of what is no reference answer, the kind with the highest mean; the mean of
            reference answers in their best form to compare it with is among `means`.
        num_responses: Of both calls: reference answers, then all others.
        seconds: That they took.
        reads_labels: Labels are answers for the reward; otherwise there is nothing to certify.
    """

    name: str
    num_rows: int
    means: dict[str, float]
    problems: tuple[str, ...]
    doubts: tuple[str, ...] = ()
    best_wrong: str | None = None
    num_responses: int = 0
    seconds: float = 0.0
    reads_labels: bool = True


@dataclass(slots=True)
class _Call:
    """Responses of one call; the same response to a row is asked for once.

    Args:
        results: Of each response, None where it cannot be decided.
    """

    rows: list[CheckedRow] = field(default_factory=list)
    responses: list[str] = field(default_factory=list)
    results: list[float | None] = field(default_factory=list)
    places: dict[tuple[int, str], int] = field(default_factory=dict)

    def add(self, index: int, row: CheckedRow, response: str) -> None:
        if (index, response) not in self.places:
            self.places[index, response] = len(self.responses)
            self.repeat(row, response)

    def repeat(self, row: CheckedRow, response: str) -> int:
        """Adds a response once more; its place."""
        self.rows.append(row)
        self.responses.append(response)
        return len(self.responses) - 1

    def result(self, index: int, response: str) -> float | None:
        return self.results[self.places[index, response]]

    def score(self, index: int, response: str) -> float:
        """A reward; 0 where it is undecided, which does not pass."""
        return self.result(index, response) or 0.0


@dataclass(frozen=True, slots=True)
class _Probed:
    """The rows that were probed, in one form.

    Args:
        rows: The first ones.
        call: With the probes.
        probes: Of each row.
        golds: The best that a reference answer gets, by row; rows without one are not in it.
        chance: Share of rows that one answer to all of them, or luck, may get right.
    """

    rows: Sequence[CheckedRow]
    call: _Call
    probes: Sequence[Sequence[Probe]]
    golds: dict[int, float]
    chance: float


def certify(rows: Sequence[CheckedRow], config: TrainConfig) -> Certificate:
    """Scores reference answers in all forms, then in the best of them what must not pass.

    Args:
        rows: That a run would use, with or without reference answers.
        config: Rewards, their deadlines, and arguments of own functions.

    Raises:
        ConfigError: A reward that cannot be loaded.
        RewardError: One that fails, hangs, or returns another number of results.
    """
    # The label of unit_tests is what tests an answer, and no answer.
    are_answers = config.reward_fn != ("unit_tests",)
    with build_reward(config.reward_fn, config=config) as reward:
        unusable = {row.location: reward.label_problem(row.label) for row in rows}
        problems = [f"{place}: {text}" for place, text in unusable.items() if text is not None]
        chosen = [row for row in rows if unusable[row.location] is None][:MAX_ROWS]
        if not chosen:
            return Certificate(reward.name, 0, {}, tuple(problems))
        started = time.monotonic()
        golds = _gold_answers(chosen)
        _run(reward, golds, config.reward_timeout_seconds)
        means = {f: fmean(_gold(golds, i, row, f) for i, row in enumerate(chosen)) for f in FORMS}
        best = max(FORMS, key=lambda form: means[form]) if are_answers else "as it is"
        probed, again = _probed(chosen, golds, best, are_answers=are_answers)
        _run(reward, probed.call, config.reward_timeout_seconds)
        seconds = time.monotonic() - started
    by_kind = _means_of(probed)
    wrong = {probe.kind for row in probed.probes for probe in row if probe.rule != "bonus"}
    best_wrong = max(wrong, key=lambda kind: by_kind[kind])
    # A function of the label's column may read it as a part of the task, not as its answer.
    reads_labels = reward.label_use == "labels" or (
        reward.label_use == "column" and 0 < means[best] >= by_kind[best_wrong]
    )
    doubts = [*_drifts(probed, again)]
    doubts += _doubts(probed, are_answers=are_answers) if reads_labels else _unasked(probed)
    doubts += _undecided(golds, probed.call)
    # The label of these is a right answer; of unit_tests, say, it is what tests one.
    if {"boxed_math", "gsm8k"}.issuperset(config.reward_fn) and not reward_urls(config):
        problems += _wrong_gold(reward.name, chosen, golds)
    return Certificate(
        reward.name,
        len(chosen),
        {**means, **by_kind},
        tuple(problems),
        tuple(doubts),
        best_wrong,
        len(golds.responses) + len(probed.call.responses),
        seconds,
        reads_labels,
    )


def _gold_answers(chosen: Sequence[CheckedRow]) -> _Call:
    """Return a call with the reference answer of each row in all forms."""
    call = _Call()
    for index, row in enumerate(chosen):
        for form in FORMS:
            call.add(index, row, gold_text(row.label or "", form))
    return call


def _gold(call: _Call, index: int, row: CheckedRow, form: str) -> float:
    return call.score(index, gold_text(row.label or "", form))


def _probed(
    chosen: Sequence[CheckedRow], golds: _Call, form: str, *, are_answers: bool
) -> tuple[_Probed, list[tuple[int, int]]]:
    """The probes of the first rows; where the same response stands twice in the call."""
    rows, call, again = chosen[:MAX_PROBED_ROWS], _Call(), []
    labels = [row.label if are_answers else None for row in rows]
    finals = [final_answer(label) for label in labels if label is not None]
    most = max(Counter(finals).values(), default=0) / max(1, len(finals))
    probes = []
    for index, row in enumerate(rows):
        gold = gold_text(row.label or "", form)
        call.add(index, row, gold)
        again.append((call.places[index, gold], call.repeat(row, gold)))
        probes.append(list(probes_of(row, labels[index], form, list(dict.fromkeys(finals)))))
        for probe in probes[-1]:
            call.add(index, row, probe.text)
            if probe.baseline is not None:
                call.add(index, row, probe.baseline)
    best = {
        index: max(_gold(golds, index, rows[index], each) for each in FORMS) if are_answers else 0.0
        for index, row in enumerate(rows)
        if row.label is not None
    }
    return _Probed(rows, call, probes, best, max(_CHANCE, most)), again


def _drifts(probed: _Probed, again: Sequence[tuple[int, int]]) -> Iterator[str]:
    results = probed.call.results
    places = [first for first, second in again if results[first] != results[second]]
    if places:
        where = probed.call.rows[places[0]].location
        yield f"the same input gets another score within one call ({where})"


def _doubts(probed: _Probed, *, are_answers: bool) -> Iterator[str]:
    """Answers that the reward wrongly lets pass, one sentence for each kind."""
    call, golds = probed.call, probed.golds
    # Where nothing at all is worth as much as the answer, nothing else says more.
    empty = {i for i in golds if are_answers and call.score(i, "") >= golds[i]}
    much = "as much as the reference answer" if are_answers else "a reward"
    than = {
        "wrong": f"answers get {much}",
        "bonus": "answers get more than the reference answer",
        "frame": "get more than an empty answer",
    }
    for kind, probes in _by_kind(probed, rules=than if are_answers else ("wrong",)).items():
        rule = next(iter(probes.values())).rule
        left_out = set() if kind == "empty" else empty
        rows = probes
        if rule != "frame":
            rows = {i: p for i, p in probes.items() if i in golds and i not in left_out}
        found = [i for i, p in rows.items() if _passes(probed, i, p, are_answers=are_answers)]
        is_blind = are_answers and all(probe.is_blind for probe in probes.values())
        if len(found) > (probed.chance * len(rows) if is_blind else 0):
            where = probed.rows[found[0]].location
            yield f"{len(found)} of {len(rows)} {kind} {than[rule]} ({where})"


def _unasked(probed: _Probed) -> Iterator[str]:
    """An answer without content that gets the most of what was tried, where labels do not count."""
    call = probed.call
    tried: dict[int, list[float]] = {}
    for index, text in call.places:
        tried.setdefault(index, []).append(call.score(index, text))
    for kind in ("empty", "injected"):
        scores = {i: call.score(i, each.text) for i, each in _by_kind(probed)[kind].items()}
        paid = [i for i, s in scores.items() if s >= max(tried[i]) and s > min(0.0, *tried[i])]
        if paid:
            where = probed.rows[paid[0]].location
            yield f"{len(paid)} of {len(scores)} {kind} answers get the most of all ({where})"
            return


def _passes(probed: _Probed, index: int, probe: Probe, *, are_answers: bool) -> bool:
    """Whether the reward gives a probe what it should not have."""
    call, golds = probed.call, probed.golds
    score = call.score(index, probe.text)
    if probe.rule == "frame":
        return score > call.score(index, "")
    if probe.rule == "bonus":
        before = golds[index] if probe.baseline is None else call.score(index, probe.baseline)
        return score > before
    return score >= golds[index] if are_answers else score > 0


def _by_kind(probed: _Probed, *, rules: Collection[str] = ()) -> dict[str, dict[int, Probe]]:
    """Kind -> index of a row -> its probe; of these rules alone, if any are named."""
    found: dict[str, dict[int, Probe]] = {}
    for index, probes in enumerate(probed.probes):
        for probe in probes:
            if not rules or probe.rule in rules:
                found.setdefault(probe.kind, {})[index] = probe
    return found


def _means_of(probed: _Probed) -> dict[str, float]:
    return {
        kind: fmean(probed.call.score(index, probe.text) for index, probe in probes.items())
        for kind, probes in _by_kind(probed).items()
    }


def _undecided(*calls: _Call) -> Iterator[str]:
    pairs = [(r, row) for call in calls for r, row in zip(call.results, call.rows, strict=True)]
    undecided = [row for result, row in pairs if result is None]
    if undecided:
        yield (
            f"{len(undecided)} of {len(pairs)} answers cannot be decided, and would be left out "
            f"of the loss ({undecided[0].location})"
        )


def score_answers(
    rows: Sequence[CheckedRow], responses: Sequence[str], config: TrainConfig
) -> list[float | None]:
    """The reward of each response to the prompt of its row; None where it cannot be decided.

    Raises:
        ConfigError: A reward that cannot be loaded.
        RewardError: One that fails, hangs, or returns another number of results.
    """
    with build_reward(config.reward_fn, config=config) as reward:
        return _score(reward, rows, responses, config.reward_timeout_seconds)


def _run(reward: CombinedReward, call: _Call, seconds: float) -> None:
    call.results = _score(reward, call.rows, call.responses, seconds)


def _score(
    reward: CombinedReward, rows: Sequence[CheckedRow], responses: Sequence[str], seconds: float
) -> list[float | None]:
    names = sorted({name for row in rows for name in row.columns})
    print(
        f"scoring {len(responses)} answers by {reward.name}, at most {seconds:g} s ...", flush=True
    )
    with _interrupted_after(seconds + GRACE_SECONDS, reward.name):
        results = reward.score(
            [row.text for row in rows],
            responses,
            [row.label for row in rows],
            {name: [row.columns.get(name) for row in rows] for name in names},
        )
    return [None if result is None else result.reward for result in results]


@contextmanager
def _interrupted_after(seconds: float, name: str) -> Iterator[None]:
    """Ends functions of this process, too, which keep no deadline of their own."""

    def expire(number: int, frame: FrameType | None) -> None:
        raise RewardError(f"reward {name} did not return within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _wrong_gold(name: str, rows: Sequence[CheckedRow], golds: _Call) -> Iterator[str]:
    for index, row in enumerate(rows):
        found = [golds.result(index, gold_text(row.label or "", form)) for form in FORMS]
        best = max((score for score in found if score is not None), default=None)
        if best is None or best < 1:
            gets = "cannot be decided by" if best is None else f"gets {best:g} from"
            yield (
                f"{row.location}: the reference answer {str(row.label)[:60]!r} {gets} {name}: "
                "expected 1"
            )
