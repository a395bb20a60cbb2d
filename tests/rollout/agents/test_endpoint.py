"""The endpoint as clients see it: its protocol, what it refuses, and hostile requests."""

import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from tests.datasets import chat_families as families
from tests.machine import wait_until
from tests.rollout.agents.endpoint_desk import CALL, TALK, body_of, completed
from tests.rollout.test_call_formats import TURNS, WRITTEN
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from lightrft.datasets.chat_ids import ChatIds
from lightrft.engines.types import SamplingParams
from lightrft.rollout.agents.conversations import template_calls, template_messages
from lightrft.rollout.agents.messages import CallOptions, ChatCall, Message, SpokenCall
from lightrft.rollout.agents.replies import reply
from lightrft.rollout.agents.rounds import AnswerRules, RunSampling
from lightrft.tools.model_presets import byte_level_core


def test_a_chat_completion_has_the_fields_of_the_protocol(desk):
    desk.says = "Well said."
    answer = desk.post(logprobs=True).json()
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "policy"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Well said."}
    assert choice["finish_reason"] == "stop"
    ids = desk.tokenizer("Well said.", add_special_tokens=False)["input_ids"]
    assert len(choice["logprobs"]["content"]) == len(ids) + 1
    assert "".join(t["token"] for t in choice["logprobs"]["content"]) == "Well said.<|im_end|>"
    prompt = len(desk.asked[0][1].prompt_token_ids)
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": len(ids) + 1,
        "total_tokens": prompt + len(ids) + 1,
    }
    models = httpx.get(
        f"{desk.endpoint.base_url}/models", headers={"authorization": f"Bearer {desk.key}"}
    )
    assert [model["id"] for model in models.json()["data"]] == ["policy"]


def test_options_have_their_effect(desk):
    answer = desk.post(stop=["STOP"]).json()["choices"][0]
    assert answer["message"]["content"] == "Well said. "
    assert desk.asked[-1][0].stop == ("STOP",)
    cut = desk.post(max_completion_tokens=2).json()["choices"][0]
    assert cut["finish_reason"] == "length"
    assert desk.asked[-1][1].max_tokens == 2
    many = desk.post(n=3, messages=[{"role": "user", "content": "Other"}]).json()
    assert [choice["index"] for choice in many["choices"]] == [0, 1, 2]
    assert len({request.request_id for _, request in desk.asked[-3:]}) == 3
    text = desk.post(
        {"model": "policy", "prompt": "Once <|im_end|>", "logprobs": 0}, path="/v1/completions"
    )
    assert text.json()["choices"][0]["text"] == desk.says
    assert len(text.json()["choices"][0]["logprobs"]["tokens"]) > 2
    shown = desk.asked[-1][1].prompt_token_ids
    assert desk.tokenizer.eos_token_id not in shown


def test_options_of_the_run_win_and_the_difference_is_noted(desk):
    assert desk.post(temperature=0.2, top_k=5, seed=7).status_code == 200
    assert desk.asked[-1][0].temperature == 1.0
    assert desk.sampling.differences == {
        "temperature": "temperature 1 instead of 0.2",
    }


# By the path of a protocol: a request, and what is changed of it with what is then named.
REFUSED = json.loads(Path(__file__).with_name("refused_requests.json").read_text("utf-8"))


@pytest.mark.parametrize("path", REFUSED)
def test_what_is_not_supported_is_refused_by_name(desk, path):
    for changed, named in REFUSED[path]["changes"]:
        body = {"model": "policy", **REFUSED[path]["request"], **changed}
        answer = desk.post(body, path=path)
        assert answer.status_code == 400, changed
        body = answer.json()
        assert named in body["error"]["message"], changed
        assert "\n" not in body["error"]["message"]
        if path == "/v1/messages":
            assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert not desk.asked


def test_histories_without_room_and_calls_beyond_the_bound_are_refused(desk):
    long = [{"role": "user", "content": "word " * 400}]
    answer = desk.post(messages=long)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    desk.episode.num_calls = 40
    assert desk.post().status_code == 403


def test_keys_and_models(desk):
    assert desk.post({"model": "gpt", "messages": TALK}).status_code == 404
    desk.endpoint.close_key(desk.key)
    late = desk.post()
    # Clients of OpenAI would retry a 409.
    assert (late.status_code, late.headers["x-should-retry"]) == (409, "false")


# Statuses and heads of requests that no client sends, their lines apart by bars. A name in braces
# stands for a line of a right request; the key follows, unless there is another.
HOSTILE_HEADS = """
421 POST /v1/chat/completions | host: evil.example | {sized} | {json}
400 POST /v1/chat/completions | {sized} | {json}
421 POST /v1/chat/completions | host: evil.example:{port} | {sized} | {json}
400 POST /v1/chat/completions | {host} | {host} | {sized} | {json}
405 GET /v1/chat/completions | {host}
405 PUT /v1/chat/completions | {host} | {sized} | {json}
404 CONNECT example.org:80 | {host}
404 TRACE / | {host}
404 POST http://evil.example/v1/models | {host} | {sized} | {json}
404 GET /v1/../../etc/passwd | {host}
404 GET /v1/%2e%2e/%2e%2e/etc/passwd | {host}
404 GET /v1/models%00 | {host}
400 POST /v1/chat/completions | {host} | {sized} | transfer-encoding: chunked | {json}
400 POST /v1/chat/completions | {host} | {sized} | content-length: 3 | {json}
400 POST /v1/chat/completions | {host} | content-length: -5 | {json}
408 POST /v1/chat/completions | {host} | content-length: 5000 | {json}
413 POST /v1/chat/completions | {host} | content-length: 99999999999 | {json}
400 POST /v1/chat/completions | {host} | content-length: {nines} | {json}
400 POST /v1/chat/completions | {host} | content-length: \xb2 | {json}
408 POST /v1/chat/completions | {host} | transfer-encoding: chunked | {json}
431 POST /v1/chat/completions | {host} | x: {long} | {sized} | {json}
431 POST /v1/chat/completions | x: {long}
400 POST /v1/chat/completions | {host} | x: a | \tb | x2 : c | {sized} | {json}
415 POST /v1/chat/completions | {host} | {sized} | {json} | content-encoding: gzip
415 POST /v1/chat/completions | {host} | {sized} | content-type: application/x-www-form-urlencoded
415 POST /v1/chat/completions | {host} | {sized} | content-type: text/plain
401 POST /v1/chat/completions | {host} | {sized} | {json} | authorization: Bearer sk-\xe9\xff
401 POST /v1/chat/completions | {host} | {sized} | {json} | authorization: Bearer sk-wrong
401 POST /v1/chat/completions | {host} | {sized} | {json} | authorization: Bearer
"""
HOSTILE_BODIES = (
    b"{[}",
    b"[" * 5000 + b"]" * 5000,
    b'{"model": "policy", "messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"model": "policy", "temperature": NaN, "messages": []}',
)


def hostile(port, key):
    """Requests that no client of this server sends, by their statuses."""

    def request(head, body):
        status, _, head = head.format(
            port=port,
            host=f"host: 127.0.0.1:{port}",
            json="content-type: application/json",
            sized=f"content-length: {len(body)}",
            long="y" * 10_000,
            nines="9" * 100,
        ).partition(" ")
        lines = head.split(" | ")
        if "authorization" not in head:
            lines.append(f"authorization: Bearer {key}")
        text = "\r\n".join([f"{lines[0]} HTTP/1.1", *lines[1:], "", ""])
        return status, text.encode("latin-1") + body

    right = "POST /v1/chat/completions | {host} | {json} | "
    chunks = (b"1000\r\n" + b"x" * 4096 + b"\r\n") * 10
    return [
        *(request(head, body_of()) for head in HOSTILE_HEADS.strip("\n").split("\n")),
        *(request(f"400 {right}{{sized}}", body) for body in HOSTILE_BODIES),
        request(f"413 {right}transfer-encoding: chunked", chunks),
        ("408", f"POST / HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nx: y".encode()),
        ("400", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20),
        ("404", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    ]


def test_hostile_requests_are_answered_by_their_errors(desk, capfd, caplog):
    cases = hostile(desk.endpoint.server.port, desk.key)
    assert len(cases) == 37
    for status, request in cases:
        answer = desk.raw(request)
        assert re.findall(r"HTTP/1.1 (\d+)", answer.decode()) == [status], request
        assert desk.key.encode() not in answer, request
    assert not desk.asked
    assert desk.post().status_code == 200  # it still serves
    told = "".join(capfd.readouterr()) + caplog.text
    assert desk.key not in told
    assert "Hello" not in told


def test_connections_are_bounded_and_idle_ones_hold_nobody_up(desk):
    port = desk.endpoint.server.port
    lines = [socket.create_connection(("127.0.0.1", port)) for _ in range(80)]
    for line in lines[:60]:
        line.sendall(b"POST /v1/chat")
    for line in lines:
        line.close()
    assert wait_until(desk.serves)


@pytest.mark.full
def test_many_calls_at_once_are_all_answered(desk):
    def ask(number):
        talk = [{"role": "user", "content": f"Number {number}"}]
        return desk.post(messages=talk).status_code

    with ThreadPoolExecutor(32) as threads:
        assert [*threads.map(ask, range(32))] == [200] * 32
    assert len({request.prompt_token_ids for _, request in desk.asked}) == 32


SAID_BEFORE_CALLS = [
    ("hermes", ["<tool_call>", "</tool_call>"], "Let me see."),
    ("hermes", [], "<think>A <tool_call> then?</think>Let me see."),
    ("mistral", ["[TOOL_CALLS]"], "Let me see."),
    ("auto", ["<TOOLCALL>"], "Let me see."),
]
FORMS = {"hermes": "<tool_call>{}</tool_call>", "auto": "<TOOLCALL>[{}]</TOOLCALL>"}


def bytes_and(special):
    core = byte_level_core()
    core.add_special_tokens(special)
    return PreTrainedTokenizerFast(tokenizer_object=core)


@pytest.mark.parametrize("parser, special, said", SAID_BEFORE_CALLS)
def test_what_is_said_before_a_call_is_told_whatever_its_marks_are(parser, special, said):
    tokenizer = bytes_and(special)
    call = CALL.splitlines()[1]
    if parser == "auto":
        tokenizer.chat_template = TURNS % WRITTEN["Nemotron"]
    form = FORMS.get(parser, "[TOOL_CALLS][{}]")
    ids = tuple(tokenizer.encode(said + form.format(call), add_special_tokens=False))
    made = completed(0, (1,), ids)
    tools = ({"type": "function", "function": {"name": "add"}},)
    asked = ChatCall((), None, tools, CallOptions())
    turn = SimpleNamespace(call=asked, context=(1,), request_id=0, sampled=made)
    sampling = RunSampling(SamplingParams())
    chat = SimpleNamespace(tokenizer=tokenizer, stop_ids=())
    AnswerRules(chat, parser, sampling, max_tokens=9).finish(turn, made)
    assert turn.message.text == said
    assert [call.name for call in turn.message.calls] == ["add"]


def test_an_id_that_the_template_refuses_is_replaced():
    chat, tools = ChatIds(families.family_tokenizer("Mistral")), [{"name": "add"}]
    rules = AnswerRules(chat, "mistral", RunSampling(SamplingParams()), max_tokens=9)
    for written, is_kept in (("abcdefghi", True), ("abc", False)):
        called = {"name": "add", "arguments": {}, "id": written}
        made = completed(0, (1,), chat.encode_text(f"[TOOL_CALLS] {json.dumps([called])}"))
        asked = ChatCall((), None, tools, CallOptions())
        turn = SimpleNamespace(call=asked, context=(1,), request_id=0, sampled=made)
        rules.finish(turn, made)
        (call,) = turn.message.calls
        assert (call.id == written) is is_kept
        result = {"role": "tool", "content": "ok", "tool_call_id": call.id}
        suffix = chat.suffix(made.output_token_ids, template_calls([call]), [result])
        assert call.id in chat.tokenizer.decode(suffix.token_ids)


def test_a_result_names_the_latest_tool_with_its_id():
    calls = [(SpokenCall("c", name, "{}"),) for name in ("add", "sub")]
    talk = [Message("assistant", "", calls[0]), Message("tool", "1", call_id="c")]
    talk += [Message("assistant", "", calls[1]), Message("tool", "2", call_id="c")]
    shown = template_messages(talk)
    assert [shown[1]["name"], shown[3]["name"]] == ["add", "sub"]


def test_logprobs_show_tokens_where_they_stand_and_the_bytes_of_parts_of_characters():
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581Hello", "\u2581you"]
    model = models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True)
    core = Tokenizer(model)
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    fallback = PreTrainedTokenizerFast(tokenizer_object=core)
    byte_level = bytes_and([])
    smile = "\N{GRINNING FACE}"
    for tokenizer, ids, texts in (
        (fallback, [257, 258, *(byte + 1 for byte in smile.encode())], ["Hello", " you"]),
        (byte_level, byte_level.encode(f"a {smile}"), ["a", " "]),
    ):
        made = completed(0, (1,), ids)
        call = ChatCall((), None, (), CallOptions(wants_logprobs=True))
        turn = SimpleNamespace(
            sampled=made, request_id=0, context=(1,), message=Message("assistant", "")
        )
        (choice,) = json.loads(reply(call, [turn], "policy", tokenizer).body)["choices"]
        told = choice["logprobs"]["content"]
        assert [each["token"] for each in told[:2]] == texts
        whole = bytes(byte for each in told for byte in each["bytes"])
        assert whole.decode() == tokenizer.decode(ids)
