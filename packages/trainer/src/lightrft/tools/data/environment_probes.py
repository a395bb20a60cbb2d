"""Episodes that deserve no reward, played in the environment itself, without a model."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import cast

from lightrft.config import EnvironmentOptions, ScoringOptions
from lightrft.rollout.environments.calls import ENVIRONMENT_COLUMN
from lightrft.rollout.environments.pool import EnvironmentPool, EnvironmentSpec, Host
from lightrft.tools.data.row_checks import CheckedRow

MAX_EPISODES = 8
_WORDS = ("yes", "no", "0", "1", "help", "north", "the answer", "a b c", "")
Arguments = dict[str, object]
# The arguments of a call, by the schemas of the tools, what was said last, and draws.
Policy = Callable[[Mapping[str, Mapping[str, object]], str, random.Random], tuple[str, Arguments]]


def play_probes(
    rows: Sequence[CheckedRow], config: ScoringOptions
) -> dict[str, list[float | None]]:
    """Return rewards of empty turns, of random calls, and of calls that repeat what a tool said.

    None is an episode that failed, or whose environment gives no reward.

    Args:
        rows: Of the prompts; the first ones are played.
        config: Its options on environments.

    Raises:
        ConfigError: The environment cannot be loaded.
    """
    pool = EnvironmentPool(config)
    try:
        episodes = [(kind, row) for kind in POLICIES for row in rows[:MAX_EPISODES]]

        def play(number: int, host: Host) -> float | None:
            kind, row = episodes[number]
            name = str(row.columns.get(ENVIRONMENT_COLUMN))
            spec = pool.specs[""] if "" in pool.specs else pool.specs[name]
            return _ProbeEpisode(number, host, spec, config).play(row, POLICIES[kind])

        futures = pool.begin(range(len(episodes)), play)
        results = [futures[number].result() for number in range(len(episodes))]
    finally:
        pool.close()
    found: dict[str, list[float | None]] = {kind: [] for kind in POLICIES}
    for (kind, _), result in zip(episodes, results, strict=True):
        found[kind].append(result if isinstance(result, float) else None)
    return found


def report(played: Mapping[str, Sequence[float | None]]) -> list[str]:
    """A line for each kind, and a warning for each that is paid."""
    lines = ["episodes played without a model, mean reward by the environment"]
    warnings = []
    for kind, results in played.items():
        rewards = [each for each in results if each is not None]
        mean = f"{fmean(rewards):.3f}" if rewards else "none came to an end"
        num_failed, num_paid = len(results) - len(rewards), sum(each > 0 for each in rewards)
        failed = f", {num_failed} failed" if num_failed else ""
        lines.append(f"  {kind}: {mean}{failed}")
        # Luck may find an answer now and then; doing nothing finds none.
        luck = 0 if kind == "empty turns" else len(rewards) // 2
        if num_paid > luck:
            warnings.append(f"warning: {num_paid} of {len(rewards)} {kind} are paid")
    return lines + warnings


@dataclass(frozen=True, slots=True)
class _ProbeEpisode:
    number: int
    host: Host
    spec: EnvironmentSpec
    config: EnvironmentOptions

    def play(self, row: CheckedRow, policy: Policy | None) -> float | None:
        """The reward; None where the environment gives none."""
        draw, seconds = random.Random(self.number), self.config.tool_timeout_seconds
        known: Arguments = {
            "seed": 0,
            "sample_seed": self.number,
            "max_turns": self.config.max_turns,
        }
        given = {name: known[name] for name in self.spec.takes} | dict(row.columns)
        if self.spec.answers_turns:
            given.setdefault("prompt", [{"role": "user", "content": row.text}])
        self.host.start()
        told = self._ask("reset", -1, row=given)
        said = str(told["text"] if isinstance(told, dict) else told or "")
        paid = 0.0
        for turn in range(self.config.max_turns):
            if policy is None and not self.spec.answers_turns:
                break
            choose = policy or _say_nothing
            name, arguments = choose(self.spec.functions, said, draw)
            told = cast(
                "dict[str, object]", self._ask("call", turn, name=name, arguments=arguments)
            )
            said = str(told["text"])
            paid += float(cast("float", told.get("reward", 0.0)))
            if "ends_episode" in told:
                break
        found = self._ask("reward", self.config.max_turns) if self.spec.has_reward else None
        self.host.forget(str(self.number), seconds=seconds)
        return None if found is None else paid + float(cast("list[float]", found)[0])

    def _ask(self, operation: str, turn: int, **details: object) -> object:
        seconds, draws = self.config.tool_timeout_seconds, (self.number, turn)
        return self.host.ask(operation, str(self.number), seconds=seconds, draws=draws, **details)


def _say_nothing(
    tools: Mapping[str, Mapping[str, object]], said: str, draw: random.Random
) -> tuple[str, Arguments]:
    return next(iter(tools)), {"action": ""}


def _call_at_random(
    tools: Mapping[str, Mapping[str, object]], said: str, draw: random.Random
) -> tuple[str, Arguments]:
    name = draw.choice(sorted(tools))
    return name, {key: _value(schema, draw) for key, schema in _parameters(tools[name]).items()}


def _repeat(
    tools: Mapping[str, Mapping[str, object]], said: str, draw: random.Random
) -> tuple[str, Arguments]:
    """A call whose texts are what was said last, whose other values are drawn."""
    name, arguments = _call_at_random(tools, said, draw)
    return name, {k: said if isinstance(v, str) else v for k, v in arguments.items()}


POLICIES: Mapping[str, Policy | None] = {
    "empty turns": None,
    "random calls": _call_at_random,
    "repeated answers": _repeat,
}


def _parameters(function: Mapping[str, object]) -> Mapping[str, Mapping[str, object]]:
    parameters = cast("Mapping[str, object]", function.get("parameters") or {})
    return cast("Mapping[str, Mapping[str, object]]", parameters.get("properties") or {})


def _value(schema: Mapping[str, object], draw: random.Random) -> object:
    options = schema.get("enum")
    if isinstance(options, list) and options:
        return draw.choice(options)
    wanted = schema.get("type")
    kind = wanted[0] if isinstance(wanted, list) and wanted else wanted
    match kind:
        case "integer":
            return draw.randrange(-10, 100)
        case "number":
            return draw.uniform(-10, 100)
        case "boolean":
            return draw.random() < 0.5
        case "array":
            return []
        case "object":
            return {}
    return draw.choice(_WORDS)
