"""An endpoint whose calls are answered by what a test says."""

import contextlib
import json
import re
import socket
import threading

import httpx
from tests.datasets import chat_families as families
from tests.machine import seconds

from lightrft.datasets.chat_ids import ChatIds
from lightrft.engines.types import Completion, SamplingParams
from lightrft.rollout.agents.conversations import AgentEpisode, Conversations
from lightrft.rollout.agents.endpoint import Endpoint, WaitingCall
from lightrft.rollout.agents.http_server import HttpLimits
from lightrft.rollout.agents.messages import Message
from lightrft.rollout.agents.rounds import AnswerRules, RunSampling, answer_round

TALK = [{"role": "user", "content": "Hello"}]
# What Qwen2.5 writes to add.
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'


def completed(request_id, context, ids, reason="stop"):
    logprobs = (-0.5,) * len(ids)
    return Completion(request_id, 0, context, tuple(ids), logprobs, "temperature", reason)


def answer(talk, turns, text="Yes."):
    """Answer the turns of a call by a text, which its client receives."""
    ids = talk.chat.tokenizer(text, add_special_tokens=False)["input_ids"]
    for turn in turns:
        turn.completion = completed(turn.request_id, turn.context, (*ids, talk.chat.end_of_turn))
        turn.message, turn.is_delivered = Message("assistant", text), True
    talk.answered(turns)
    return turns


class Waiting:
    """A call without a server."""

    is_gone = is_retry = False

    def __init__(self, episode, call):
        self.episode, self.call = episode, call

    def resolve(self, answered):
        assert not isinstance(answered, Exception), answered
        self.turns = answered
        for turn in answered:
            turn.is_delivered = True


class Desk:
    """An endpoint whose calls a thread answers with what a function says."""

    def __init__(self, **limits):
        self.tokenizer = families.family_tokenizer("Qwen2.5")
        self.endpoint = Endpoint(self.tokenizer, HttpLimits(**limits))
        chat = ChatIds(self.tokenizer)
        self.episode = AgentEpisode(0, None, 0, 0, {}, Conversations(chat, 11))
        self.key = self.endpoint.open(self.episode)
        self.sampling = RunSampling(chat.with_end_of_turn(SamplingParams(max_tokens=96, top_k=5)))
        self.rules = AnswerRules(chat, "hermes", self.sampling, max_tokens=400, max_calls=40)
        self.says = "Well said. STOP and more"
        self.asked = []
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self):
        while isinstance(call := self.endpoint.events.get(), WaitingCall):
            answer_round([call], self.rules, self.sample)

    def sample(self, params, requests):
        self.asked += [(params, request) for request in requests]
        ids = self.tokenizer(self.says, add_special_tokens=False)["input_ids"]
        ids = [*ids, self.tokenizer.eos_token_id]
        made = []
        for request in requests:
            own = tuple(ids[: request.max_tokens])
            reason = "stop" if len(own) == len(ids) else "length"
            made.append(completed(request.request_id, request.prompt_token_ids, own, reason))
        return made

    def post(self, body=None, *, path="/v1/chat/completions", key=None, **options):
        body = {"model": "policy", "messages": TALK, **options} if body is None else body
        headers = {"authorization": f"Bearer {key or self.key}"}
        return httpx.post(self.endpoint.server.address + path, json=body, headers=headers)

    def serves(self):
        """Return whether a call is answered; it may be refused while others still end."""
        with contextlib.suppress(httpx.HTTPError):
            return self.post().status_code == 200

    def raw(self, data):
        """Whatever comes back for raw bytes, until the server closes."""
        address, found = ("127.0.0.1", self.endpoint.server.port), b""
        with socket.create_connection(address, timeout=seconds(20)) as line:
            line.sendall(data)
            while not is_whole(found) and (part := line.recv(65536)):
                found += part
        return found

    def close(self):
        self.endpoint.events.put(None)
        self.thread.join()
        self.endpoint.close()


def is_whole(data):
    head, end, body = data.partition(b"\r\n\r\n")
    size = re.search(rb"content-length: (\d+)", head)
    return bool(end and size) and len(body) >= int(size[1])


def body_of(**options):
    return json.dumps({"model": "policy", "messages": TALK, **options}).encode()
