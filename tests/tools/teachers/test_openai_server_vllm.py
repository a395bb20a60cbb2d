"""The client of a served teacher against the real server of vLLM, on the loopback interface."""

import numpy as np
import pytest
import torch
from tests.runs import row_options, write
from tests.vllm_server import serving_model

from lightrft.config import TrainConfig
from lightrft.models import Actor
from lightrft.tools.model_presets import write_tiny_model
from lightrft.tools.teachers.openai_server import OpenAIServer
from lightrft.trainer import DistillationTrainer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
TEXTS = [list(range(40, 90)), [70, 257, 3], [200, 201, 202, 256, 258]]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    for seed, name in enumerate(("student", "teacher"), start=1):
        write_tiny_model(folder / name, "tiny-qwen3", seed=seed)
    with serving_model(folder / "teacher", "big") as url:
        yield folder, url


def config(url, **changes):
    return TrainConfig(teacher=f"{url}#big", teacher_timeout_seconds=120.0, **changes)


@torch.no_grad()
def test_numbers_are_those_of_a_forward_pass_of_the_same_weights(served):
    folder, url = served
    teacher = Actor.from_pretrained(str(folder / "teacher")).pretrained
    server = OpenAIServer(f"{url}#big", config(url))
    for text, scores in zip(TEXTS, server.score(TEXTS, top_k=5), strict=True):
        logprobs = teacher(torch.tensor([text])).logits[0].log_softmax(-1)
        own = logprobs[:-1].gather(-1, torch.tensor(text[1:])[:, None])[:, 0]
        assert np.abs(scores.logprobs[1:] - own.numpy()).max() < 1e-4
        best = logprobs[:-1].topk(5)
        assert np.abs(scores.top_logprobs[1:] - best.values.numpy()).max() < 1e-4
        assert (scores.top_ids[1:] == best.indices.numpy()).mean() > 0.95
    server.close()


def test_a_run_is_that_of_a_teacher_from_a_folder(served, tmp_path):
    folder, url = served
    rows = write(
        tmp_path / "rows.jsonl", [{"prompt": f"say {c}", "completion": c * 4} for c in "aeiou123"]
    )
    losses = []
    for teacher, top_k in ((str(folder / "teacher"), None), (f"{url}#big", 20)):
        options = row_options(
            folder / "student",
            rows,
            tmp_path / str(top_k),
            teacher=teacher,
            teacher_form="reverse",
            teacher_top_k=top_k,
            train_batch_size=8,
            micro_train_batch_size=4,
            fsdp=True,
            max_steps=1,
        )
        losses.append(DistillationTrainer(TrainConfig(**options)).train().last_metrics["loss"])
    # 20 of 261 tokens: coarser.
    assert 0 < losses[1] < losses[0]
