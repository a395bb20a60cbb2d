"""`lightrft data check`: a check of a run's prompts before the run."""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean
from typing import TYPE_CHECKING, cast

import psutil

from lightrft.cli.errors import ExitCode, UsageError, refuse
from lightrft.cli.options import Parser, add_options, available_options, parse_options
from lightrft.cli.preflight import PlainTokenizer, model_problems, teacher_problems
from lightrft.config import (
    ConfigError,
    PromptDataOptions,
    RolloutOptions,
    RowDataOptions,
    ScoringOptions,
    SplitOptions,
    TrainConfig,
)
from lightrft.config.parts.data import split_sources
from lightrft.config.printable import printable
from lightrft.config.registry import Registry
from lightrft.config.train_config import command_options
from lightrft.datasets.files import Row, scan_rows, with_whole_numbers
from lightrft.datasets.messages import INPUT_KEYS, OF_PROMPTS
from lightrft.datasets.render import (
    as_flags,
    check_tokenizer,
    found_keys,
    render,
)
from lightrft.datasets.text_ids import prompt_remark
from lightrft.datasets.types import DataError
from lightrft.engines.text import Tokenizer
from lightrft.tools.commands import parser_of
from lightrft.tools.data.certificate import Certificate, certify, play_empty
from lightrft.tools.data.probes import IN_OTHER_WORDS
from lightrft.tools.data.row_checks import CheckedRow, RowCheck, check_prompts, repeated
from lightrft.tools.rewards.fork import Fork

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightrft.models.statements import Statements

NUM_SAMPLES, MAX_LINES = 3, 20
LABEL_KEYS = (
    "label",
    "answer",
    "solution",
    "ground_truth",
    "reference",
    "target",
    "final_answer",
    "output",
)
MAX_CHARACTERS = 1500
QUANTILES = {"shortest": 0.0, "median": 0.5, "90 %": 0.9, "99 %": 0.99, "longest": 1.0}
# Limits of the chat template for one row.
TEMPLATE_SECONDS, TEMPLATE_BYTES = 20.0, 2**30


def say(text: str = "") -> None:
    """Print a text that may hold data, without control characters for the terminal."""
    print(printable(text), flush=True)


def show_layout(source: str, rows: Sequence[Row], *, num_items: int) -> None:
    """Print the columns of the rows, with their types."""
    say(f"{source}: {num_items} rows, {len(rows)} of them readable")
    names = list(dict.fromkeys(name for row in rows for name in row.columns))
    for name in names:
        values = [row.columns[name] for row in rows if name in row.columns]
        kinds = sorted({_kind(value) for value in values})
        missing = len(rows) - len(values)
        note = f", missing in {missing} rows" if missing else ""
        say(f"  {name}: {' or '.join(kinds)}{note}, for example {str(values[0])[:60]!r}")


def show_samples(
    rows: Sequence[CheckedRow], statements: Statements | None, *, max_new_tokens: int
) -> None:
    """Print the first, the middle and the last prompt as the model will see them."""
    places = sorted({0, len(rows) // 2, len(rows) - 1})[:NUM_SAMPLES] if rows else []
    for number, place in enumerate(places, start=1):
        row = rows[place]
        size, text, ends = f"{len(row.text)} characters", row.text, ""
        if statements is not None:
            tokenizer = statements.tokenizer
            size, text = f"{len(row.token_ids)} tokens", visible(row, tokenizer)
            tokens = tokenizer.convert_ids_to_tokens(list(statements.vocabulary.ends))
            ends = " or ".join(f"⟦{token}⟧" for token in tokens)
        say(f"\nsample {number} of {len(places)}, {row.location}")
        say(f"  prompt, {size}, not trained (mask 0):")
        show_text(text)
        until = f" up to and including {ends}" if ends else ""
        say(f"  response, at most {max_new_tokens} sampled tokens, trained (mask 1){until}")
        say(f"  label: {'none' if row.label is None else str(row.label)[:200]!r}")


def show_text(text: str) -> None:
    """Print a text, indented, up to `MAX_CHARACTERS`."""
    say("\n".join(f"    {line}" for line in text[:MAX_CHARACTERS].split("\n")))


def visible(row: CheckedRow, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the prompt decoded from its token ids, with special tokens in ⟦brackets⟧."""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    parts = []
    for is_special, ids in groupby(row.token_ids, key=lambda token_id: token_id in special):
        if is_special:
            parts += [f"⟦{tokenizer.decode([token_id])}⟧" for token_id in ids]
        else:
            parts.append(tokenizer.decode(list(ids)))
    return "".join(parts)


def show_check(result: RowCheck[CheckedRow], config: PromptDataOptions, *, in_tokens: bool) -> None:
    """Print lengths, counts, and the rows that cannot be used."""
    rows = [row for _, row in result.every]
    say()
    show_lengths(
        f"{'tokens' if in_tokens else 'characters'} of a prompt",
        [len(row.token_ids) if in_tokens else len(row.text) for row in rows],
    )
    if in_tokens:
        show_too_long(result.too_long, config.prompt_max_len, "prompt_max_len")
    show_duplicates("prompts", repeated(result.every, lambda row: (row.text, *row.media)))
    sizes = [size for row in rows for size in row.media_sizes]
    if sizes:
        widths, heights = zip(*sizes, strict=True)
        say(
            f"images and videos: {len(sizes)}, {min(widths)} to {max(widths)} pixels wide and "
            f"{min(heights)} to {max(heights)} high"
        )
    contents = [row.columns.get(config.input_key, "?") for row, _ in result.refused if row]
    texts = [each.strip() if isinstance(each, str) else each for each in contents]
    num_empty = sum(each in ("", None, [], ()) for each in texts)
    say(f"empty prompts: {num_empty}")
    say(f"without label: {sum(row.label is None for row in rows)}")
    show_lines("rows that cannot be used", result.problems, MAX_LINES)


def show_certificate(result: Certificate | None) -> None:
    """Print the scores of reference answers and of answers that must not pass."""
    if result is None:
        say("reference answers: not scored, no --reward_fn")
        return
    say(f"reference answers of the first {result.num_rows} rows, mean reward by {result.name}")
    for name, mean in result.means.items():
        say(f"  {name}{IN_OTHER_WORDS.get(name, '')}: {mean:.3f}")
    if not result.reads_labels:
        say("this reward reads no labels as answers: the means are of what was tried, and there is")
        say("nothing to certify")
    for doubt in result.doubts:
        say(f"warning: {doubt}")
    show_lines("reference answers that cannot be right", result.problems, MAX_LINES)


def show_empty(results: Sequence[float | None]) -> None:
    """Print the rewards of episodes of empty turns, and a warning if one is above 0."""
    rewards = [each for each in results if each is not None]
    mean = f"{fmean(rewards):.3f}" if rewards else "none"
    other = f", {len(results) - len(rewards)} gave none" if len(rewards) < len(results) else ""
    say(f"episodes of empty turns, mean reward by the environment: {mean}{other}")
    if num_paid := sum(each > 0 for each in rewards):
        say(f"warning: {num_paid} of {len(rewards)} episodes of empty turns are paid")


def show_places(what: str, places: Sequence[str]) -> None:
    """Print the number of places and the first ones."""
    examples = f", first: {', '.join(places[:3])}" if places else ""
    say(f"{what}: {len(places)}{examples}")


def show_too_long(places: Sequence[str], limit: int, option: str) -> None:
    """Print the rows that have more tokens than an option allows."""
    show_places(f"over {limit} tokens (a run leaves them out; --{option})", places)


def show_duplicates(what: str, pairs: Sequence[tuple[str, str]]) -> None:
    """Print the rows that repeat earlier rows."""
    lines = [f"{place} = {first}" for place, first in pairs]
    show_places(f"duplicate {what} (a run uses them all)", lines)


def show_lengths(what: str, counts: Sequence[int]) -> None:
    """Print the quantiles of lengths."""
    import numpy as np  # not at the top: `--help` must be fast

    if len(counts):
        shown = (f"{name} {np.quantile(counts, q):g}" for name, q in QUANTILES.items())
        say(f"{what}: {', '.join(shown)}")


def show_lines(what: str, lines: Sequence[str], most: int | None = None) -> None:
    """Print the number of lines, and the lines; None is all of them."""
    say(f"{what}: {len(lines)}")
    for line in lines[:most]:
        say(f"  {line}")
    if most is not None and len(lines) > most:
        say(f"  and {len(lines) - most} more")


def verdict(num_bad: int, usable: Sequence[object], words: str) -> int:
    """Print whether rows can be used; return 4 if one is bad or none is usable."""
    say(f"{num_bad} bad rows" if num_bad else f"{len(usable)} {words}")
    return ExitCode.DATA if num_bad or not usable else ExitCode.OK


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, Sequence) and not isinstance(value, str):
        is_chat = bool(value) and isinstance(value[0], Mapping) and "role" in value[0]
        return "chat messages" if is_chat else "list"
    names = {str: "text", bool: "true or false", int: "number", float: "number", dict: "object"}
    return names.get(type(value), type(value).__name__)


# Checks of the rows of a stage.
STAGE_CHECKS = Registry(
    "stage",
    {
        "policy": "lightrft.tools.data.data_command:check",
        **dict.fromkeys(
            ("sft", "distill", "prefer", "reward"), "lightrft.tools.data.stored_check:check"
        ),
    },
    takes_own=False,
)


@dataclass(frozen=True, slots=True)
class Request:
    """Arguments of one check.

    Args:
        source: Files, folders or names of data sets, separated by commas.
        config: Options of the run.
        given: Names of the options that the user set.
        stage: Key of `STAGE_CHECKS`.
    """

    source: str
    config: TrainConfig
    given: frozenset[str]
    stage: str = "policy"


def run(argv: Sequence[str]) -> int:
    """Run the command; see `lightrft data check --help`.

    Raises:
        UsageError: The arguments cannot be parsed.
        ConfigError: An option has a wrong value.
        DataError: The source cannot be read at all.
        RewardError: A reward function cannot be loaded, or fails.
    """
    if argv and argv[0] == "check":
        request = parse(argv[1:])
        chosen = cast("Callable[[Request], int]", STAGE_CHECKS.load(request.stage))
        return chosen(request)
    if argv and argv[0] in ("-h", "--help"):
        return check(parse(["--help"]))
    raise UsageError("lightrft data knows one action: lightrft data check SOURCE")


def check(request: Request) -> int:
    """Print the findings on prompts; return 4 if a row is bad."""
    items = read_items(request.source, request.config)
    rows = [item for item in items if not isinstance(item, DataError)]
    show_layout(request.source, rows, num_items=len(items))
    config = propose_keys_of(request, rows)
    statements = load_statements(config)
    has_model = statements is not None
    config = config.replaced(_within_context(config))
    reader = _reader(statements, config)
    if rows:
        _say_of_model(rows[0], reader, statements, config)
    result = check_prompts(items, reader, config, has_model=has_model)
    every = [row for _, row in result.every]
    show_samples(every, statements, max_new_tokens=config.generate_max_len)
    show_check(result, config, in_tokens=has_model)
    if not config.apply_chat_template:
        remark = prompt_remark(reader, [row.text for row in every if not row.media])
        say(f"prompts read otherwise than they stand: {remark or 0}")
    unread = result.record.line(OF_PROMPTS)
    say(unread or "all columns and keys that belong into prompts are read")
    usable = result.made if has_model else every
    num_bad = len(result.problems) + _num_reward_problems(usable, config)
    left_out = len(every) - len(usable)
    note = f", {left_out} are left out as too long" if left_out else ""
    return verdict(num_bad, usable, f"prompts can be trained on{note}")


def _say_of_model(
    row: Row, reader: Tokenizer, statements: Statements | None, config: PromptDataOptions
) -> None:
    """Print the model's statements, after a check that its template ends."""
    if config.apply_chat_template:
        require_bounded(row, lambda: render(row, reader, config))
    if statements is not None:
        require_bounded(row, lambda: statements.behind_answer)
        statements.say(say)


def _num_reward_problems(usable: Sequence[CheckedRow], config: ScoringOptions) -> int:
    """Try the rewards and the environment on the rows; return the number of reward problems."""
    scores = bool(config.reward_fn or config.remote_rm_url)
    certificate = certify(usable, config) if scores and usable else None
    show_certificate(certificate)
    if config.environment is not None and usable:
        show_empty(play_empty(usable, config))
    return 0 if certificate is None else len(certificate.problems)


def _reader(statements: Statements | None, config: RowDataOptions) -> Tokenizer:
    if statements is None:
        return PlainTokenizer()
    from lightrft.stages.start_checks import load_modality

    return load_modality(config, statements.tokenizer).renderer


def _within_context(config: RolloutOptions) -> dict[str, object]:
    """Return the lengths that a run uses; warn if prompts get no room in the context."""
    if config.pretrain is None:
        return {}
    from lightrft.stages.start_checks import prompts_within_context

    try:
        return prompts_within_context(config)
    except ConfigError as error:  # only a warning: the run may have other options
        say(f"warning: {error}")
        return {}


def require_bounded(row: Row, rendering: Callable[[], object]) -> None:
    """Render a row in a fork, so that it cannot use up this process's time or memory.

    Raises:
        DataError: The chat template does not end within the limits.
    """

    def attempt() -> bool:
        used = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (used + TEMPLATE_BYTES, resource.RLIM_INFINITY))
        try:
            rendering()
        except MemoryError:
            return False
        except (ConfigError, DataError) as error:  # reported later, with the row
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, MemoryError):
                cause = cause.__cause__
            return cause is None
        return True

    fork = Fork(attempt)
    try:
        if not fork.call(seconds=TEMPLATE_SECONDS):
            raise DataError(
                f"{row.location}: the chat template takes more than {TEMPLATE_SECONDS:.0f} seconds "
                f"or {TEMPLATE_BYTES >> 20} MiB for one row: give another by --chat_template FILE"
            )
    finally:
        fork.close()


def read_items(source: str, config: SplitOptions) -> list[Row | DataError]:
    """Return all rows of the sources, with an error in place of each malformed one.

    Raises:
        DataError: There are no rows.
    """
    parts, split = split_sources(source), config.prompt_split
    items = [item for part in parts for item in scan_rows(part, split=split)]
    if not items:
        raise DataError(f"{source} holds no rows: expected at least one")
    whole = iter(with_whole_numbers([item for item in items if isinstance(item, Row)]))
    return [next(whole) if isinstance(item, Row) else item for item in items]


def parse(argv: Sequence[str]) -> Request:
    """Return the source and the options.

    Raises:
        ConfigError: Names are unknown or values wrong; one error lists all.
        UsageError: There is no source.
    """
    first = Parser("data check", "", add_help=False)
    first.add_argument("--stage", choices=tuple(STAGE_CHECKS), default="policy")
    stage: str = first.parse_known_args(argv)[0].stage
    config, parsed, problems = parse_options(build_parser(stage), argv)
    if config.pretrain is not None:
        problems += model_problems("--pretrain", config.pretrain)
    elif stage != "policy":
        problems.append("--pretrain is missing: its tokenizer decides what is trained")
    if stage != "policy":
        problems += teacher_problems(config)
    refuse(problems, ConfigError)
    source = vars(parsed).get("source") or config.prompt_data
    if source is None:
        raise UsageError("give a file, a folder or the name of a data set to check")
    names, defaults = set(command_options("data")), vars(TrainConfig())
    set_names = {name for name in names if vars(config)[name] != defaults[name]}
    return Request(source, config, frozenset(set_names | (names & set(vars(parsed)))), stage)


def build_parser(stage: str = "policy") -> Parser:
    """Return the parser of `lightrft data check` for the rows of a stage."""
    parser = parser_of("data check", {"--stage": STAGE_CHECKS}, takes_options=True)
    add_options(parser, _options_of(stage))
    return parser


def _options_of(stage: str) -> Sequence[str]:
    """Return the options of a run that the check of its rows also takes."""
    policy, taken = available_options(), command_options("data")
    if stage == "policy":
        return taken
    of_rows = [
        name
        for name in command_options("sft" if stage == "distill" else stage)
        if name in taken or name not in policy
    ]
    return [*of_rows, *(["teacher"] if stage == "distill" else [])]


def propose_keys(columns: Mapping[str, object]) -> tuple[str | None, str | None]:
    """Return the columns of a row that look like the prompt and the reference answer, or None."""
    prompt = next((name for name in INPUT_KEYS if _is_prompt(columns.get(name))), None)
    label = next((name for name in LABEL_KEYS if name in columns and name != prompt), None)
    return prompt, label


def _is_prompt(value: object) -> bool:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        return isinstance(value, str)
    return isinstance(value[0], Mapping)


def propose_keys_of(request: Request, rows: Sequence[Row]) -> TrainConfig:
    """Return the options of the request, with unset keys taken from the data."""
    config = request.config
    columns: Mapping[str, object] = rows[0].columns if rows else {}
    keys = dict(zip(("input_key", "label_key"), propose_keys(columns), strict=True))
    detected = {} if "input_key" in request.given else found_keys(columns, config)
    proposed: dict[str, object] = {
        name: key
        for name, key in keys.items()
        if key and name not in request.given and vars(config)[name] not in columns
    } | detected
    input_key = str(proposed.get("input_key", config.input_key))
    holds_messages = input_key == keys["input_key"] and not isinstance(columns[input_key], str)
    if holds_messages and not config.apply_chat_template:
        proposed["apply_chat_template"] = True
    say(f"proposed options: {as_flags(proposed) or 'none, the keys fit'}")
    return config.replaced(proposed)


def load_statements(config: PromptDataOptions) -> Statements | None:
    """Return the statements of the model `pretrain`; None without a model.

    Raises:
        ConfigError: Its files contradict each other.
        DataError: It has no chat template, and one is needed.
    """
    if config.pretrain is None:
        say("no --pretrain: lengths are in characters, and no chat template is applied")
        return None
    from lightrft.models.statements import read_statements

    statements = read_statements(config.pretrain, config).require_consistent()
    check_tokenizer(statements.tokenizer, config)
    return statements
