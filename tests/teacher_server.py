"""A teacher on the loopback interface that answers as vLLM does, and may be made to fail."""

import json
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from tests.answering import answering


@dataclass
class Served:
    """What a server answers, and what it was asked.

    Args:
        logits: [tokens] ids -> [tokens, vocab] logits.
        decode: One id -> its text.
        spoil: Changes the entries of an answer, given the number of the question.
        status: Of an answer, given the number of the question.
    """

    logits: Callable[[list[int]], torch.Tensor]
    decode: Callable[[int], str] = str
    spoil: Callable[[list, int], object] = lambda entries, _: entries
    status: Callable[[int], int] = lambda _: 200
    asked: list[dict] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    url: str = ""

    def answer(self, question, number):
        ids, k = question["prompt"], question["prompt_logprobs"]
        logprobs = self.logits(ids).double().log_softmax(-1)
        entries = [None]
        for place in range(1, len(ids)):
            row = logprobs[place - 1]
            chosen = [*row.topk(k).indices.tolist(), ids[place]]
            entries.append(
                {
                    str(i): {"logprob": float(row[i]), "decoded_token": self.decode(i)}
                    for i in dict.fromkeys(chosen)
                }
            )
        return {"choices": [{"index": 0, "prompt_logprobs": self.spoil(entries, number)}]}


@contextmanager
def serving(served):
    def answer(path, headers, body):
        question = json.loads(body)
        with served.lock:
            number = len(served.asked)
            served.asked.append(question)
            served.headers.append(headers)
            status = served.status(number)
            return status, served.answer(question, number) if status == 200 else {"error": "busy"}

    with answering(answer) as url:
        served.url = f"{url}/v1"
        yield served
