"""Flags and TOML files of the commands, merged into one `TrainConfig`."""

import argparse
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from lightrft.cli.errors import UsageError
from lightrft.config import TrainConfig
from lightrft.config.options import (
    NOT_OF_TRAIN,
    SFT,
    OptionInfo,
    coerce,
    from_text,
    options_of,
    type_hints,
)
from lightrft.config.other_names import NAMES_OF_COMMANDS, TABLE_HINT, option_hint
from lightrft.config.toml import read_toml
from lightrft.utils.arguments import add_arguments

# Documented options that this version does not implement, with what to do instead. They are
# refused: an option that were accepted and ignored would change nothing without a word.
_METRICS = "metrics go to OUTPUT_DIR/metrics.jsonl"
_REWARD_MODELS = "reward models run in the trainer's processes"
_TRACE = "use --save_trajectories, which writes trajectories.jsonl"
_FILES = "--pretrain_data takes one source, of which the split train is used"

UNAVAILABLE: dict[str, str] = {
    "disable_ds_ckpt": "checkpoints are written every --save_steps; -1 writes none on the way",
    "save_hf_ckpt": "the final model is always written in Hugging Face format",
    "mark_high_entropy_tokens": _TRACE,
    "trajectory_analysis": _TRACE,
    "print_replay_buffer_stats": _METRICS,
    "pretrain_data_probs": _FILES,
    "pretrain_split": _FILES,
    "normalize_advantages": "--policy_loss gspo always works this way",
    "use_sequence_rewards": "--policy_loss gspo always works this way",
    "normalize_reward_for_critic": "scale the reward in your reward function",
    "save_value_network": "the critic is part of every checkpoint",
    "actor_init_on_gpu": "weights are loaded on the device they are trained on",
    "flash_attn": "attention is torch's scaled_dot_product_attention",
    "gradient_checkpointing_use_reentrant": "checkpointing is never re-entrant",
    "disable_fast_tokenizer": "the tokenizer saved with the model is used",
    "disable_logprobs_flashattn": "attention is torch's scaled_dot_product_attention",
    "no_shard_vit": "--mixed_mm_data keeps the vision tower in FSDP2's root unit",
    "initial_model_shard_size": "the reference model is sharded over all processes",
    "load_in_4bit": "weights are never quantised in training",
    "rm_use_engine": _REWARD_MODELS,
    "rm_engine_cudagraph": _REWARD_MODELS,
    "value_head_prefix": "the critic's head is always called value_head",
    "reference_key": "use --label_key; other columns reach the reward function by name",
    "fps": 'videos bring their own: {"frames": [...], "fps": 2}',
    "processor": "the processor that was saved with the model is used",
    "system_prompt_path": "give the text itself by --system_prompt, or in a --config file",
    "ckpt_path_local": "use --ckpt_path",
    "train_data": "use --prompt_data",
    "task_instruction": "use --system_prompt",
    "loss_type": "use --reward_loss of lightrft reward",
    "margin": "give lightrft reward rows with a column margin",
    "pooling_method": "use --reward_pooling last or attention (for attn) of lightrft reward",
    "scale_for_train": "use --reward_loss hps of lightrft reward",
    "probing_layer": "lightrft reward reads the last layer",
    "heads_types": "use --reward_heads of lightrft reward",
    "gspo_alpha": "use --eps_clip_low and --eps_clip_high with --policy_loss gspo",
    "clip_range": "use --eps_clip",
    "clip_range_lower": "use --eps_clip_low",
    "clip_range_higher": "use --eps_clip_high",
    "use_clip_higher": "use --eps_clip_high",
    "mirror_tau": "use --init_kl_coef with --use_kl_loss",
    "use_length_penalty": "use --overlong_buffer",
    "length_penalty_coef": "use --overlong_buffer_penalty_factor",
    "baseline_type": "use --advantage_estimator",
    "normalize_reward": "use --reward_running_norm",
    "save_interval": "use --save_steps",
    "use_ms": "models and data are read from local paths",
}


class Parser(argparse.ArgumentParser):
    """An argument parser that raises instead of leaving the process, and abbreviates nothing.

    Args:
        command: The words after `lightrft`.
        description: What the command does.
        settings: As argparse takes them.
    """

    def __init__(self, command: str, description: str, **settings: object) -> None:
        self.command = command
        super().__init__(
            f"lightrft {command}",
            description=description,
            allow_abbrev=False,
            **settings,  # type: ignore[arg-type]
        )

    def error(self, message: str) -> NoReturn:
        """Raise what argparse complains about."""
        raise UsageError(f"{message}; see {self.prog} --help")


@dataclass(frozen=True, slots=True)
class at_least:  # noqa: N801 - a type of argument reads like a function
    """A type of argument: whole numbers from `lowest`."""

    lowest: int

    def __call__(self, text: str) -> int:
        """The number in `text`."""
        if text.lstrip("+-").isdecimal() and len(text) < 20 and int(text) >= self.lowest:
            return int(text)
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number >= {self.lowest}")


def finite(text: str) -> float:
    """A type of argument: numbers that are neither NaN nor infinite."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a finite number")
    return number


def add_number(
    parser: argparse._ActionsContainer,
    flag: str,
    text: str,
    *,
    default: int,
    lowest: int = 1,
) -> None:
    """Add a flag that takes a whole number.

    Args:
        parser: The parser, or one of its groups.
        flag: With its dashes.
        text: The help, to which the default is added.
        default: Its value where it is not given.
        lowest: The smallest number that is taken.
    """
    parser.add_argument(
        flag,
        default=default,
        type=at_least(lowest),
        metavar="N",
        help=f"{text} Default: {default}.",
    )


def available_options(command: str = "train") -> dict[str, OptionInfo]:
    """Options of a command that trains, on the command line and in TOML files, by name.

    Other commands read the files of all.
    """

    def takes(info: OptionInfo) -> bool:
        if command in SFT:
            return command in info.commands
        return command != "train" or info.group not in NOT_OF_TRAIN

    options = options_of(TrainConfig)
    return {n: info for n, (_, info) in options.items() if n not in UNAVAILABLE and takes(info)}


def command_options(command: str) -> list[str]:
    """The options that a command beside `train` takes."""
    return [name for name, info in available_options().items() if command in info.commands]


def add_options(parser: argparse.ArgumentParser, names: Collection[str] | None = None) -> None:
    """Add --config and one flag for every option; flags that are not given leave no trace.

    Args:
        parser: Gets the flags.
        names: Options to add; None adds all.
    """
    if "--config" not in parser._option_string_actions:
        parser.add_argument(
            "--config", nargs="+", default=[], metavar="FILE.toml", help="Files with options."
        )
    chosen = available_options() if names is None else names
    add_arguments(parser, config_type=TrainConfig, names=chosen, as_text=True)


def parse_options(
    parser: argparse.ArgumentParser,
    argv: Sequence[str],
    *,
    first_files: Callable[[argparse.Namespace], Sequence[Path]] = lambda _: (),
) -> tuple[TrainConfig, argparse.Namespace, list[str]]:
    """The options of a command line and its files; the command's own arguments; all problems.

    Args:
        parser: Of the command.
        argv: Its arguments.
        first_files: TOML files that the arguments name otherwise; those of --config win over them.

    Raises:
        UsageError: Arguments that cannot be read, or a file that does not exist.
        ConfigError: A file is not TOML.
    """
    parsed, unknown = parser.parse_known_args(normalise(argv))
    command = parser.command if isinstance(parser, Parser) else "train"
    known = available_options(command)
    flags = {name: value for name, value in vars(parsed).items() if name in known}
    files = [*first_files(parsed), *map(Path, parsed.config)]
    config, problems = merge_options(files, flags, command)
    return config, parsed, unknown_flags(unknown, command) + problems


def merge_options(
    files: Sequence[Path], flags: Mapping[str, object], command: str = "train"
) -> tuple[TrainConfig, list[str]]:
    """The options of some TOML files, left to right, and then the flags, with all problems.

    Raises:
        UsageError: A file does not exist.
        ConfigError: A file is not TOML.
    """
    known = available_options(command)
    options, hints = options_of(TrainConfig), type_hints(TrainConfig)
    problems: list[str] = []
    values: dict[str, object] = {}
    for path in files:
        if not path.is_file():
            raise UsageError(f"--config: no such file: {path}")
        for name, value in read_toml(path).items():
            if name in known:
                values[name] = coerce(value, hints[name])
            elif name not in options and isinstance(value, Mapping):
                problems.append(f"{path}: unknown option {name!r}{TABLE_HINT}")
            elif name not in options or coerce(value, hints[name]) != options[name][0].default:
                # The config.toml of a run holds every option that the record has.
                problems.append(f"{path}: {unknown_name(name, command)}")
    texts = {name: from_text(value, hints[name]) for name, value in flags.items()}
    config = TrainConfig()
    for name, value in {**values, **texts}.items():
        setattr(config, name, value)
    problems += config.problems()
    return config, problems


def unknown_name(name: str, command: str = "train") -> str:
    """The sentence about an option that a command lacks: why, or the nearest names."""
    if name in UNAVAILABLE and name not in NAMES_OF_COMMANDS.get(command, ()):
        return f"{name} is not available: {UNAVAILABLE[name]}"
    for other in ("train", *SFT):
        if name in available_options(other) and name not in available_options(command):
            return f"{name} is an option of lightrft {other}, not of lightrft {command}"
    if name in available_options(command):
        return f"{name} is no option of lightrft {command}"
    hint = option_hint(name, available_options(command), command)
    if hint.startswith("; known"):
        flag = "--help_all" if command in ("train", *SFT) else "--help"
        hint = f"; lightrft {command} {flag} lists all"
    return f"unknown option {name!r}{hint}"


def unknown_flags(arguments: Sequence[str], command: str = "train") -> list[str]:
    """Sentences about what the parser did not know; values after an unknown flag are its own."""
    flags = [argument for argument in arguments if argument.startswith("--")]
    if not flags:
        # Hydra's form has no dashes.
        named = [argument.split("=")[0] for argument in arguments if "=" in argument]
        bare = [repr(argument) for argument in arguments if "=" not in argument]
        usage = (
            f"unexpected {', '.join(bare)}: an option is --NAME VALUE, a switch --NAME or "
            f"--no_NAME; see lightrft {command} --help"
        )
        return [unknown_name(name, command) for name in named] + ([usage] if bare else [])
    return [unknown_name(flag.removeprefix("--").split("=")[0], command) for flag in flags]


def normalise(arguments: Sequence[str]) -> list[str]:
    """Spell --some-flag=x as --some_flag=x, so that both forms work."""
    return [
        "--" + "=".join([name.replace("-", "_"), *value]) if argument.startswith("--") else argument
        for argument in arguments
        for name, *value in [argument.removeprefix("--").split("=", 1)]
    ]
