"""`lightrft replay`: replay of a step's episodes without their environment."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from lightrft.cli.errors import ExitCode
from lightrft.cli.launch import hide_progress_bars
from lightrft.cli.options import Parser
from lightrft.tools.commands import parser_of

SHOWN = 20


def run(argv: Sequence[str]) -> int:
    """Run the command; see `lightrft replay --help`.

    Raises:
        NotARunError: There is no journal of the step.
        ConfigError: The weights before the step no longer exist.
    """
    options = build_parser().parse_args(argv)
    # Imported here because they import torch.
    from lightrft.strategy.distributed.context import console_sink
    from lightrft.tools.replay.run_replay import replay_run

    hide_progress_bars()
    # The strategy's lines must not mix with the result on standard output.
    with console_sink(lambda text, _: print(text, file=sys.stderr)):
        step, replay = replay_run(Path(options.run), options.step)
    if options.json:
        print(json.dumps({"step": step, **asdict(replay)}, indent=2))
    else:
        for line in replay.differences[:SHOWN]:
            print(line)
        compared = (
            f"step {step}: {replay.num_episodes} episodes, {replay.num_turns} turns, "
            f"{replay.num_tokens} sampled tokens and {replay.num_answers} answers; logprobs within "
            f"{replay.max_difference:.1e}"
        )
        count = len(replay.differences)
        print(f"{compared}; {f'{count} differences' if count else 'equal to the run'}")
    return ExitCode.VERIFICATION if replay.differences else ExitCode.OK


def build_parser() -> Parser:
    """Return the parser of `lightrft replay`."""
    return parser_of("replay")
