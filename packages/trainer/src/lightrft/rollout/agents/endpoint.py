"""Endpoint of a rank: episodes by their API keys, and calls that wait for the engine."""

from __future__ import annotations

import asyncio
import hashlib
import json
import queue
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lightrft.rollout.agents.anthropic_api import read_messages, reply_message
from lightrft.rollout.agents.conversations import AgentEpisode, CalledTurn
from lightrft.rollout.agents.http_server import (
    LOOPBACK,
    HttpError,
    HttpLimits,
    HttpRequest,
    HttpResponse,
    HttpServer,
)
from lightrft.rollout.agents.messages import (
    ChatCall,
    Json,
    read_chat,
    read_json,
    read_text,
)
from lightrft.rollout.agents.replies import reply
from lightrft.rollout.agents.responses_api import read_response, reply_response

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODEL_NAME = "policy"
Reply = Callable[[ChatCall, Sequence[CalledTurn], str, "PreTrainedTokenizerBase"], HttpResponse]
# Parser and answer function of each path.
_CALLS: Mapping[str, tuple[Callable[[Json], ChatCall], Reply]] = {
    "/v1/chat/completions": (read_chat, reply),
    "/v1/completions": (read_text, reply),
    "/v1/responses": (read_response, reply_response),
    "/v1/messages": (read_messages, reply_message),
}
_MODELS = "/v1/models"
# Number of keys of past episodes to remember, so that late calls get the right error.
_MAX_OVER = 100_000


@dataclass(slots=True, eq=False)
class WaitingCall:
    """A call that waits for its answer.

    Args:
        episode: Episode that the call belongs to.
        call: The request.
        is_retry: Whether the client marks the call as a retry.
        future: Future in the server's loop that receives the turns.
    """

    episode: AgentEpisode
    call: ChatCall
    is_retry: bool
    future: asyncio.Future[Sequence[CalledTurn]]

    @property
    def is_gone(self) -> bool:
        """Return whether nobody waits for the answer any more."""
        return self.future.done()

    def resolve(self, found: Sequence[CalledTurn] | HttpError) -> None:
        """Set the answer, from any thread."""

        def settle() -> None:
            if self.future.done():
                return
            if isinstance(found, HttpError):
                self.future.set_exception(found)
            else:
                self.future.set_result(found)

        self.future.get_loop().call_soon_threadsafe(settle)


class Endpoint:
    """An OpenAI-compatible server whose calls another thread answers; a context manager.

    Args:
        tokenizer: Decoder of tokens.
        limits: Limits of requests.
        port: Port to listen on; 0 takes a free one.
        model_names: Accepted names of the model; the first one is listed.

    Attributes:
        events: Queue of waiting calls, from which the answering thread takes them.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        limits: HttpLimits | None = None,
        *,
        port: int = 0,
        model_names: Sequence[str] = (MODEL_NAME,),
    ) -> None:
        self._tokenizer, self._names = tokenizer, tuple(model_names)
        self._episodes: dict[bytes, AgentEpisode] = {}
        self._over: dict[bytes, None] = {}
        self._waiting: set[WaitingCall] = set()
        self.events: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._hosts: tuple[str, ...] = ()
        self.server = HttpServer(self._handle, limits, port=port, check=self._check)
        self._hosts = tuple(f"{name}:{self.server.port}" for name in (LOOPBACK, "localhost"))

    @property
    def base_url(self) -> str:
        """Base URL for clients."""
        return f"{self.server.address}/v1"

    def open(self, episode: AgentEpisode, key: str | None = None) -> str:
        """Open an episode and return its key, a random one by default."""
        key = key or f"sk-{secrets.token_urlsafe(32)}"
        self._episodes[_digest(key)] = episode
        return key

    def close_key(self, key: str) -> None:
        """End an episode: refuse its waiting calls and all further ones."""
        digest = _digest(key)
        episode = self._episodes.pop(digest, None)
        self._over[digest] = None
        while len(self._over) > _MAX_OVER:
            self._over.pop(next(iter(self._over)))
        if episode is not None:
            episode.is_open = False
            for waiting in self._waiting.copy():
                if waiting.episode is episode:
                    waiting.resolve(_over())

    def close(self) -> None:
        """Close the server; calling it twice is allowed."""
        self.server.close()

    async def _handle(self, request: HttpRequest) -> HttpResponse:
        if request.path == _MODELS:
            request.require("GET")
            model = {"id": self._names[0], "object": "model", "created": 0, "owned_by": "lightrft"}
            return HttpResponse(200, json.dumps({"object": "list", "data": [model]}).encode())
        if request.path not in _CALLS:
            known = ", ".join((*_CALLS, _MODELS))
            raise HttpError(404, f"no such path: there are {known}", code="not_found")
        request.require("POST")
        request.require_json()
        body = read_json(request.body)
        if body.get("model") not in self._names:
            raise HttpError(
                404, f"the model must be {' or '.join(self._names)}", code="model_not_found"
            )
        read, write = _CALLS[request.path]
        call, episode = read(body), self._episode(request.headers)
        turns = await self._turns(episode, call, request)
        response = write(call, turns, self._names[0], self._tokenizer)

        delivered = [turn.is_delivered for turn in turns]

        def on_sent(is_sent: bool) -> None:
            if not episode.is_open:
                return  # the episode's rows are already final
            for turn, before in zip(turns, delivered, strict=True):
                turn.is_delivered = is_sent or before

        return replace(response, on_sent=on_sent)

    async def _turns(
        self, episode: AgentEpisode, call: ChatCall, request: HttpRequest
    ) -> Sequence[CalledTurn]:
        """Wait for the answering thread; a client that disconnects cancels the wait."""
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        future = asyncio.get_running_loop().create_future()
        waiting = WaitingCall(episode, call, is_retry, future)
        self._waiting.add(waiting)
        self.events.put(waiting)
        try:
            return await waiting.future
        finally:
            self._waiting.discard(waiting)

    def _check(self, head: HttpRequest) -> None:
        """Refuse a request for another server, or without a key of an open episode."""
        # A web page of another site cannot send this host: browsers send the site's host.
        if head.headers.get("host") not in self._hosts:
            raise HttpError(421, "the header host names another server", code="wrong_host")
        self._episode(head.headers)

    def _episode(self, headers: Mapping[str, str]) -> AgentEpisode:
        """Return the episode of a request's key."""
        # Anthropic's clients send the key in another header.
        authorization = headers.get("authorization", f"Bearer {headers.get('x-api-key', '')}")
        scheme, _, key = authorization.partition(" ")
        # Look up digests, so that the lookup time reveals nothing about a key.
        digest = _digest(key.strip())
        episode = self._episodes.get(digest)
        if scheme.lower() == "bearer" and episode is not None and episode.is_open:
            return episode
        if digest in self._over:
            raise _over()
        raise HttpError(401, "the API key is none of an episode", code="invalid_api_key")


def _over() -> HttpError:
    return HttpError(409, "the episode of this key is over", code="episode_over")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()
