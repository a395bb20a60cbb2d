"""`lightrft data check`: what a run would find in its prompts, before the run."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightrft.cli.data_gold import GoldScore
from lightrft.cli.data_report import show_check, show_gold, show_layout, show_samples
from lightrft.cli.errors import ExitCode, UsageError, refuse
from lightrft.cli.options import Parser, add_options, command_options, parse_options
from lightrft.cli.preflight import PlainTokenizer, model_problems
from lightrft.config import ConfigError, TrainConfig
from lightrft.config.sources import split_sources
from lightrft.datasets.check import DataCheck, check_rows, propose_keys
from lightrft.datasets.errors import DataError
from lightrft.datasets.files import Row, scan_rows
from lightrft.datasets.render import check_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DESCRIPTION = """\
Read every row of the prompts as a run would, and say what is in them: columns and a proposal which
of them to use, three prompts as the model will see them, lengths, over-long, empty and duplicate
rows, and what the reward gives to the reference answers. Exit code 4 if a row is bad.
"""


@dataclass(frozen=True, slots=True)
class Request:
    """What to check.

    Args:
        source: Files, folders or names of data sets, separated by commas.
        config: Options of the run.
        given: Names of the options that were given.
    """

    source: str
    config: TrainConfig
    given: frozenset[str]


def run(argv: Sequence[str]) -> int:
    """Run the command; see `lightrft data check --help`.

    Raises:
        UsageError: Arguments that cannot be read.
        ConfigError: Options with wrong values.
        DataError: A source that cannot be read at all.
        RewardError: A reward function that cannot be loaded.
    """
    if argv and argv[0] == "check":
        return check(parse(argv[1:]))
    if argv and argv[0] in ("-h", "--help"):
        return check(parse(["--help"]))
    raise UsageError("lightrft data knows one action: lightrft data check SOURCE")


def check(request: Request) -> int:
    """Print what is in the prompts; 4 if a row is bad."""
    config = request.config
    items = [
        item
        for source in split_sources(request.source)
        for item in scan_rows(source, split=config.prompt_split)
    ]
    if not items:
        raise DataError(f"{request.source} holds no rows: expected at least one")
    rows = [item for item in items if not isinstance(item, DataError)]
    show_layout(request.source, rows, num_items=len(items))
    config = propose_keys_of(request, rows)
    tokenizer = load_tokenizer(config)
    plain = PlainTokenizer() if tokenizer is None else tokenizer
    found = check_rows(items, plain, config)
    show_samples(found, tokenizer, max_new_tokens=config.generate_max_len)
    show_check(found, prompt_max_len=config.prompt_max_len, in_tokens=tokenizer is not None)
    gold = score_gold(config, found)
    show_gold(gold)
    num_bad = len(found.problems) + (0 if gold is None else len(gold.problems))
    print(f"{len(found.rows)} prompts can be trained on" if not num_bad else f"{num_bad} bad rows")
    return ExitCode.DATA if num_bad else ExitCode.OK


def parse(argv: Sequence[str]) -> Request:
    """The source and the options.

    Raises:
        ConfigError: Unknown names or wrong values, all at once.
        UsageError: No source.
    """
    config, parsed, problems = parse_options(build_parser(), argv)
    if config.pretrain is not None:
        problems += model_problems("--pretrain", config.pretrain)
    refuse(problems, ConfigError)
    source = parsed.source or config.prompt_data
    if source is None:
        raise UsageError("give a file, a folder or the name of a data set to check")
    names, defaults = set(command_options("data")), vars(TrainConfig())
    given = {name for name in names if vars(config)[name] != defaults[name]}
    return Request(source, config, frozenset(given | (names & set(vars(parsed)))))


def build_parser() -> Parser:
    """The parser of `lightrft data check`."""
    parser = Parser("data check", DESCRIPTION, argument_default=argparse.SUPPRESS)
    parser.add_argument(
        "source", nargs="?", default=None, metavar="SOURCE",
        help="File, folder or name of a data set; several separated by commas. "
        "Default: prompt_data of --config.",
    )  # fmt: skip
    add_options(parser, command_options("data"))
    return parser


def propose_keys_of(request: Request, rows: Sequence[Row]) -> TrainConfig:
    """The options of the request; keys that are not given are taken from the data."""
    config = request.config
    columns: Mapping[str, object] = rows[0].columns if rows else {}
    proposal = propose_keys(columns)
    keys = {"input_key": proposal.input_key, "label_key": proposal.label_key}
    proposed: dict[str, object] = {
        name: key
        for name, key in keys.items()
        if key and name not in request.given and vars(config)[name] not in columns
    }
    flags = [f"--{name} {key}" for name, key in proposed.items()]
    input_key = proposed.get("input_key", config.input_key)
    if (
        proposal.holds_messages
        and not config.apply_chat_template
        and input_key == keys["input_key"]
    ):
        proposed["apply_chat_template"] = True
        flags.append("--apply_chat_template")
    print(f"proposed options: {' '.join(flags) or 'none, the keys fit'}")
    return config.replaced(proposed)


def load_tokenizer(config: TrainConfig) -> PreTrainedTokenizerBase | None:
    """The tokenizer of `pretrain`, or None without one.

    Raises:
        DataError: It has no chat template, and one is needed.
    """
    if config.pretrain is None:
        print("no --pretrain: lengths are in characters, and no chat template is applied")
        return None
    from lightrft.models.loading import load_tokenizer as load

    tokenizer = load(config.pretrain)
    check_tokenizer(tokenizer, config)
    return tokenizer


def score_gold(config: TrainConfig, found: DataCheck) -> GoldScore | None:
    """What the reward gives to the reference answers; None without a reward or without rows."""
    if not config.reward_fn or not found.rows:
        return None
    from lightrft.cli.data_gold import score_labels

    return score_labels(found.rows, config)
