"""Environments behind an OpenEnv server, spoken to over one WebSocket an episode.

OpenEnv's own client connects again by itself, and then plays on in a new environment that was
never reset. Here an episode ends with its connection, and before a reward counts the server must
say that it is of this episode and of as many steps as were made.

Wire: https://github.com/meta-pytorch/OpenEnv, `core/env_server/http_server.py`, version 0.10.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit, urlunsplit

from lightrft.rewards.worker import ReportedError
from lightrft.rollout.environments.calls import TURN_TOOL
from lightrft.rollout.environments.worker import Adapted, EpisodeLostError, NoRoomError
from lightrft.tools.rewards.http import (
    HttpClient,
    HttpError,
    HttpLimits,
    HttpRequest,
    finite_numbers,
    parse_json,
)

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

MAX_MESSAGE_BYTES = 1 << 20
CONNECT_SECONDS = 10.0
# Below the deadline of the worker by default, so that it goes on hosting its other episodes.
MESSAGE_SECONDS = 50.0
# Errors after which the episode is where it was before.
_HARMLESS = ("VALIDATION_ERROR", "EXECUTION_ERROR")
_FULL = "CAPACITY_REACHED"
_OWN_FIELDS = ("done", "reward", "metadata")


class ActionRefusedError(ValueError):
    """The server refused an action; the message is told to the model."""


class OpenEnvEpisode(Adapted):
    """One session of a server; the rewards of its steps add up.

    Args:
        address: `ws://HOST:PORT/ws`.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._open = ExitStack()
        self._connection: ClientConnection | None = None
        self._state: tuple[object, int] = (None, 0)

    def reset(self, **row: object) -> str | None:
        """Begins the episode; the row's columns and its seed go to the server."""
        from websockets.sync.client import connect

        try:
            self._connection = self._open.enter_context(
                connect(
                    self._address,
                    open_timeout=CONNECT_SECONDS,
                    max_size=MAX_MESSAGE_BYTES,
                    compression=None,
                    proxy=None,
                )
            )
        except (OSError, TimeoutError, ValueError) as error:
            raise self._lost(f"no connection: {error}") from error
        asked = {**row, "episode_id": uuid.uuid4().hex}
        try:
            first = self._taken(self._ask("reset", asked))
            self._state = self._told_state()
        except ActionRefusedError as error:
            raise self._lost(f"reset: {error}") from error
        return f"\n{first}" if first else None

    def step(self, **action: object) -> str:
        """Makes an action; its observation as JSON.

        Raises:
            ActionRefusedError: The server refuses it; the episode goes on.
            EpisodeLostError: The episode is gone.
        """
        if self.is_done:
            raise ActionRefusedError("the episode has ended")
        answer = self._ask("step", action)
        episode, count = self._state
        self._state = (episode, count + 1)
        return self._taken(answer)

    def get_reward(self) -> float:
        """What no answer has taken along, once the server has said whose the steps are."""
        told = self._told_state()
        if told != self._state:
            (episode, count), (own, made) = told, self._state
            raise self._lost(
                f"the server answers for episode {episode!r} after {count!r} steps: expected "
                f"{own!r} after {made}"
            )
        return super().get_reward()

    def _told_state(self) -> tuple[object, int]:
        """The server's name of the episode, which need not be ours, and its count of steps."""
        state = self._ask("state", None)
        count = state.get("step_count")
        if not isinstance(count, int):
            raise self._lost(f"state has no number of steps: {str(state)[:200]}")
        return state.get("episode_id"), count

    def _taken(self, answer: Mapping[str, object]) -> str:
        """Books reward and end; the observation as text, without what is not for the model."""
        reward = answer.get("reward")
        if reward is not None:
            # OpenEnv pays in truth values, too.
            found = finite_numbers([int(reward) if isinstance(reward, bool) else reward], 1)
            if found is None:
                raise self._lost(f"a reward is {str(reward)[:200]}, expected a number")
            self.paid += found[0]
        self.is_done = answer.get("done") is True
        observation = answer.get("observation")
        shown = observation if isinstance(observation, Mapping) else {}
        shown = {name: value for name, value in shown.items() if name not in _OWN_FIELDS}
        return json.dumps(shown, ensure_ascii=False) if shown else ""

    def _ask(self, kind: str, data: Mapping[str, object] | None) -> Mapping[str, object]:
        """One message and its answer."""
        from websockets.exceptions import ConnectionClosed, WebSocketException

        if self._connection is None:
            raise self._lost("its connection is closed")
        message = {"type": kind} if data is None else {"type": kind, "data": data}
        try:
            with suppress(ConnectionClosed):  # what was said before the end can still be read
                self._connection.send(json.dumps(message, default=str))
            text = self._connection.recv(timeout=MESSAGE_SECONDS)
            answer = cast("Mapping[str, Mapping[str, object]]", parse_json(text))
            found, details = str(answer["type"]), answer["data"]
        except (OSError, TimeoutError, WebSocketException, ValueError, KeyError, TypeError) as err:
            reason = str(err) or type(err).__name__
            raise self._lost(f"{kind} was not answered: {reason}") from err
        is_told = isinstance(details, dict)
        if kind == "reset" and is_told and details.get("code") == _FULL:
            self.close()
            raise NoRoomError(f"OpenEnv at {self._address}: {details.get('message')}")
        if found == "error" and is_told and details.get("code") in _HARMLESS:
            raise ActionRefusedError(str(details.get("message")))
        if found != ("state" if kind == "state" else "observation") or not is_told:
            raise self._lost(f"{kind} was answered by {str(answer)[:200]}")
        return details

    def _lost(self, reason: str) -> EpisodeLostError:
        self.close()
        return EpisodeLostError(f"OpenEnv at {self._address}: {reason}; the episode is lost")

    def close(self) -> None:
        """Closes the connection."""
        self._connection = None
        self._open.close()


def connect(address: str) -> type[Adapted]:
    """A class whose episodes are sessions of the server at `http://HOST:PORT`.

    Raises:
        ReportedError: The address is none, `websockets` is missing, or the server does not say
            what actions it takes.
    """
    parts = urlsplit(address)
    schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
    if parts.scheme not in schemes or not parts.hostname:
        raise ReportedError(f"environment openenv:{address}: expected http://HOST:PORT")
    try:
        import websockets  # noqa: F401 - a clear message now instead of one at the first reset
    except ImportError as error:
        raise ReportedError(
            "environment openenv: the package websockets is missing: install 'lightrft[openenv]'"
        ) from error
    path = parts.path.rstrip("/")
    socket = urlunsplit((schemes[parts.scheme], parts.netloc, f"{path}/ws", "", ""))
    plain = schemes[parts.scheme].replace("ws", "http")
    schema = _step_schema(urlunsplit((plain, parts.netloc, f"{path}/schema", "", "")))

    class Session(OpenEnvEpisode):
        def __init__(self) -> None:
            super().__init__(socket)

        @classmethod
        def schemas(cls) -> list[object]:
            return [schema]

    Session.__name__ = "openenv"
    return Session


def _step_schema(address: str) -> object:
    """The server's schema of actions as that of a tool."""
    client = HttpClient(HttpLimits(CONNECT_SECONDS, max_bytes=MAX_MESSAGE_BYTES))
    try:
        described = parse_json(client.fetch(HttpRequest(address)))
        action = dict(cast("Mapping[str, Mapping[str, object]]", described)["action"])
        properties = dict(cast("Mapping[str, object]", action.get("properties") or {}))
    except (HttpError, ValueError, KeyError, TypeError) as error:
        raise ReportedError(
            f"environment openenv: {address} does not describe its actions: {error}; expected an "
            "OpenEnv server of version 0.10 or later"
        ) from error
    finally:
        client.close()
    properties.pop("metadata", None)
    parameters = {**action, "type": "object", "properties": properties}
    described_as = str(action.get("description") or "Act in the environment.")
    function = {"name": TURN_TOOL, "description": described_as, "parameters": parameters}
    return {"type": "function", "function": function}
