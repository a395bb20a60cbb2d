"""Scores of a reward for answers of known quality: right ones and those that must not pass."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from types import FrameType
from typing import TYPE_CHECKING, cast

from lightrft.config import EnvironmentOptions, ScoringOptions
from lightrft.rewards import build_reward
from lightrft.rewards.build import CombinedReward, reward_urls
from lightrft.rewards.types import RewardError
from lightrft.tools.data.probes import FORMS, Probe, Rule, final_answer, gold_text, probes_of
from lightrft.tools.data.row_checks import CheckedRow

if TYPE_CHECKING:
    from lightrft.rollout.environments.pool import EnvironmentSpec, Host

MAX_ROWS, MAX_PROBED_ROWS = 500, 50
MAX_EPISODES = 8
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
        reads_labels: Whether the reward reads labels as answers; if not, nothing can be certified.
    """

    name: str
    num_rows: int
    means: dict[str, float]
    problems: tuple[str, ...]
    doubts: tuple[str, ...] = ()
    reads_labels: bool = True


# Row numbers with responses, and their rewards; None is undecided.
Asked = Sequence[tuple[int, str]]
Ask = Callable[[Asked], list[float | None]]


class _Trial:
    """Answers to rows, and what the reward gives to them.

    Args:
        rows: Rows that the reward can score.
        ask: Function that scores responses.
        are_answers: Whether labels are answers, not tests of one.
    """

    def __init__(self, rows: Sequence[CheckedRow], ask: Ask, *, are_answers: bool) -> None:
        self.rows, self.ask, self.are_answers = rows, ask, are_answers
        # Probes by kind and row number.
        self.kinds: dict[str, dict[int, Probe]] = {}
        self.results: list[tuple[tuple[int, str], float | None]] = []
        self.texts = [{form: gold_text(row.label or "", form) for form in FORMS} for row in rows]
        self._score([(i, text) for i, forms in enumerate(self.texts) for text in forms.values()])
        golds = dict(self.results)
        # What each row's reference answer gets in each form, and the mean of each form.
        self.by_form = [
            {form: golds[i, text] for form, text in forms.items()}
            for i, forms in enumerate(self.texts)
        ]
        self.bests = [max(score or 0.0 for score in forms.values()) for forms in self.by_form]
        self.means = {form: fmean(row[form] or 0.0 for row in self.by_form) for form in FORMS}
        self.best = max(FORMS, key=self.means.__getitem__) if are_answers else "as it is"

    def probe(self) -> list[str]:
        """Score answers that must not pass in the best form; return doubts about drift."""
        rows = self.rows[:MAX_PROBED_ROWS]
        labels = [row.label if self.are_answers else None for row in rows]
        self.finals = [final_answer(label) for label in labels if label is not None]
        golds = [(index, self.texts[index][self.best]) for index in range(len(rows))]
        asked = list(golds)
        for index, row in enumerate(rows):
            for probe in probes_of(row, labels[index], self.best, [*dict.fromkeys(self.finals)]):
                self.kinds.setdefault(probe.kind, {})[index] = probe
                asked.append((index, probe.text))
                asked += [] if probe.baseline is None else [(index, probe.baseline)]
        # Reference answers are scored twice in one call, which reveals drift.
        again = self._score(asked, golds)
        self.scores = {key: score or 0.0 for key, score in self._first.items()}
        self.means |= {
            kind: fmean(self.scores[index, probe.text] for index, probe in probes.items())
            for kind, probes in self.kinds.items()
        }
        drifting = [rows[key[0]].location for key, score in again if score != self._first[key]]
        said = "the same input gets another score within one call"
        return [f"{said} ({drifting[0]})"] if drifting else []

    def _score(self, asked: Asked, again: Asked = ()) -> list[tuple[tuple[int, str], float | None]]:
        """Score answers, each once, then some again; return the results of the latter."""
        once = list(dict.fromkeys(asked))
        results = list(zip([*once, *again], self.ask([*once, *again]), strict=True))
        self.results += results
        self._first = dict(results[: len(once)])
        return results[len(once) :]

    def best_wrong(self) -> float:
        """Return the highest mean of those that must not pass."""
        kinds = self.kinds.items()
        return max(self.means[kind] for kind, probes in kinds if _rule_of(probes) != "bonus")

    def passes(self, index: int, probe: Probe) -> bool:
        """Return whether the reward gives a probe too much."""
        score = self.scores[index, probe.text]
        if probe.rule == "frame":
            return score > self.scores[index, ""]
        if probe.rule == "bonus":
            baseline = probe.baseline
            return score > (self.bests[index] if baseline is None else self.scores[index, baseline])
        return score >= self.bests[index] if self.are_answers else score > 0

    def doubts(self) -> Iterator[str]:
        """Yield the answers that the reward wrongly lets pass, one sentence for each kind."""
        # Share of rows that one answer to all of them, or luck, may get right.
        most = max(Counter(self.finals).values(), default=0) / max(1, len(self.finals))
        much = "as much as the reference answer" if self.are_answers else "a reward"
        than = {
            "wrong": f"answers get {much}",
            "bonus": "answers get more than the reference answer",
            "frame": "get more than an empty answer",
        }
        for kind, probes in self.kinds.items():
            rule = _rule_of(probes)
            if rule != "wrong" and not self.are_answers:
                continue
            counted = probes.keys() if rule == "frame" else self._counted(kind)
            rows = {i: probe for i, probe in probes.items() if i in counted}
            passed = [i for i, probe in rows.items() if self.passes(i, probe)]
            is_blind = self.are_answers and all(probe.is_blind for probe in probes.values())
            if len(passed) > (max(_CHANCE, most) * len(rows) if is_blind else 0):
                where = self.rows[passed[0]].location
                yield f"{len(passed)} of {len(rows)} {kind} {than[rule]} ({where})"

    def _counted(self, kind: str) -> set[int]:
        """Return the rows whose reference answer can be compared with probes of a kind."""
        rows = self.rows[:MAX_PROBED_ROWS]
        labelled = {index for index, row in enumerate(rows) if row.label is not None}
        if kind == "empty" or not self.are_answers:
            return labelled
        # Rows whose empty answer gets as much as the reference count for that kind alone.
        return {index for index in labelled if self.scores[index, ""] < self.bests[index]}

    def unasked(self) -> Iterator[str]:
        """Yield a doubt if an answer without content gets the most, for rewards without labels."""
        tried: dict[int, list[float]] = {}
        for (index, _), score in self.scores.items():
            tried.setdefault(index, []).append(score)
        for kind in ("empty", "injected"):
            scores = {i: self.scores[i, each.text] for i, each in self.kinds[kind].items()}
            paid = [i for i, s in scores.items() if s >= max(tried[i]) and s > min(0.0, *tried[i])]
            if paid:
                where = self.rows[paid[0]].location
                yield f"{len(paid)} of {len(scores)} {kind} answers get the most of all ({where})"
                return

    def wrong_golds(self, name: str) -> Iterator[str]:
        """Yield a line for each reference answer that gets less than 1 in every form."""
        for row, forms in zip(self.rows, self.by_form, strict=True):
            best = max((score for score in forms.values() if score is not None), default=None)
            if best is None or best < 1:
                gets = "cannot be decided by" if best is None else f"gets {best:g} from"
                yield (
                    f"{row.location}: the reference answer {str(row.label)[:60]!r} {gets} {name}: "
                    "expected 1"
                )


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

        trial = _Trial(chosen, ask, are_answers=are_answers)
        doubts = trial.probe()
    means, use = trial.means, reward.label_use
    # A function that reads the label's column may use it as a part of the task, not as its answer.
    is_answer = use == "column" and 0 < means[trial.best] >= trial.best_wrong()
    reads_labels = use == "labels" or is_answer
    doubts += trial.doubts() if reads_labels else trial.unasked()
    undecided = [chosen[index].location for (index, _), score in trial.results if score is None]
    if undecided:
        doubts.append(
            f"{len(undecided)} of {len(trial.results)} answers cannot be decided, and would be "
            f"left out of the loss ({undecided[0]})"
        )
    # Labels of these rewards are right answers; those of unit_tests, for example, are tests.
    if {"boxed_math", "gsm8k"}.issuperset(config.reward_fn) and not reward_urls(config):
        problems += trial.wrong_golds(reward.name)
    return Certificate(
        reward.name,
        len(chosen),
        means,
        tuple(problems),
        tuple(doubts),
        reads_labels=reads_labels,
    )


def _rule_of(probes: Mapping[int, Probe]) -> Rule:
    return next(iter(probes.values())).rule


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


def play_empty(rows: Sequence[CheckedRow], config: ScoringOptions) -> list[float | None]:
    """Return the rewards of episodes of empty turns, which deserve none.

    None is an episode that failed, or whose environment gives no reward.

    Args:
        rows: Rows of prompts; the first ones are played.
        config: Options, those on environments.

    Raises:
        ConfigError: The environment cannot be loaded.
    """
    # Imported here: few checks are of an environment.
    from lightrft.rollout.environments.calls import ENVIRONMENT_COLUMN
    from lightrft.rollout.environments.pool import EnvironmentPool

    pool, played = EnvironmentPool(config), rows[:MAX_EPISODES]

    def play(number: int, host: Host) -> float | None:
        name = str(played[number].columns.get(ENVIRONMENT_COLUMN))
        spec = pool.specs[""] if "" in pool.specs else pool.specs[name]
        return _play_empty(number, played[number], host, spec, config)

    try:
        works = [pool.begin(i, partial(play, i)) for i in range(len(played))]
        results = [work.result() for work in works]
    finally:
        pool.close()
    return [each if isinstance(each, float) else None for each in results]


def _play_empty(
    number: int, row: CheckedRow, host: Host, spec: EnvironmentSpec, config: EnvironmentOptions
) -> float | None:
    def ask(operation: str, turn: int, **details: object) -> object:
        return host.ask(operation, draws=(number, turn), **details)

    known = {"seed": 0, "sample_seed": number, "max_turns": config.max_turns}
    columns = {name: known[name] for name in spec.takes} | dict(row.columns)
    if spec.answers_turns:
        columns.setdefault("prompt", [{"role": "user", "content": row.text}])
    ask("reset", -1, row=columns)
    paid = 0.0
    for turn in range(config.max_turns if spec.answers_turns else 0):
        asked = {"name": next(iter(spec.functions)), "arguments": {"action": ""}}
        reply = cast("dict[str, object]", ask("call", turn, **asked))
        paid += float(cast("float", reply.get("reward", 0.0)))
        if "ends_episode" in reply:
            break
    rewards = ask("reward", config.max_turns) if spec.has_reward else None
    host.ask("close")
    return None if rewards is None else paid + float(cast("list[float]", rewards)[0])
