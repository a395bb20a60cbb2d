"""Environments behind an OpenEnv server, with one WebSocket per episode.

OpenEnv's client reconnects by itself, and then continues in a new environment without a reset.
Here an episode ends with its connection. Before a reward counts, the server must name the same
episode as after `reset`, or, if it has no names, report the number of steps that were made.

Wire: https://github.com/meta-pytorch/OpenEnv, `core/env_server/http_server.py`, version 0.10.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit, urlunsplit

from lightrft.rewards.worker import ReportedError
from lightrft.rollout.environments.calls import TURN_TOOL
from lightrft.rollout.environments.worker import Adapted, EnvironmentFullError, EpisodeLostError
from lightrft.tools.rewards.http import (
    ClientRequest,
    HttpClient,
    RequestError,
    RequestLimits,
    finite_numbers,
    parse_json,
)

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

MAX_MESSAGE_BYTES = 1 << 20
CONNECT_SECONDS = 10.0
# Shorter than the worker's default deadline, so that its other episodes go on.
MESSAGE_SECONDS = 50.0
# Pause before a full server is retried.
_ROOM_SECONDS = 0.1
# Errors that leave the episode unchanged.
_HARMLESS = ("VALIDATION_ERROR", "EXECUTION_ERROR")
_FULL = "CAPACITY_REACHED"
# Fields of the action of a server with MCP tools.
_TOOL_FIELDS = {"tool_name", "arguments"}
_LIST_TOOLS = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
_OWN_FIELDS = ("done", "reward", "metadata")


class ActionRefusedError(ValueError):
    """The server refused an action; the model gets the message."""


class OpenEnvEpisode(Adapted):
    """One session of a server; MCP tools are methods with their names.

    Args:
        address: Address `ws://HOST:PORT/ws`.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._open = ExitStack()
        self._connection: ClientConnection | None = None
        self._state: tuple[object, int] = (None, 0)
        self._num_tool_calls = 0

    def _connect(self) -> None:
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

    def reset(self, **row: object) -> str | None:
        """Begin the episode; send the row's columns and its seed to the server."""
        self._connect()
        asked = {**row, "episode_id": uuid.uuid4().hex}
        try:
            first = self._taken(self._ask("reset", asked))
            self._state = self._told_state()
        except ActionRefusedError as error:
            raise self._lost(f"reset: {error}") from error
        return f"\n{first}" if first else None

    def step(self, **action: object) -> str:
        """Perform an action; return its observation as JSON.

        Raises:
            ActionRefusedError: The server refuses it; the episode goes on.
            EpisodeLostError: The episode is lost.
        """
        return self._taken(self._act(action))

    def __getattr__(self, name: str) -> Callable[..., str]:
        if name.startswith("_"):
            raise AttributeError(name)
        return partial(self._use, name)

    def _use(self, tool: str, /, **arguments: object) -> str:
        """Return the result of a tool of MCP, as text."""
        action = {"type": "call_tool", "tool_name": tool, "arguments": arguments}
        answer = self._act(action)
        self._num_tool_calls += 1
        self._taken(answer)
        shown = answer.get("observation")
        observation = shown if isinstance(shown, Mapping) else {}
        error, result = observation.get("error"), observation.get("result")
        if error:
            raise ActionRefusedError(
                str(error.get("message") if isinstance(error, dict) else error)
            )
        return _as_text(result)

    def _act(self, action: Mapping[str, object]) -> Mapping[str, object]:
        if self.is_done:
            raise ActionRefusedError("the episode has ended")
        answer = self._ask("step", action)
        episode, count = self._state
        self._state = (episode, count + 1)
        return answer

    def tools(self) -> list[Mapping[str, object]]:
        """Return the server's MCP tools with `name`, `description` and schema; [] without any.

        Raises:
            EpisodeLostError: The server does not answer.
            EnvironmentFullError: The server has no room for a session.
        """
        self._connect()
        try:
            shown = self._ask("mcp", _LIST_TOOLS).get("result")
        except ActionRefusedError:
            return []
        finally:
            self.close()
        tools = shown.get("tools") if isinstance(shown, Mapping) else None
        return cast("list[Mapping[str, object]]", tools) if isinstance(tools, list) else []

    def get_reward(self) -> float:
        """Return rewards not yet paid, once the server has confirmed the episode."""
        (episode, count), (expected, made) = self._told_state(), self._state
        # Servers count differently, such as legal moves alone, or those of an opponent, too.
        is_counted = bool(expected) or count in (made, made - self._num_tool_calls)
        if episode != expected or not is_counted:
            raise self._lost(
                f"the server answers for episode {episode!r} after {count!r} steps: expected "
                f"{expected!r} after {made}"
            )
        return super().get_reward()

    def _told_state(self) -> tuple[object, int]:
        """Return the server's name of the episode, and its count of steps."""
        state = self._ask("state", None)
        count = state.get("step_count")
        if not isinstance(count, int):
            raise self._lost(f"state has no number of steps: {str(state)[:200]}")
        return state.get("episode_id"), count

    def _taken(self, answer: Mapping[str, object]) -> str:
        """Record reward and end; return the observation as text for the model."""
        reward = answer.get("reward")
        if reward is not None:
            # OpenEnv may pay in booleans.
            numbers = finite_numbers([int(reward) if isinstance(reward, bool) else reward], 1)
            if numbers is None:
                raise self._lost(f"a reward is {str(reward)[:200]}, expected a number")
            self.paid += numbers[0]
        self.is_done = answer.get("done") is True
        observation = answer.get("observation")
        shown = observation if isinstance(observation, Mapping) else {}
        shown = {name: value for name, value in shown.items() if name not in _OWN_FIELDS}
        return json.dumps(shown, ensure_ascii=False) if shown else ""

    def _ask(self, kind: str, data: Mapping[str, object] | None) -> Mapping[str, object]:
        """Send one message; return its answer."""
        from websockets.exceptions import ConnectionClosed, WebSocketException

        if self._connection is None:
            raise self._lost("its connection is closed")
        message = {"type": kind} if data is None else {"type": kind, "data": data}
        try:
            with suppress(ConnectionClosed):  # messages from before the end can still be read
                self._connection.send(json.dumps(message, default=str))
            text = self._connection.recv(timeout=MESSAGE_SECONDS)
            answer = cast("Mapping[str, Mapping[str, object]]", parse_json(text))
            answer_kind, details = str(answer["type"]), answer["data"]
        except (OSError, TimeoutError, WebSocketException, ValueError, KeyError, TypeError) as err:
            reason = str(err) or type(err).__name__
            raise self._lost(f"{kind} was not answered: {reason}") from err
        has_details = isinstance(details, dict)
        if kind in ("reset", "mcp") and has_details and details.get("code") == _FULL:
            self.close()
            raise EnvironmentFullError(f"OpenEnv at {self._address}: {details.get('message')}")
        if answer_kind == "error" and has_details and details.get("code") in _HARMLESS:
            raise ActionRefusedError(str(details.get("message")))
        if answer_kind != (kind if kind in ("state", "mcp") else "observation") or not has_details:
            raise self._lost(f"{kind} was answered by {str(answer)[:200]}")
        return details

    def _lost(self, reason: str) -> EpisodeLostError:
        self.close()
        return EpisodeLostError(f"OpenEnv at {self._address}: {reason}; the episode is lost")

    def close(self) -> None:
        """Close the connection."""
        self._connection = None
        self._open.close()


def connect(address: str) -> type[Adapted]:
    """Return a class whose episodes are sessions of the server at `http://HOST:PORT`.

    Raises:
        ReportedError: The address is invalid, `websockets` is missing, or the server does not
            describe its actions.
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
    step = _step_schema(urlunsplit((plain, parts.netloc, f"{path}/schema", "", "")))

    class Session(OpenEnvEpisode):
        def __init__(self) -> None:
            super().__init__(socket)

        @classmethod
        def schemas(cls) -> list[object]:
            return _shown_tools(socket, step)

    Session.__name__ = "openenv"
    return Session


def _shown_tools(address: str, step: Mapping[str, object]) -> list[object]:
    """Return the tools of an MCP server, or its one action.

    Raises:
        ReportedError: It does not list its tools, or one has an unusable name.
    """
    parameters = cast("Mapping[str, Mapping[str, object]]", step["parameters"])
    names = set(parameters["properties"]) - {"type"}
    if names and not names >= _TOOL_FIELDS:
        return [_function(step)]
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            tools = OpenEnvEpisode(address).tools()
            break
        except EnvironmentFullError as error:
            if time.monotonic() > deadline:
                raise ReportedError(
                    f"environment openenv: its tools are not known: {error}"
                ) from error
            time.sleep(_ROOM_SECONDS)
        except EpisodeLostError as error:
            raise ReportedError(f"environment openenv: its tools are not known: {error}") from error
    return [_function(_as_function(tool)) for tool in tools] or [_function(step)]


def _function(described: Mapping[str, object]) -> object:
    return {"type": "function", "function": described}


def _as_function(tool: Mapping[str, object]) -> Mapping[str, object]:
    """Convert an MCP tool to the schema that chat templates take."""
    name = tool.get("name") if isinstance(tool, Mapping) else None
    if (
        not isinstance(name, str)
        or not name
        or name.startswith("_")
        or hasattr(OpenEnvEpisode, name)
    ):
        raise ReportedError(
            f"environment openenv: a tool has the name {name!r}, by which it cannot be called: "
            "rename it in the server"
        )
    schema = tool.get("input_schema") or tool.get("inputSchema") or {}
    parameters = {"properties": {}, **cast("Mapping[str, object]", schema), "type": "object"}
    description = str(tool.get("description") or f"Call {name}.")
    return {"name": name, "description": description, "parameters": parameters}


def _as_text(result: object) -> str:
    """Return a tool's value, or else its texts."""
    if isinstance(result, Mapping) and result.get("data") is not None:
        result = result["data"]
    elif isinstance(result, Mapping) and isinstance(result.get("content"), Sequence):
        texts = [part.get("text") for part in result["content"] if isinstance(part, Mapping)]
        if all(isinstance(text, str) for text in texts):
            return "\n".join(map(str, texts))
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def _step_schema(address: str) -> Mapping[str, object]:
    """Return the server's schema of actions as that of a function."""
    client = HttpClient(RequestLimits(CONNECT_SECONDS, max_bytes=MAX_MESSAGE_BYTES))
    try:
        described = parse_json(client.fetch(ClientRequest(address)))
        action = dict(cast("Mapping[str, Mapping[str, object]]", described)["action"])
        properties = dict(cast("Mapping[str, object]", action.get("properties") or {}))
    except (RequestError, ValueError, KeyError, TypeError) as error:
        raise ReportedError(
            f"environment openenv: {address} does not describe its actions: {error}; expected an "
            "OpenEnv server of version 0.10 or later"
        ) from error
    finally:
        client.close()
    properties.pop("metadata", None)
    parameters = {**action, "type": "object", "properties": properties}
    described_as = str(action.get("description") or "Act in the environment.")
    return {"name": TURN_TOOL, "description": described_as, "parameters": parameters}
