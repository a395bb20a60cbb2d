"""`lightrft train` on real questions, with a reward from a user's file, on every engine."""

import math
import os

import pytest
from tests.programs import run_python
from tests.runs import lines, rollout_options, words, write_inputs

pytestmark = pytest.mark.shard("training")

REWARD = """
def score(prompts, responses, labels, **columns):
    return [sum(c.isdigit() for c in r) / max(1, len(r)) for r in responses]
"""
TWO, ZERO2 = {"nproc_per_node": 2}, {"fsdp": False, "zero_stage": 2}
CELLS = [
    pytest.param("hf", {}, id="hf-fsdp2-1"),
    pytest.param("hf", TWO, marks=pytest.mark.slow, id="hf-fsdp2-2"),
    pytest.param("hf", ZERO2, marks=[pytest.mark.slow, pytest.mark.deepspeed], id="hf-zero2-1"),
    pytest.param("hf", ZERO2 | TWO, marks=pytest.mark.deepspeed, id="hf-zero2-2"),
    pytest.param("vllm", {}, marks=pytest.mark.vllm, id="vllm-1"),
    pytest.param("vllm", TWO | {"engine_tp_size": 2}, marks=pytest.mark.vllm, id="vllm-tp2"),
    pytest.param("sglang", {}, marks=pytest.mark.sglang, id="sglang-1"),
    pytest.param("sglang", TWO, marks=pytest.mark.sglang, id="sglang-2"),
]


def run_lightrft(*arguments, timeout_seconds=280.0):
    done = run_python(
        "-m",
        "lightrft.cli.main",
        *map(str, arguments),
        timeout_seconds=timeout_seconds,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        code=0,
    )
    return done.stdout


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "tiny"
    run_lightrft("init-model", directory, "--preset", "tiny-qwen3", "--seed", 0)
    return directory


def saved_model_hash(directory):
    """The model hash of a checkpoint on disk, from its own bytes."""
    import torch
    from transformers import AutoModelForCausalLM

    from lightrft.kernels import hash_tensor
    from lightrft.strategy.weight_sync.verification import model_hash

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model_hash({name: hash_tensor(p.detach()) for name, p in model.named_parameters()})


def steps_of(run):
    rows = lines(run / "metrics.jsonl")
    return [row for row in rows if "grad_norm" in row], rows


@pytest.mark.full
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("engine, placement", CELLS)
def test_three_steps_on_real_questions(engine, placement, tiny_model, test_data, tmp_path):
    run = write_inputs(tmp_path, [], reward=REWARD) / "run"
    options = rollout_options(
        tmp_path,
        pretrain=tiny_model,
        engine_type=engine,
        prompt_data=test_data / "gsm8k/train.jsonl",
        input_key="question",
        label_key="answer",
        apply_chat_template=True,
        max_samples=64,
        prompt_max_len=512,
        generate_max_len=24,
        train_batch_size=8 if engine == "hf" else 16,
        micro_train_batch_size=4,
        micro_rollout_batch_size=8,
        **placement,
    )
    if engine == "hf":
        options |= {
            "eval_data": test_data / "gsm8k/test.jsonl",
            "max_eval_samples": 6,
            "save_steps": 1,
        }
    timeout_seconds = 900 if engine == "sglang" else 280
    command = ["train", *words(options)]
    output = run_lightrft(*command, "--max_steps", 3, "--verbose", timeout_seconds=timeout_seconds)
    # The gate compared the first step, and raises above 1e-4 in the mean.
    assert "parity: engine and trainer logprobs of " in output
    steps, rows = steps_of(run)
    assert [row["weights_version"] for row in steps] == [1, 2, 3]
    assert all(row["reward_std"] > 0 and 0 < row["grad_norm"] < math.inf for row in steps)
    assert all(row["logprob_diff_max"] < 1e-4 for row in steps)
    assert all(row["logprob_pearson"] > 0.999 for row in steps)
    assert len({row["engine_hash"] for row in steps}) == 3
    assert steps[-1]["engine_hash"] == saved_model_hash(run / "model")
    if engine == "hf":
        assert any("eval/reward" in row for row in rows)
    if engine == "hf" and options["fsdp"]:
        check_resume(run, command, steps)


def check_resume(run, command, steps):
    """The same command continues where the third step ended."""
    run_lightrft(*command, "--max_steps", 4, "--load_checkpoint")
    resumed, _ = steps_of(run)
    assert len(resumed) == 4
    assert resumed[:3] == steps
    assert resumed[3]["engine_hash"] == saved_model_hash(run / "model") != steps[-1]["engine_hash"]
