"""The commands that train on rows; processes, signals and files are those of `train`.

`python -m lightrft.cli.row_commands sft ...` is `lightrft sft ...` as one process of a launcher.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from functools import partial

from lightrft.cli.errors import UsageError, run_guarded
from lightrft.cli.train import (
    StageCommand,
    check,
    next_after_rows,
    parse_policy,
    parse_rows,
)
from lightrft.config import TrainConfig


def preference_problems(config: TrainConfig, world_size: int) -> list[str]:
    """Find problems of the options of `prefer`, a line each."""
    from lightrft.stages.preference import preference_inputs

    return preference_inputs.preference_problems(config, world_size)


def next_after_reward(output_dir: str, model_dir: str) -> str:
    """Name the place of the trained model, and the commands that come next."""
    model = shlex.quote(model_dir)
    return (
        f"{next_after_rows(output_dir, model_dir)}\n"
        f"         lightrft train --reward_pretrain {model} ..."
    )


def parse_distill(
    config: TrainConfig, parsed: argparse.Namespace, problems: list[str]
) -> tuple[TrainConfig, int]:
    """Complete and check options of `distill`: those of `train`, or of `sft` with a teacher."""
    config = config if problems else config.distilled()
    if config.distillation_stage == "policy":
        return parse_policy(config, parsed, problems)
    if not problems:
        from lightrft.cli.preflight import teacher_problems

        problems += teacher_problems(config)
    return parse_rows(config, parsed, problems, command="distill")


def check_distill(config: TrainConfig) -> None:
    """Check data, rewards and algorithm where the student samples all rows."""
    if config.distillation_stage == "policy":
        check(config)


COMMANDS = {
    each.name: each
    for each in (
        StageCommand(
            "sft", "Fine-tune a language model on texts, on answers to prompts or on conversations."
        ),
        StageCommand(
            "prefer",
            "Fine-tune a language model on pairs of answers, or on answers that are labelled.",
            partial(parse_rows, command="prefer", problems_of=preference_problems),
        ),
        StageCommand(
            "reward",
            "Train a model that gives answers a score, on pairs of answers or labelled ones.",
            next_commands=next_after_reward,
        ),
        StageCommand(
            "distill",
            "Train a language model towards a teacher, on its own samples or on rows with "
            "completions.",
            parse_distill,
            stage=lambda config: config.distillation_stage,
            check=check_distill,
        ),
    )
}
sft, prefer, reward, distill = COMMANDS.values()


def main(argv: Sequence[str]) -> int:
    """Run the command whose name comes first."""
    return run_guarded(" ".join(["lightrft", *argv[:1]]), partial(_run, *argv))


def _run(name: str = "", *argv: str) -> int:
    if name not in COMMANDS:
        raise UsageError(f"expected the name of a command first: {', '.join(COMMANDS)}")
    return COMMANDS[name](argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
