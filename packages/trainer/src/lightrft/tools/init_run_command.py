"""`lightrft init-run`: the folder of a user's first run, to edit."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightrft.cli.errors import ExitCode
from lightrft.cli.launch import hide_progress_bars
from lightrft.cli.options import Parser, available_options
from lightrft.config import TrainConfig
from lightrft.config.toml import format_toml
from lightrft.tools.commands import parser_of
from lightrft.tools.init_model_command import make_folder, require_empty

MODEL, ROWS, REWARD, OPTIONS = "model", "prompts.jsonl", "reward.py", "run.toml"
# Small enough for a CPU: seconds with the tiny model.
SIZES: Mapping[str, object] = {
    "n_samples_per_prompt": 8,
    "rollout_batch_size": 8,
    "train_batch_size": 64,
    "micro_train_batch_size": 16,
    "prompt_max_len": 128,
    "generate_max_len": 16,
    "max_steps": 10,
    "actor_learning_rate": 1e-3,
}
REWARD_SOURCE = '''\
"""The reward: a number for each response. lightrft data check tries it on the prompts."""


def reward(responses, labels):
    """One where the label is in the response, and less for other digits."""
    scores = []
    for response, label in zip(responses, labels):
        digits = sum(character.isdigit() for character in response)
        scores.append(1.0 if label in response else 0.5 * digits / max(1, len(response)))
    return scores
'''


def run(argv: Sequence[str]) -> int:
    """Run the command; see `lightrft init-run --help`.

    Raises:
        UsageError: The directory is not empty, or cannot be a directory.
    """
    arguments = build_parser().parse_args(argv)
    folder = Path(arguments.directory)
    require_empty(folder)
    make_folder(folder)
    if arguments.pretrain is None:
        from lightrft.tools.model_presets import write_tiny_model

        hide_progress_bars()
        write_tiny_model(folder / MODEL, "tiny-qwen3")
    rows = [{"input": f"{n}+{n + 1}=", "label": str(2 * n + 1)} for n in range(1, 65)]
    (folder / ROWS).write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    (folder / REWARD).write_text(REWARD_SOURCE, "utf-8")
    options = options_of_folder(folder, arguments.pretrain)
    # Check that the file can be read.
    TrainConfig(**options)  # type: ignore[arg-type]
    (folder / OPTIONS).write_text(options_text(options, folder), "utf-8")
    wrote = [*([] if arguments.pretrain else [MODEL]), ROWS, REWARD, OPTIONS]
    print(f"wrote {', '.join(wrote)} to {folder}")
    print(f"next: lightrft train --config {folder / OPTIONS}")
    return ExitCode.OK


def options_of_folder(folder: Path, pretrain: str | None = None) -> dict[str, object]:
    """Return the options that the file sets.

    Args:
        folder: Folder of the run.
        pretrain: Model to begin with; None is the tiny one in the folder.
    """
    return {
        "pretrain": pretrain or str(folder / MODEL),
        "prompt_data": str(folder / ROWS),
        "reward_fn": (f"{folder / REWARD}:reward",),
        "output_dir": str(folder / "run"),
        "fsdp": True,
        **SIZES,
        # A pretrained model needs a small rate.
        **({} if pretrain is None else {"actor_learning_rate": 1e-6}),
    }


def options_text(options: Mapping[str, object], folder: Path) -> str:
    """Return the file: options under their help, other usual ones marked, with their defaults."""
    lines = [
        f"# Options of lightrft train --config {folder / OPTIONS}; paths are relative to where",
        "# that is called. All others: lightrft train --help_all. What a file comes to:",
        f"# lightrft config show --changed --config {folder / OPTIONS}",
    ]
    for name, value in options.items():
        lines += ["", *_help(name), f"{name} = {format_toml(value)}"]
    lines += ["", "# With their defaults: remove the mark and change the value."]
    for name, info in available_options().items():
        if info.common and name not in options:
            value = TrainConfig.__dataclass_fields__[name].default
            written = "is unset" if value is None else f"= {format_toml(value)}"
            lines += ["", *_help(name), f"# {name} {written}"]
    return "\n".join(lines) + "\n"


def _help(name: str) -> list[str]:
    text = available_options()[name].help
    return textwrap.wrap(text, 96, initial_indent="# ", subsequent_indent="# ")


def build_parser() -> Parser:
    """Return the parser of `lightrft init-run`."""
    return parser_of("init-run")
