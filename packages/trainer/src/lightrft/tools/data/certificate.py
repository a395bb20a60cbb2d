"""Scores of a reward for answers of known quality: right ones and those that must not pass."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from types import FrameType

from lightrft.config import ScoringOptions
from lightrft.rewards import build_reward
from lightrft.rewards.build import CombinedReward, reward_urls
from lightrft.rewards.types import RewardError
from lightrft.tools.data.probes import FORMS, Probe, Rule, final_answer, gold_text, probes_of
from lightrft.tools.data.row_checks import CheckedRow

MAX_ROWS, MAX_PROBED_ROWS = 500, 50
GRACE_SECONDS = 10.0
# Answers made without the label may be right by chance. They raise no doubt up to this share, or up
# to the share that one answer to all rows would get right.
_CHANCE = 0.1


@dataclass(frozen=True, slots=True)
class Certificate:
    """Scores of the reward and the resulting doubts.

    Args:
        name: Name of the rewards.
        num_rows: Number of first rows whose reference answers were scored.
        means: Mean reward by form of the reference answer, then by kind of the other answers.
        problems: Lines for rows whose reference answer cannot be scored, or gets less than 1 in
            every form. The latter is only checked for rewards that know right from wrong.
        doubts: Sentences on faults that the reward lets pass.
        best_wrong: Kind with the highest mean among those that must not pass, to compare with the
            best form of reference answers in `means`.
        num_responses: Number of responses in both calls, one of reference answers and one of all
            others.
        seconds: Time of both calls.
        reads_labels: Whether the reward reads labels as answers; if not, nothing can be certified.
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


# Row numbers with responses, and their rewards.
Asked = Sequence[tuple[int, str]]
Ask = Callable[[Asked], list[float | None]]
Results = Sequence[tuple[tuple[int, str], float | None]]


class _ProbeScores(dict[tuple[int, str], float | None]):
    """Reward of each response to a row, by the row's number; None if it is undecided."""

    def of(self, index: int, response: str) -> float:
        """Return a reward; 0 if it is undecided, which does not pass."""
        return self[index, response] or 0.0


@dataclass(frozen=True, slots=True)
class _Probed:
    """The probed rows, in one form.

    Args:
        rows: First rows of the data.
        scores: Scores of the probes.
        kinds: Probes by kind and row number.
        golds: Best reward of a reference answer, by row; rows without one are missing.
        chance: Share of rows that one answer to all of them, or luck, may get right.
        are_answers: Whether labels are answers, not tests of one.
    """

    rows: Sequence[CheckedRow]
    scores: _ProbeScores
    kinds: Mapping[str, Mapping[int, Probe]]
    golds: Mapping[int, float]
    chance: float
    are_answers: bool

    @property
    def means(self) -> dict[str, float]:
        """Mean reward of each kind."""
        return {
            kind: fmean(self.scores.of(index, probe.text) for index, probe in probes.items())
            for kind, probes in self.kinds.items()
        }

    def passes(self, index: int, probe: Probe) -> bool:
        """Return whether the reward gives a probe too much."""
        score = self.scores.of(index, probe.text)
        if probe.rule == "frame":
            return score > self.scores.of(index, "")
        if probe.rule == "bonus" and probe.baseline is not None:
            return score > self.scores.of(index, probe.baseline)
        if probe.rule == "bonus":
            return score > self.golds[index]
        return score >= self.golds[index] if self.are_answers else score > 0


def certify(rows: Sequence[CheckedRow], config: ScoringOptions) -> Certificate:
    """Score reference answers in all forms, then answers that must not pass in the best form.

    Args:
        rows: Rows that a run would use, with or without reference answers.
        config: Rewards, their deadlines, and arguments of user-defined functions.

    Raises:
        ConfigError: A reward cannot be loaded.
        RewardError: A reward fails, hangs, or returns another number of results.
    """
    # The label of unit_tests is a test of answers, not an answer.
    are_answers = config.reward_fn != ("unit_tests",)
    with build_reward(config.reward_fn, config=config) as reward:
        unusable = {row.location: reward.label_problem(row.label) for row in rows}
        problems = [f"{place}: {text}" for place, text in unusable.items() if text is not None]
        chosen = [row for row in rows if unusable[row.location] is None][:MAX_ROWS]
        if not chosen:
            return Certificate(reward.name, 0, {}, tuple(problems))

        def ask(asked: Asked) -> list[float | None]:
            asked_rows, texts = [chosen[index] for index, _ in asked], [text for _, text in asked]
            return _score(reward, asked_rows, texts, config.reward_timeout_seconds)

        started = time.monotonic()
        texts = [{form: gold_text(row.label or "", form) for form in FORMS} for row in chosen]
        golds, bests, means = _scores_of_golds(texts, ask)
        best = max(FORMS, key=lambda form: means[form]) if are_answers else "as it is"
        probed, again, results = _probe(
            chosen[:MAX_PROBED_ROWS],
            [by_form[best] for by_form in texts],
            bests,
            best,
            ask,
            are_answers,
        )
        seconds = time.monotonic() - started
    by_kind = probed.means
    wrong = [kind for kind, probes in probed.kinds.items() if _rule_of(probes) != "bonus"]
    best_wrong = max(wrong, key=lambda kind: by_kind[kind])
    reads_labels = _reads_labels(reward.label_use, means[best], by_kind[best_wrong])
    every = [*golds.items(), *results]
    doubts = [*again, *(_doubts(probed) if reads_labels else _unasked(probed))]
    doubts += _undecided(chosen, every)
    # Labels of these rewards are right answers; those of unit_tests, for example, are tests.
    if {"boxed_math", "gsm8k"}.issuperset(config.reward_fn) and not reward_urls(config):
        problems += _wrong_gold(reward.name, chosen, texts, golds)
    return Certificate(
        reward.name,
        len(chosen),
        {**means, **by_kind},
        tuple(problems),
        tuple(doubts),
        best_wrong,
        len(every),
        seconds,
        reads_labels,
    )


def _reads_labels(use: str, gold: float, wrong: float) -> bool:
    """Return whether a reward reads labels as answers, judged by the best mean of both kinds."""
    # A function that reads the label's column may use it as a part of the task, not as its answer.
    return use == "labels" or (use == "column" and 0 < gold >= wrong)


def _scores_of_golds(
    texts: Sequence[Mapping[str, str]], ask: Ask
) -> tuple[_ProbeScores, list[float], dict[str, float]]:
    """Return the scores of reference answers, the best of each row, and the mean of each form."""
    asked = list(dict.fromkeys((i, t) for i, by_form in enumerate(texts) for t in by_form.values()))
    golds = _ProbeScores(zip(asked, ask(asked), strict=True))
    bests = [max(golds.of(i, text) for text in by_form.values()) for i, by_form in enumerate(texts)]
    return (
        golds,
        bests,
        {
            form: fmean(golds.of(i, by_form[form]) for i, by_form in enumerate(texts))
            for form in FORMS
        },
    )


def _undecided(rows: Sequence[CheckedRow], results: Results) -> Iterator[str]:
    places = [rows[index].location for (index, _), score in results if score is None]
    if places:
        yield (
            f"{len(places)} of {len(results)} answers cannot be decided, and would be left out "
            f"of the loss ({places[0]})"
        )


def _probe(
    rows: Sequence[CheckedRow],
    golds: Sequence[str],
    bests: Sequence[float],
    form: str,
    ask: Ask,
    are_answers: bool,
) -> tuple[_Probed, list[str], Results]:
    """Return the scores of probes, the doubts about drifting scores, and all results.

    Args:
        rows: First rows of the data.
        golds: Reference answer of each row in the best form.
        bests: Best reward of a reference answer, by row.
        form: Best form of reference answers.
        ask: Function that scores responses to rows.
        are_answers: Whether labels are answers.
    """
    labels = [row.label if are_answers else None for row in rows]
    finals = [final_answer(label) for label in labels if label is not None]
    most = max(Counter(finals).values(), default=0) / max(1, len(finals))
    row_golds = [(index, golds[index]) for index in range(len(rows))]
    asked, kinds = dict.fromkeys(row_golds), dict[str, dict[int, Probe]]()
    for index, row in enumerate(rows):
        for probe in probes_of(row, labels[index], form, list(dict.fromkeys(finals))):
            kinds.setdefault(probe.kind, {})[index] = probe
            texts = (probe.text, *([] if probe.baseline is None else [probe.baseline]))
            asked |= dict.fromkeys((index, text) for text in texts)
    # Reference answers are scored twice in one call, which reveals drift.
    every = [*asked, *row_golds]
    results = list(zip(every, ask(every), strict=True))
    scores = _ProbeScores(results[: len(asked)])
    drifting = [i for (i, text), score in results[len(asked) :] if score != scores[i, text]]
    said = "the same input gets another score within one call"
    again = [f"{said} ({rows[drifting[0]].location})"] if drifting else []
    labelled = {i: bests[i] * are_answers for i, row in enumerate(rows) if row.label is not None}
    probed = _Probed(rows, scores, kinds, labelled, max(_CHANCE, most), are_answers)
    return probed, again, results


def _rule_of(probes: Mapping[int, Probe]) -> Rule:
    return next(iter(probes.values())).rule


def _doubts(probed: _Probed) -> Iterator[str]:
    """Yield the answers that the reward wrongly lets pass, one sentence for each kind."""
    golds, are_answers = probed.golds, probed.are_answers
    # Rows whose empty answer gets as much as the reference count for that kind alone.
    empty = {i for i in golds if are_answers and probed.scores.of(i, "") >= golds[i]}
    much = "as much as the reference answer" if are_answers else "a reward"
    than = {
        "wrong": f"answers get {much}",
        "bonus": "answers get more than the reference answer",
        "frame": "get more than an empty answer",
    }
    for kind, probes in probed.kinds.items():
        rule = _rule_of(probes)
        if rule != "wrong" and not are_answers:
            continue
        counted = golds.keys() - (set() if kind == "empty" else empty)
        rows = {i: p for i, p in probes.items() if rule == "frame" or i in counted}
        passed = [i for i, probe in rows.items() if probed.passes(i, probe)]
        is_blind = are_answers and all(probe.is_blind for probe in probes.values())
        if len(passed) > (probed.chance * len(rows) if is_blind else 0):
            where = probed.rows[passed[0]].location
            yield f"{len(passed)} of {len(rows)} {kind} {than[rule]} ({where})"


def _unasked(probed: _Probed) -> Iterator[str]:
    """Yield a doubt if an answer without content gets the most, for rewards without labels."""
    tried: dict[int, list[float]] = {}
    for index, text in probed.scores:
        tried.setdefault(index, []).append(probed.scores.of(index, text))
    for kind in ("empty", "injected"):
        probes = probed.kinds[kind].items()
        scores = {i: probed.scores.of(i, each.text) for i, each in probes}
        paid = [i for i, s in scores.items() if s >= max(tried[i]) and s > min(0.0, *tried[i])]
        if paid:
            where = probed.rows[paid[0]].location
            yield f"{len(paid)} of {len(scores)} {kind} answers get the most of all ({where})"
            return


def score_answers(
    rows: Sequence[CheckedRow], responses: Sequence[str], config: ScoringOptions
) -> list[float | None]:
    """Return the reward of each response to its row's prompt; None if it is undecided.

    Raises:
        ConfigError: A reward cannot be loaded.
        RewardError: A reward fails, hangs, or returns another number of results.
    """
    with build_reward(config.reward_fn, config=config) as reward:
        return _score(reward, rows, responses, config.reward_timeout_seconds)


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
    """Raise a RewardError after some seconds, for functions of this process without a deadline."""

    def expire(number: int, frame: FrameType | None) -> None:
        raise RewardError(f"reward {name} did not return within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _wrong_gold(
    name: str, rows: Sequence[CheckedRow], texts: Sequence[Mapping[str, str]], golds: _ProbeScores
) -> Iterator[str]:
    for index, (row, by_form) in enumerate(zip(rows, texts, strict=True)):
        scores = [score for text in by_form.values() if (score := golds[index, text]) is not None]
        best = max(scores, default=None)
        if best is None or best < 1:
            gets = "cannot be decided by" if best is None else f"gets {best:g} from"
            yield (
                f"{row.location}: the reference answer {str(row.label)[:60]!r} {gets} {name}: "
                "expected 1"
            )
