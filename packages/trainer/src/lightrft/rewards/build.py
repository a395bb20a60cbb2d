"""Reward functions by name or by file."""

import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, cast

from lightrft.config import ConfigError, ScorerOptions, ScoringOptions, ServiceOptions, TrainConfig
from lightrft.config.options import is_number
from lightrft.config.registry import REWARD_KINDS, REWARD_SERVICES, REWARDS, split_kind
from lightrft.config.toml import read_toml
from lightrft.engines.media.media import Media
from lightrft.rewards.types import (
    NOT_SCORED,
    CallStyle,
    ChecksLabels,
    Columns,
    CountsCosts,
    Labels,
    ReadsEnvironments,
    RewardError,
    RewardFunction,
    RewardRecipes,
    RewardResult,
    TakesColumns,
    Tallies,
    Texts,
    UsesEngine,
)

if TYPE_CHECKING:
    from lightrft.engines.base import RolloutEngine

# Makes a reward from the options and its spelling: its name, `KIND:WHAT` or an address.
RewardFactory = Callable[[ScoringOptions, str], RewardFunction]


def call_style(function: RewardFunction) -> tuple[int, bool]:
    """Return the parallel calls of a reward, and whether it wants the whole batch."""
    if isinstance(function, CallStyle):
        return function.parallel_calls, function.whole_batch
    return 0, False


def reward_urls(config: ServiceOptions) -> tuple[str, ...]:
    """Return the addresses of reward services."""
    urls = config.remote_rm_url
    return () if urls is None else (urls,) if isinstance(urls, str) else tuple(urls)


class CombinedReward:
    """The weighted sum of reward functions; a context manager that ends their processes.

    Components of all functions are reported unweighted under their names. Where two functions use
    one name, the later one's becomes `function/name`.

    Args:
        functions: Reward functions; may be none where reward models score the responses.
        weights: One weight per function.
        recipes: Weights by row instead; a function scores the rows whose recipe names it.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        weights: Sequence[float],
        *,
        recipes: RewardRecipes | None = None,
    ) -> None:
        self.functions = tuple(functions)
        self._weights = tuple(weights)
        self._recipes = recipes
        self.name = "+".join(function.name for function in functions)
        styles = [call_style(function) for function in functions]
        # A function with calls computes in other processes, so that any thread may call it.
        self._calls = [parallel_calls for parallel_calls, _ in styles]
        self.parallel_calls = max(self._calls, default=0) if all(self._calls) else 0
        self.whole_batch = any(whole_batch for _, whole_batch in styles)
        self.reads_environments = any(
            isinstance(function, ReadsEnvironments) and function.reads_environments
            for function in functions
        )
        # Threads call the sum; each function gets no more of them than it takes.
        self._turns = [threading.Semaphore(calls or 1) for calls in self._calls]

    @property
    def needs_labels(self) -> bool:
        """Return whether one of the functions needs labels."""
        return any(function.needs_labels for function in self.functions)

    def score(
        self, prompts: Texts, responses: Texts, labels: Labels, columns: Columns
    ) -> list[RewardResult | None]:
        """Score by all functions and sum; a response undecided by one function is undecided."""
        weights = self._row_weights(len(responses), columns)

        def score(index: int) -> dict[int, RewardResult | None]:
            rows = [i for i, row in enumerate(weights) if index in row]
            with self._turns[index]:
                results = self.functions[index].score(
                    [prompts[i] for i in rows],
                    [responses[i] for i in rows],
                    [labels[i] for i in rows],
                    # Copies: changes of a row by a function reach no other response or function.
                    {name: [_apart(values[i]) for i in rows] for name, values in columns.items()},
                )
            if len(results) != len(rows):
                raise RewardError(
                    f"reward {self.functions[index].name} returned {len(results)} results for "
                    f"{len(rows)} responses: expected one for each"
                )
            return dict(zip(rows, results, strict=True))

        count = len(self.functions)
        # In this thread, where signals work: a single function, and those that run in this process.
        others = [index for index in range(count) if count > 1 and self._calls[index]]
        here = [index for index in range(count) if index not in others]
        # Functions wait for processes and services, so threads are enough to overlap them.
        with ThreadPoolExecutor(len(others) or 1, thread_name_prefix="reward") as threads:
            calls = [threads.submit(score, index) for index in others]
            function_results = {index: score(index) for index in here}
            function_results |= {
                index: call.result() for index, call in zip(others, calls, strict=True)
            }
        by_function = [function_results[index] for index in range(count)]
        return [
            self._combine(row, {index: by_function[index][i] for index in row})
            for i, row in enumerate(weights)
        ]

    def _row_weights(self, num_rows: int, columns: Columns) -> list[Mapping[int, float]]:
        """Return, for each row, the weight by index of function."""
        if self._recipes is None:
            return [dict(enumerate(self._weights))] * num_rows
        values = columns.get(self._recipes.column, [None] * num_rows)
        recipes = [self._recipes.weights_of(value) for value in values]
        names = [function.name for function in self.functions]
        return [{i: row[n] for i, n in enumerate(names) if n in row} for row in recipes]

    @property
    def label_use(self) -> Literal["labels", "column", ""]:
        """The largest label use of any function; all but users' functions read labels."""
        uses = [f.label_use if isinstance(f, TakesColumns) else "labels" for f in self.functions]
        return "labels" if "labels" in uses else "column" if "column" in uses else ""

    def label_problem(self, label: str | None) -> str | None:
        """Return why no response to a row with this label can be right; None if one can."""
        for function in self.functions:
            if isinstance(function, ChecksLabels):
                problem = function.label_problem(label)
                if problem is not None:
                    return f"reward {function.name!r}: {problem}"
        return None

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise a RewardError if a user's function needs an argument that is no column."""
        for function in self.functions:
            if isinstance(function, TakesColumns):
                function.check_columns(columns)

    def try_out(self, prompts: Texts, labels: Labels, columns: Columns) -> None:
        """Call users' functions once; raise a RewardError if one fails or returns no numbers."""
        for function in self.functions:
            if isinstance(function, TakesColumns):
                function.try_out(prompts, labels, columns)

    def use_engine(self, engine: "RolloutEngine") -> None:
        """Pass the engine to the functions that use it."""
        for function in self.functions:
            if isinstance(function, UsesEngine):
                function.use_engine(engine)

    def take_tallies(self) -> Tallies:
        """Return the tallies of all functions."""
        counting = [each for each in self.functions if isinstance(each, CountsCosts)]
        return {name: tally for each in counting for name, tally in each.take_tallies().items()}

    def close(self) -> None:
        """End the worker processes; may be called twice."""
        for function in self.functions:
            function.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _combine(
        self, weights: Mapping[int, float], results: Mapping[int, RewardResult | None]
    ) -> RewardResult | None:
        if results and all(result is NOT_SCORED for result in results.values()):
            raise RewardError(
                f"reward {self.name}: every function returned None for a response: expected a "
                "number of one of them"
            )
        components: dict[str, float] = {}
        total = 0.0
        for index, result in sorted(results.items()):
            if result is None:
                return None
            for name, value in result.components.items():
                key = f"{self.functions[index].name}/{name}" if name in components else name
                components[key] = value
            total += weights[index] * result.reward
        return RewardResult(total, components)


def build_reward(
    names: Sequence[str],
    *,
    weights: Sequence[float] | None = None,
    recipes: RewardRecipes | None = None,
    has_models: bool = False,
    config: ScoringOptions | None = None,
) -> CombinedReward:
    """Load and check reward functions, before any model exists.

    Args:
        names: Names in `REWARDS` or `FILE.py:FUNCTION`; their rewards are summed.
        weights: One factor per name and then per reward service; None means 1 each.
        recipes: Weights by row instead of `weights`, or None.
        has_models: Whether reward models score the responses too; then `names` may be empty.
        config: Options of rewards, reward services among them; None takes the defaults.

    Returns:
        The sum; close it, or use it as a context manager.

    Raises:
        ConfigError: No names, an unknown name, file or function, one twice, or wrong weights.
        RewardError: A user's file cannot be imported or its function cannot be called.
    """
    config = config or TrainConfig()
    urls = reward_urls(config)
    if not names and not urls and not has_models:
        raise ConfigError(f"no reward: set --reward_fn to {', '.join(REWARDS)} or FILE.py:FUNCTION")
    count = len(names) + len(urls)
    factors = [1.0] * count if weights is None else list(weights)
    if len(factors) != count or not all(math.isfinite(factor) for factor in factors):
        raise ConfigError(f"reward weights: expected {count} finite numbers, got {factors}")
    if len({*names, *urls}) < count:
        raise ConfigError(f"reward functions must differ: got {', '.join((*names, *urls))}")
    with ExitStack() as opened:
        functions: list[RewardFunction] = []
        for spelling in (*names, *urls):
            is_url = spelling not in names
            build = cast("RewardFactory", REWARD_SERVICES.load("http")) if is_url else _build_one
            functions.append(build(config, spelling))
            opened.callback(functions[-1].close)
        _check_arguments(functions, config)
        opened.pop_all()
    return CombinedReward(functions, factors, recipes=recipes)


def load_recipes(path: str | Path, *, column: str, names: Sequence[str]) -> RewardRecipes:
    """Read a TOML file with a table for every value of the column.

        [math]
        gsm8k = 1.0
        [chat]
        model = 0.5

    Args:
        path: Path of the file.
        column: Column of the data rows.
        names: Names of the run's rewards.

    Raises:
        ConfigError: The file cannot be read, two rewards have one name, or a table names an
            unknown reward or no number.
    """
    if len(set(names)) < len(names):
        raise ConfigError(f"reward_recipe needs rewards of different names: got {', '.join(names)}")
    recipes: dict[str, dict[str, float]] = {}
    for value, table in read_tables(path, "reward_recipe").items():
        recipes[value] = {}
        for name, weight in table.items():
            if name not in names or not is_number(weight) or not math.isfinite(weight):
                raise ConfigError(
                    f"reward_recipe: {path}: got {name} = {weight!r} in [{value}], expected a "
                    f"number for one of {', '.join(sorted(names))}"
                )
            recipes[value][name] = float(weight)
    return RewardRecipes(column, recipes)


def read_tables(path: str | Path, option: str) -> dict[str, dict[str, object]]:
    """Return the tables of a TOML file.

    Args:
        path: Path of the file.
        option: Option that names the file, for messages.

    Raises:
        ConfigError: The file cannot be read, has no tables, or something beside them.
    """
    try:
        tables = read_toml(Path(path))
    except ValueError as err:
        raise ConfigError(f"{option}: cannot read {err}") from err
    for name, table in tables.items():
        if not isinstance(table, dict) or not table:
            raise ConfigError(f"{option}: {path}: expected a table [{name}] that is not empty")
    if not tables:
        raise ConfigError(f"{option}: {path} has no tables")
    return cast("dict[str, dict[str, object]]", tables)


def _apart(value: object) -> object:
    """Return a copy of a value; media cannot be changed and are not copied."""
    return value if isinstance(value, Media) else deepcopy(value)


def _check_arguments(functions: Sequence[RewardFunction], config: ScorerOptions) -> None:
    """Raise a ConfigError for an argument that no function has."""
    user_functions = [function for function in functions if isinstance(function, TakesColumns)]
    used = {option for function in user_functions for option in function.options}
    unknown = sorted(set(config.reward_args or {}) - used)
    if unknown:
        raise ConfigError(
            f"reward_args: no reward function has a keyword-only argument {unknown[0]!r}"
        )


def numbered(name: str, index: int, count: int) -> str:
    """Return the name of one of several rewards of a kind."""
    return name if count == 1 else f"{name}_{index}"


def _build_one(config: ScoringOptions, name: str) -> RewardFunction:
    from lightrft.rewards.user import PlainReward, UserReward

    kind, _ = split_kind(name, REWARD_KINDS)
    path, separator, function = name.rpartition(":")
    if kind is not None:
        return cast("RewardFactory", REWARD_KINDS.load(kind))(config, name)
    if separator and path.endswith(".py") and function.isidentifier():
        return UserReward(path, function, config)
    if name.endswith(".py"):
        raise ConfigError(f"reward function {name}: expected FILE.py:FUNCTION, say {name}:reward")
    loaded = REWARDS.load(name)
    if REWARDS.is_packaged(name):
        return cast("RewardFactory", loaded)(config, name)
    if callable(getattr(loaded, "score", None)):
        return cast("RewardFunction", loaded)
    return PlainReward(name, cast("Callable[..., object]", loaded), config)
