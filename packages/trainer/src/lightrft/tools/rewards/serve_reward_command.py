"""`lightrft serve-reward`: a reward function as an HTTP service for `--remote_rm_url`."""

import argparse
import errno
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lightrft.cli.errors import ExitCode, UsageError
from lightrft.cli.options import Parser
from lightrft.config import TrainConfig
from lightrft.reporting.start_bar import end_start_bar
from lightrft.tools.commands import parser_of

if TYPE_CHECKING:
    from lightrft.rewards.types import RewardFunction
    from lightrft.tools.rewards.service import RewardServer


def run(argv: Sequence[str]) -> int:
    """Serve until interrupted; see `lightrft serve-reward --help`.

    Raises:
        ConfigError: The reward function is unknown.
        UsageError: This machine cannot listen at the address.
        RewardError: The reward function cannot be loaded.
    """
    options = build_parser().parse_args(argv)
    from lightrft.rewards import build_reward
    from lightrft.tools.rewards.remote import TOKEN_VARIABLE

    config = TrainConfig(
        reward_timeout_seconds=float(options.timeout_seconds), reward_env=tuple(options.reward_env)
    )
    token = options.token or os.environ.get(TOKEN_VARIABLE)
    with (
        build_reward(options.reward_fn, config=config) as reward,
        _server(reward, options, token) as server,
    ):
        if token is None and options.host not in ("127.0.0.1", "::1", "localhost"):
            print(
                f"warning: whoever reaches {options.host} may send requests; set {TOKEN_VARIABLE}",
                file=sys.stderr,
            )
        print(f"serving {reward.name} at http://{options.host}:{server.http.port}", flush=True)
        end_start_bar()
        threading.Event().wait()  # until an exception, such as Ctrl-C
    return ExitCode.OK


def _server(
    reward: "RewardFunction", options: argparse.Namespace, token: str | None
) -> "RewardServer":
    from lightrft.tools.rewards.service import LIMITS, RewardServer

    limits = replace(
        LIMITS,
        read_seconds=options.read_timeout_seconds,
        idle_seconds=options.read_timeout_seconds,
        max_body_bytes=options.max_body_mb << 20,
        max_held_bytes=8 * options.max_body_mb << 20,
        max_connections=options.max_connections,
    )
    try:
        return RewardServer(
            reward, host=options.host, port=options.port, token=token, limits=limits
        )
    except (OSError, OverflowError, UnicodeError) as err:
        if isinstance(err, OSError) and err.errno in (errno.EADDRINUSE, errno.EACCES):
            raise
        raise UsageError(
            f"cannot listen at --host {options.host} --port {options.port} ({err}): expected an "
            "address of this machine and a port from 0 to 65535"
        ) from err


def build_parser() -> Parser:
    """Return the parser of `lightrft serve-reward`."""
    return parser_of("serve-reward")
