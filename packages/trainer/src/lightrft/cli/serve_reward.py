"""`lightrft serve-reward`: a reward function as an HTTP service for `--remote_rm_url`."""

from collections.abc import Sequence

from lightrft.cli.errors import ExitCode
from lightrft.cli.options import Parser, add_number
from lightrft.config import TrainConfig

EXAMPLE_PORT = 8008


def run(argv: Sequence[str]) -> int:
    """Serves until it is interrupted; see `lightrft serve-reward --help`.

    Raises:
        ConfigError: An unknown reward function.
        RewardError: A reward function that cannot be loaded.
    """
    options = build_parser().parse_args(argv)
    from lightrft.rewards import build_reward
    from lightrft.rewards.service import RewardServer

    config = TrainConfig(reward_timeout_seconds=float(options.timeout_seconds))
    with (
        build_reward(options.reward_fn, config=config) as reward,
        RewardServer(reward, host=options.host, port=options.port) as server,
    ):
        print(f"serving {reward.name} at http://{options.host}:{server.server_port}", flush=True)
        server.serve_forever()
    return ExitCode.OK


def build_parser() -> Parser:
    """The parser of `lightrft serve-reward`."""
    parser = Parser(
        "serve-reward", "Serve a reward function over HTTP, for lightrft train --remote_rm_url."
    )
    parser.add_argument(
        "--reward_fn", nargs="+", required=True, metavar="NAME",
        help="Rewards, summed: boxed_math, gsm8k or FILE.py:FUNCTION.",
    )  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", help="Address. Default: 127.0.0.1.")
    add_number(parser, "--port", "Port; 0 takes a free one.", default=EXAMPLE_PORT, lowest=0)
    text = "Deadline of one call of a reward function."
    add_number(parser, "--timeout_seconds", text, default=120)
    return parser
