"""A user's reward functions: of this process, or of a file, in a process that can be killed."""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from lightrft.config import ConfigError, ScoringOptions
from lightrft.config.options import comma_hint
from lightrft.rewards.environment_snapshot import with_snapshots
from lightrft.rewards.other_signatures import WITHOUT_COUNTERPART, adapted
from lightrft.rewards.process import WorkerFailedError, WorkerPool, WorkerTask, WorkerTimeoutError
from lightrft.rewards.types import (
    CONVERSATIONS,
    ENVIRONMENTS,
    MEDIA_COLUMNS,
    NOT_SCORED,
    OFFERED_COLUMNS,
    Columns,
    Labels,
    RewardError,
    RewardResult,
    Texts,
)
from lightrft.rewards.user_task import (
    AwaitLoop,
    CheckedResult,
    Description,
    MissingFunctionError,
    Parameter,
    can_wait,
    checked_results,
    describe_function,
    with_bytes,
    with_pixels,
)

ARGUMENTS = ("prompts", "labels", "responses", "completions")


@dataclass(frozen=True, slots=True)
class Signature:
    """Arguments that a user's function takes.

    Args:
        parameters: Parameters of the function.
        whole_batch: Whether it wants all responses of a rank in one call.
    """

    parameters: Sequence[Parameter]
    whole_batch: bool

    def of_kind(self, *kinds: str) -> list[Parameter]:
        """Return the parameters of the kinds of `inspect.Parameter` with these names."""
        return [parameter for parameter in self.parameters if parameter["kind"] in kinds]

    @property
    def by_keyword(self) -> dict[str, bool]:
        """Names that can be passed by keyword, and whether each is required."""
        parameters = self.of_kind("POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY")
        return {parameter["name"]: parameter["is_required"] for parameter in parameters}

    @property
    def takes_all(self) -> bool:
        """Return whether it has `**keywords`."""
        return bool(self.of_kind("VAR_KEYWORD"))


class FunctionReward:
    """A function `f(prompts=, responses=, labels=, **columns)`, wherever it runs.

    If it has a parameter `completions` and the row's prompt is messages, `prompts` and
    `completions` are messages, as in TRL.

    It returns one number or one dict of numbers per response. In a dict, `reward` is the reward if
    present, else the sum; the other entries are components. The function gets those of `prompts`,
    `responses` (or `completions`), `labels` and the data's columns that it has a parameter for.
    Parameters of these names get more: `images`, `videos` and `audios` get lists of Pillow images,
    of frames with their facts and of samples with their rate. `conversations` gets the messages
    of prompt and response. In a run with an environment, `environments` gets what each episode's
    environment kept.

    Args:
        spelling: Name of the function, after its place and a colon if it has one.
        signature: Signature of the function.
        config: Options; `reward_args` are values of keyword-only arguments, and other names are
            ignored.
    """

    needs_labels = False
    parallel_calls = 0

    def __init__(self, spelling: str, signature: Signature, config: ScoringOptions) -> None:
        self._spelling = spelling
        self.name = spelling.rpartition(":")[2]
        self._signature = signature
        self.whole_batch = signature.whole_batch
        self._input_key, self._label_key = config.input_key, config.label_key
        keyword_only = {parameter["name"] for parameter in signature.of_kind("KEYWORD_ONLY")}
        self.reads_environments = (
            ENVIRONMENTS in self._signature.by_keyword and config.environment is not None
        )
        arguments = config.reward_args or {}
        self.options = {key: value for key, value in arguments.items() if key in keyword_only}

    def score(
        self, prompts: Texts, responses: Texts, labels: Labels, columns: Columns
    ) -> list[RewardResult]:
        """Call the function and return its results with components."""
        if not responses:
            return []
        self.check_columns(columns)
        if self.reads_environments and ENVIRONMENTS not in columns:
            raise RewardError(
                f"reward function {self._spelling} reads environments, and none was played for "
                "these responses"
            )
        offered = self._offered(prompts, responses, labels, columns)
        asked = self._signature.by_keyword
        # Pixels are large: functions that take everything do not get them.
        apart = ("completions", *OFFERED_COLUMNS, ENVIRONMENTS)
        left_out = apart if self._signature.takes_all else offered
        chosen = {
            name: list(values)
            for name, values in offered.items()
            if name in asked or name not in left_out
        }
        try:
            checked = self._call({**chosen, **deepcopy(self.options)}, len(responses))
        except RewardError as error:
            if all(isinstance(each, str) for each in chosen.get("completions", ())):
                raise
            hint = "completions are messages here, since prompts are; responses are texts"
            raise RewardError(f"{error}\n{hint}") from error
        results = list[RewardResult]()
        for reward, components in checked:
            if reward is None and not components:
                results.append(NOT_SCORED)
                continue
            total = sum(components.values()) if reward is None else reward
            results.append(RewardResult(total, {self.name: total, **components}))
        return results

    def _offered(
        self, prompts: Texts, responses: Texts, labels: Labels, columns: Columns
    ) -> dict[str, Sequence[object]]:
        """Return all that the function may ask for, by name."""
        answers = [[{"role": "assistant", "content": response}] for response in responses]
        asked = [[{"role": "user", "content": prompt}] for prompt in prompts]
        nothing: list[object] = [()] * len(responses)
        offered: dict[str, Sequence[object]] = {
            **dict.fromkeys(MEDIA_COLUMNS, nothing),
            CONVERSATIONS: [[*each, *said] for each, said in zip(asked, answers, strict=True)],
            **columns,
            **dict(zip(ARGUMENTS, (prompts, labels, responses, responses), strict=True)),
        }
        if "completions" not in self._signature.by_keyword:
            return offered
        # TRL's signature: if a row's prompt is messages, prompt and response are messages. Under
        # the name of whole conversations there is no prompt.
        inputs = columns.get(self._input_key, ()) if self._input_key != CONVERSATIONS else ()
        chats = {i: cast("list[object]", c) for i, c in enumerate(inputs) if isinstance(c, list)}
        whole = cast("Sequence[list[object]]", columns.get(CONVERSATIONS, ()))
        said = {i: whole[i][len(chat) :] if whole else answers[i] for i, chat in chats.items()}
        offered["prompts"] = [chats.get(i, prompt) for i, prompt in enumerate(prompts)]
        offered["completions"] = [said.get(i, text) for i, text in enumerate(responses)]
        return offered

    @property
    def label_use(self) -> Literal["labels", "column", ""]:
        """Use of labels, as in `TakesColumns`."""
        asked = self._signature.by_keyword
        if "labels" in asked:
            return "labels"
        return "column" if self._label_key in asked or self._signature.takes_all else ""

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise a RewardError if a required parameter is no column of the data."""
        required = {name for name, is_required in self._signature.by_keyword.items() if is_required}
        known = {*ARGUMENTS, *OFFERED_COLUMNS, *columns, *self.options}
        known |= {ENVIRONMENTS} if self.reads_environments else set()
        missing = sorted(required - known)
        if missing:
            names = ", ".join(sorted(columns))
            listing = f"its columns are {names}" if names else "it has no other columns"
            remedy = WITHOUT_COUNTERPART.get(missing[0], "rename it or give it a default")
            raise RewardError(
                f"reward function {self._spelling} needs the argument {missing[0]!r}, which is no "
                f"column of the data: {listing}, beside prompts, responses and labels; {remedy}"
            )

    def try_out(self, prompts: Texts, labels: Labels, columns: Columns) -> None:
        """Score the labels as if they were responses, so that wrong results show early.

        Raises:
            RewardError: The function fails, or returns something else than numbers.
        """
        if not {*MEDIA_COLUMNS, ENVIRONMENTS} & set(self._signature.by_keyword):
            self.score(prompts, [label or "" for label in labels], labels, columns)

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def _call(self, arguments: dict[str, object], num_responses: int) -> list[CheckedResult]:
        raise NotImplementedError


class PlainReward(FunctionReward):
    """A function of this process; nothing stops it if it hangs.

    It comes from a module, or was added by `lightrft.config.register`.

    Args:
        name: Spelling in the options.
        function: Function as described by `FunctionReward`.
        config: Options as described by `FunctionReward`.
    """

    def __init__(self, name: str, function: Callable[..., object], config: ScoringOptions) -> None:
        function = adapted(function)
        super().__init__(name, Signature(**describe_function(function)), config)
        self._function = function
        self._loop = AwaitLoop()
        # A separate thread: the caller's may already run a loop, as in a notebook.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward")

    def close(self) -> None:
        """End the thread of async functions; may be called twice."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _call(self, arguments: dict[str, object], num_responses: int) -> list[CheckedResult]:
        try:
            inputs = with_snapshots(with_pixels(arguments), opens_pickles=False)
            returned = self._function(**inputs)
            if can_wait(returned):
                returned = self._thread.submit(self._loop.settle, returned).result()
            return checked_results(returned, num_responses)
        except Exception as error:
            raise RewardError(f"reward function {self.name} failed: {error}") from error


class UserReward(FunctionReward):
    """A function of a Python file, run in a process that can be killed.

    The file is loaded and the signature checked here, before any model exists.

    Args:
        path: Path of the file.
        function: Name of the function in it.
        config: Options; `reward_timeout_seconds` is the deadline of one call, `reward_workers` the
            number of processes. See `FunctionReward`.

    Raises:
        ConfigError: The file or function does not exist.
        RewardError: The file cannot be imported, or the function cannot be called this way.
    """

    def __init__(self, path: str | Path, function: str, config: ScoringOptions) -> None:
        file = Path(path).resolve()
        self._spelling = f"{path}:{function}"
        if not file.is_file():
            raise ConfigError(
                f"reward function {self._spelling}: no file {file}{comma_hint(str(path))}"
            )
        self.seconds = config.reward_timeout_seconds
        self.parallel_calls = config.reward_workers
        self.workers = WorkerPool(
            WorkerTask(
                "lightrft.rewards.user_task",
                "UserFunction",
                (str(file), function, config.seed),
                shown_file=str(file),
                resident_bytes=int(1e9 * (config.reward_memory_gb or 0)) or None,
                passed_variables=config.reward_env,
            ),
            size=config.reward_workers,
            name=self._spelling,
        )
        super().__init__(self._spelling, self._load(), config)

    @property
    def needs_labels(self) -> bool:  # type: ignore[override]
        """Return whether `labels` or the label's column is a parameter without a default."""
        asked = self._signature.by_keyword
        return any(asked.get(name or "", False) for name in ("labels", self._label_key))

    def close(self) -> None:
        """End the worker processes; may be called twice."""
        self.workers.close()

    def _call(self, arguments: dict[str, object], num_responses: int) -> list[CheckedResult]:
        try:
            answer = self.workers.call(with_bytes(arguments), seconds=self.seconds)
        except WorkerTimeoutError as err:
            raise RewardError(
                f"reward function {self._spelling} did not return within {self.seconds:g} s for "
                f"{num_responses} responses: make it faster or raise --reward_timeout_seconds"
            ) from err
        except WorkerFailedError as err:
            raise self._error("failed", err) from err
        return cast("list[CheckedResult]", answer)

    def _load(self) -> Signature:
        try:
            signature = Signature(**cast("Description", self.workers.start()))
        except WorkerFailedError as err:
            if err.kind == MissingFunctionError.__name__:
                raise ConfigError(f"reward function {self._spelling}: {err}") from err
            raise self._error("could not be loaded", err) from err
        takes_responses = signature.takes_all or {*ARGUMENTS[2:]} & {*signature.by_keyword}
        if not takes_responses or any(
            p["is_required"] for p in signature.of_kind("POSITIONAL_ONLY")
        ):
            self.close()
            raise RewardError(
                f"reward function {self._spelling} must take the keyword argument responses (or "
                "completions), and may take prompts, labels and columns of the data: its "
                "parameters are "
                f"({', '.join(p['name'] for p in signature.parameters)})"
            )
        return signature

    def _error(self, what: str, err: WorkerFailedError) -> RewardError:
        return RewardError(f"reward function {self._spelling} {what}: {err}{err.where}")
