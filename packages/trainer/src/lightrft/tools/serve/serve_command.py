"""`lightrft serve`: a model behind the endpoint that agents are trained at."""

from __future__ import annotations

import os
import queue
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lightrft.cli.errors import ExitCode, UsageError
from lightrft.cli.launch import hide_progress_bars, share_processors
from lightrft.cli.options import Parser
from lightrft.config import TrainConfig
from lightrft.kernels.names import first_line
from lightrft.reporting.files import CONFIG_FILE
from lightrft.reporting.start_bar import end_start_bar
from lightrft.rollout.environments.call_formats import PARSERS
from lightrft.tools.commands import parser_of

if TYPE_CHECKING:
    from lightrft.rollout.agents.conversations import AgentEpisode
    from lightrft.rollout.agents.endpoint import Endpoint, WaitingCall
    from lightrft.tools.serve.chat_model import ServedModel

# Calls that arrive within this time are answered in one batch.
_QUIET_SECONDS = 0.02
# Limit of answers whose histories are reused; beyond it, all are forgotten.
_MAX_KNOWN = 4096


def run(argv: Sequence[str]) -> int:
    """Run the command; see `lightrft serve --help`.

    Raises:
        UsageError: There is no model, or the port is taken.
        ModelLoadError: The model cannot be read.
    """
    args = build_parser().parse_args(argv)
    key = None
    if args.api_key_env is not None:
        key = os.environ.get(args.api_key_env)
        if not key:
            raise UsageError(f"--api_key_env: the environment has no {args.api_key_env}")
    path, config = served(Path(args.model), args.tool_parser, args.chat_template)
    share_processors()
    hide_progress_bars()
    try:
        with Service(path, config, port=args.port, key=key) as service:
            shown = f"the value of {args.api_key_env}" if key else service.key
            print(f"serving {path} at {service.endpoint.base_url}")
            print(f"  model policy, API key {shown}; Ctrl-C ends it", flush=True)
            end_start_bar()
            service.serve()
    except OSError as error:
        if error.errno is None:  # of transformers
            raise UsageError(f"{path}: the model cannot be read: {str(error)[:200]}") from error
        raise UsageError(f"--port {args.port}: {error.strerror}; give another, 0 is any") from error
    except KeyboardInterrupt:
        pass
    return ExitCode.OK


def build_parser() -> Parser:
    """Return the parser of `lightrft serve`."""
    return parser_of("serve", {"--tool_parser": ("auto", *PARSERS)})


def served(
    folder: Path, tool_parser: str | None, chat_template: str | None = None
) -> tuple[Path, TrainConfig]:
    """Return the folder of the model, and the options of its run, or defaults without a run.

    The model's own template is that of the run, with the arguments in it.

    Raises:
        UsageError: The folder has no model.
    """
    config, path = TrainConfig(), folder
    if (folder / CONFIG_FILE).is_file():
        config = TrainConfig.load(folder / CONFIG_FILE)
        path = folder / "model" if (folder / "model").is_dir() else config.model_dir
    if not (path / "config.json").is_file():
        raise UsageError(f"{folder} holds no model: expected a run with one, or a model's folder")
    config = replace(config, chat_template=chat_template, chat_template_args=None)
    return path, config if tool_parser is None else replace(config, tool_parser=tool_parser)


class Service:
    """A model and its endpoint; a context manager that ends both.

    Args:
        path: Folder of the model.
        config: Defaults of sampling.
        port: Port; 0 is any.
        key: API key of clients; None makes one.
    """

    def __init__(self, path: Path, config: TrainConfig, *, port: int, key: str | None) -> None:
        from lightrft.rollout.agents.endpoint import Endpoint
        from lightrft.rollout.agents.http_server import MEDIA_LIMITS
        from lightrft.tools.serve.chat_model import ServedModel

        self.model: ServedModel = ServedModel(path, config)
        self.model.statements.say(print)
        self._episode: AgentEpisode = self.model.chat.episode()
        chat = self.model.chat
        limits = MEDIA_LIMITS if chat.chat_ids.encoder.reads_media else None
        self.endpoint: Endpoint = Endpoint(chat.tokenizer, limits, port=port)
        self.key = self.endpoint.open(self._episode, key)

    def serve(self) -> None:
        """Answer calls until an exception, such as Ctrl-C."""
        while True:
            self.answer(self._gather())

    def answer(self, calls: Sequence[WaitingCall]) -> None:
        """Answer calls in one batch; if it fails, answer each call by itself."""
        from lightrft.rollout.agents.http_server import HttpError
        from lightrft.rollout.agents.rounds import answer_round

        talk = self._episode.talk
        if len(talk.turns) > _MAX_KNOWN or talk.fullness > 0.5:
            self._episode.restart()
            self._episode.known.clear()
            talk.chat.encoder.forget()
        try:
            answer_round(calls, self.model.chat.rules, self.model.sample)
        except Exception as error:  # noqa: BLE001 - one request must not end the server
            if len(calls) > 1:
                for call in calls:
                    self.answer([call])
                return
            print(f"a call failed: {type(error).__name__}: {first_line(error)}", flush=True)
            calls[0].resolve(HttpError(500, "the engine failed", code="internal"))

    def _gather(self) -> list[WaitingCall]:
        from lightrft.rollout.agents.endpoint import WaitingCall

        events = [self.endpoint.events.get()]
        while True:
            try:
                events.append(self.endpoint.events.get(timeout=_QUIET_SECONDS))
            except queue.Empty:
                return [each for each in events if isinstance(each, WaitingCall)]

    def close(self) -> None:
        """End the server and the engine."""
        self.endpoint.close()
        self.model.engine.close()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
