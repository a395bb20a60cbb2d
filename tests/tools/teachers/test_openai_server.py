"""The client of a served teacher: numbers as the server has them, and every fault one line."""

import math

import pytest
import torch
from tests.teacher_server import Served, serving

from lightrft.config import ConfigError, TrainConfig
from lightrft.experience.teachers import TeacherError
from lightrft.tools.teachers.openai_server import OpenAIServer

VOCAB = 11
TEXTS = [[1, 5, 2, 9], [3, 3], [10, 0, 4, 4, 4, 7]]


def logits(ids):
    """A toy model: what follows depends on the sum of what came before."""
    sums = torch.tensor(ids).cumsum(0)
    return torch.sin(torch.outer(sums + 1.0, torch.arange(1, VOCAB + 1.0)).double())


def config(**changes):
    return TrainConfig(teacher="http://unused", teacher_timeout_seconds=5.0, **changes)


@pytest.fixture
def served():
    with serving(Served(logits, decode=lambda i: f"<{i}>")) as found:
        yield found


def test_numbers_are_those_of_the_model_and_the_key_is_sent(served, monkeypatch):
    monkeypatch.setenv("LIGHTRFT_TEACHER_KEY", "sesame-open-wide")
    server = OpenAIServer(f"{served.url}#big", config())
    found = server.score(TEXTS, top_k=3)
    server.close()
    for text, scores in zip(TEXTS, found, strict=True):
        logprobs = logits(text).log_softmax(-1)
        assert scores.logprobs[0] == 0
        for place in range(1, len(text)):
            row = logprobs[place - 1]
            assert scores.logprobs[place] == pytest.approx(float(row[text[place]]), abs=1e-6)
            assert scores.top_ids[place].tolist() == row.topk(3).indices.tolist()
            assert scores.top_logprobs[place].tolist() == pytest.approx(
                row.topk(3).values.tolist(), abs=1e-6
            )
    assert {question["model"] for question in served.asked} == {"big"}
    assert {each["authorization"] for each in served.headers} == {"Bearer sesame-open-wide"}


def test_each_token_has_its_text(served):
    server = OpenAIServer(served.url, config())
    assert server.token_texts(range(VOCAB)) == [f"<{i}>" for i in range(VOCAB)]
    server.close()


def without(entries, place):
    return [each for i, each in enumerate(entries) if i != place]


def changed(entries, place, entry):
    return [entry if i == place else each for i, each in enumerate(entries)]


# Name -> what becomes of the entries of [1, 5, 2, 9], and what is said.
FAULTS = {
    "none": (lambda e: None, "has no prompt_logprobs"),
    "one less": (lambda e: without(e, 2), "has 3 prompt_logprobs, some of them empty, for 4"),
    "null": (lambda e: changed(e, 3, None), "some of them empty"),
    "another token": (lambda e: changed(e, 2, {"7": {"logprob": -1.0}}), "token 2 is 2, and the"),
    "no number": (lambda e: changed(e, 1, {"5": {"rank": 1}}), "logprob is None, expected"),
    "a truth": (lambda e: changed(e, 1, {"5": {"logprob": True}}), "logprob is True"),
    "positive": (lambda e: changed(e, 1, {"5": {"logprob": 0.5}}), "logprob is 0.5, expected a"),
    "impossible": (lambda e: changed(e, 1, {"5": {"logprob": -9999.0}}), "probability 0"),
    "nan": (lambda e: changed(e, 1, {"5": {"logprob": math.nan}}), "NaN is no number of JSON"),
    "no id": (lambda e: changed(e, 1, {"five": {"logprob": -1.0}}), "'five' is no token id"),
    "shifted": (lambda e: [None, *e[2:], e[1]], "and the answer does not score it"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_answer_names_the_server_and_is_never_a_number(served, name):
    change, said = FAULTS[name]
    served.spoil = lambda entries, _: change(entries)
    server = OpenAIServer(served.url, config())
    with pytest.raises(TeacherError, match=r"teacher http://127\.0\.0\.1") as caught:
        server.score([TEXTS[0]])
    server.close()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_busy_server_is_asked_again_and_a_dead_one_is_named(served):
    served.status = lambda number: 503 if number < 2 else 200
    server = OpenAIServer(served.url, config())
    assert len(server.score([TEXTS[0]])) == 1
    assert len(served.asked) == 3
    server.close()
    served.status = lambda _: 503
    server = OpenAIServer(served.url, config().replaced({"teacher_timeout_seconds": 0.6}))
    with pytest.raises(TeacherError, match=r"gave no answer within 0\.6 s"):
        server.score([TEXTS[0]])
    server.close()


def test_a_refusal_is_passed_on_at_once(served):
    served.status = lambda _: 404
    server = OpenAIServer(served.url, config())
    with pytest.raises(TeacherError, match="status 404"):
        server.score([TEXTS[0]])
    server.close()
    assert len(served.asked) == 1


def test_too_few_alternatives_are_refused(served):
    served.spoil = lambda entries, _: [
        None,
        *({k: e[k] for k in list(e)[-1:]} for e in entries[1:]),
    ]
    server = OpenAIServer(served.url, config())
    with pytest.raises(TeacherError, match="expected teacher_top_k = 3"):
        server.score([TEXTS[0]], top_k=3)
    server.close()


def test_a_wrong_address_is_refused():
    with pytest.raises(ConfigError, match="teacher"):
        OpenAIServer("http://", config())
