"""Episodes that deserve no reward, played in the environment without a model."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
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
EMPTY, RANDOM, REPEATED = KINDS = ("empty turns", "random calls", "repeated answers")


def play_probes(
    rows: Sequence[CheckedRow], config: ScoringOptions
) -> dict[str, list[float | None]]:
    """Return rewards of empty turns, of random calls, and of calls that repeat a tool's reply.

    None is an episode that failed or whose environment gives no reward.

    Args:
        rows: Rows of prompts; the first ones are played.
        config: Options, those on environments.

    Raises:
        ConfigError: The environment cannot be loaded.
    """
    pool = EnvironmentPool(config)
    try:
        episodes = [(kind, row) for kind in KINDS for row in rows[:MAX_EPISODES]]

        def play(number: int, host: Host) -> float | None:
            kind, row = episodes[number]
            name = str(row.columns.get(ENVIRONMENT_COLUMN))
            spec = pool.specs[""] if "" in pool.specs else pool.specs[name]
            return _ProbeEpisode(number, host, spec, config).play(row, kind)

        futures = pool.begin(range(len(episodes)), play)
        results = [futures[number].result() for number in range(len(episodes))]
    finally:
        pool.close()
    rewards: dict[str, list[float | None]] = {kind: [] for kind in KINDS}
    for (kind, _), result in zip(episodes, results, strict=True):
        rewards[kind].append(result if isinstance(result, float) else None)
    return rewards


def report(played: Mapping[str, Sequence[float | None]]) -> list[str]:
    """Return a line for each kind, and a warning for each kind that is rewarded."""
    lines = ["episodes played without a model, mean reward by the environment"]
    warnings = []
    for kind, results in played.items():
        rewards = [each for each in results if each is not None]
        mean = f"{fmean(rewards):.3f}" if rewards else "none came to an end"
        num_failed, num_paid = len(results) - len(rewards), sum(each > 0 for each in rewards)
        failed = f", {num_failed} failed" if num_failed else ""
        lines.append(f"  {kind}: {mean}{failed}")
        # Random calls may be right by chance; empty turns must never be.
        luck = 0 if kind == EMPTY else len(rewards) // 2
        if num_paid > luck:
            warnings.append(f"warning: {num_paid} of {len(rewards)} {kind} are paid")
    return lines + warnings


@dataclass(frozen=True, slots=True)
class _ProbeEpisode:
    number: int
    host: Host
    spec: EnvironmentSpec
    config: EnvironmentOptions

    def play(self, row: CheckedRow, kind: str) -> float | None:
        """Play an episode and return its reward; None if the environment gives none."""
        draw = random.Random(self.number)
        known: Arguments = {
            "seed": 0,
            "sample_seed": self.number,
            "max_turns": self.config.max_turns,
        }
        columns = {name: known[name] for name in self.spec.takes} | dict(row.columns)
        if self.spec.answers_turns:
            columns.setdefault("prompt", [{"role": "user", "content": row.text}])
        self.host.start()
        reply = self._ask("reset", -1, row=columns)
        said = str(reply["text"] if isinstance(reply, dict) else reply or "")
        paid = 0.0
        for turn in range(self.config.max_turns):
            if kind == EMPTY and not self.spec.answers_turns:
                break
            name, arguments = _call(kind, self.spec.functions, said, draw)
            reply = cast(
                "dict[str, object]", self._ask("call", turn, name=name, arguments=arguments)
            )
            said = str(reply["text"])
            paid += float(cast("float", reply.get("reward", 0.0)))
            if "ends_episode" in reply:
                break
        rewards = self._ask("reward", self.config.max_turns) if self.spec.has_reward else None
        self.host.forget(str(self.number))
        return None if rewards is None else paid + float(cast("list[float]", rewards)[0])

    def _ask(self, operation: str, turn: int, **details: object) -> object:
        draws = self.number, turn
        return self.host.ask(operation, str(self.number), draws=draws, **details)


def _call(
    kind: str, tools: Mapping[str, Mapping[str, object]], said: str, draw: random.Random
) -> tuple[str, Arguments]:
    """Return tool and arguments: none, random ones, or texts that repeat the last reply."""
    if kind == EMPTY:
        return next(iter(tools)), {"action": ""}
    name = draw.choice(sorted(tools))
    arguments = {key: _value(schema, draw) for key, schema in _parameters(tools[name]).items()}
    if kind == REPEATED:
        arguments = {k: said if isinstance(v, str) else v for k, v in arguments.items()}
    return name, arguments


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
