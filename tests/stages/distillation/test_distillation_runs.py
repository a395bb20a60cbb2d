"""Whole runs of distillation: the student moves to the teacher, alike however a step is done."""

from __future__ import annotations

import hashlib
import json
import shutil

import pytest
from tests.ranks import run_multiprocess

from lightrft.config import ConfigError, TrainConfig
from lightrft.run.loop import Loop
from lightrft.tools.model_presets import write_tiny_model
from lightrft.trainer import DistillationTrainer


class Interrupted(Exception):
    """The test ends a run here, in the middle of a step."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distillation")
    for seed, name in enumerate(("student", "teacher"), start=1):
        write_tiny_model(folder / name, "tiny-qwen3", seed=seed)
    return folder


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"input": f"say {c}"}) + "\n" for c in "aeioubcd"))
    return str(path)


def options(models, prompts, folder, **changes):
    return {
        "pretrain": str(models / "student"),
        "teacher": str(models / "teacher"),
        "prompt_data": prompts,
        "output_dir": str(folder),
        "rollout_batch_size": 8,
        "n_samples_per_prompt": 4,
        "train_batch_size": 32,
        "micro_train_batch_size": 16,
        "micro_rollout_batch_size": 16,
        "generate_max_len": 6,
        "actor_learning_rate": 2e-3,
        "lr_scheduler": "constant",
        "lr_warmup_ratio": 0.0,
        "num_threads": 1,
        "fsdp": True,
        **changes,
    }


def steps(folder):
    """Metrics of every step without what a clock says."""
    ignored = ("second", "memory/", "mfu", "tflops")
    return [
        {n: v for n, v in json.loads(line).items() if not any(word in n for word in ignored)}
        for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


def digest(folder):
    return hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()


def test_the_student_moves_to_the_teacher(tmp_path, models, prompts):
    many = {"n_samples_per_prompt": 16, "generate_max_len": 3, "num_episodes": 40}
    many |= {"train_batch_size": 128, "micro_train_batch_size": 128, "lr_scheduler": "linear"}
    many |= {"micro_rollout_batch_size": 128, "actor_learning_rate": 3e-3}
    config = TrainConfig(**options(models, prompts, tmp_path / "run", **many))
    summary = DistillationTrainer(config).train()
    assert summary.verdict.startswith("learned: 40 of 40")
    assert summary.alarms == ()
    distances = [step["teacher_kl"] for step in steps(tmp_path / "run")]
    assert sum(distances[-5:]) < 0.6 * sum(distances[:5])


def test_a_teacher_equal_to_the_student_gives_0(tmp_path, models, prompts):
    same = {"teacher": str(models / "student"), "max_steps": 1}
    config = TrainConfig(**options(models, prompts, tmp_path / "run", **same))
    metrics = DistillationTrainer(config).train().last_metrics
    assert abs(metrics["teacher_kl"]) < 1e-6
    assert metrics["advantage_abs"] < 1e-5
    assert "teacher = student gives 0" in (tmp_path / "run" / "logs" / "rank_0.log").read_text()


def interrupted(config, step):
    """Ends a run in the update of a step; what it has written stays."""
    original = Loop.update

    def update(self, batch, under_way):
        if under_way.number == step:
            raise Interrupted
        return original(self, batch, under_way)

    Loop.update = update
    try:
        DistillationTrainer(config).train()
    except Interrupted:
        pass
    finally:
        Loop.update = original


def test_an_interrupted_run_continues_to_the_bit(tmp_path, models, prompts):
    settings = {"save_steps": 1, "max_steps": 3, "num_episodes": 3}
    whole, parts = (
        TrainConfig(**options(models, prompts, tmp_path / name, **settings))
        for name in ("whole", "parts")
    )
    DistillationTrainer(whole).train()
    interrupted(parts, 3)
    summary = DistillationTrainer(parts).train()
    assert (summary.num_resumed_steps, summary.num_steps) == (2, 3)
    assert steps(tmp_path / "parts") == steps(tmp_path / "whole")
    assert digest(tmp_path / "parts") == digest(tmp_path / "whole")


def in_ranks(rank, world_size, settings):
    from datetime import timedelta

    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=200))
    return DistillationTrainer(TrainConfig(**settings)).train().last_metrics


def compared(metrics):
    names = ("teacher_kl", "policy_loss", "grad_norm", "advantage_abs", "response_length")
    return {name: pytest.approx(metrics[name], rel=1e-4) for name in names}


@pytest.mark.multiprocess
def test_a_step_is_equal_packed_and_padded_on_one_rank_and_on_two(tmp_path, models, prompts):
    """Lengths differ: a quarter of the prompts is much longer."""
    long = "".join(json.dumps({"input": "say " + "abcdef" * (n % 4 // 3)}) + "\n" for n in range(8))
    (tmp_path / "prompts.jsonl").write_text(long)
    base = {"max_steps": 1, "train_batch_size": 16, "micro_train_batch_size": 4}
    found = []
    for name, changes in (
        ("padded", {}),
        ("packed", {"packing_samples": True, "fused_linear_logprob": True}),
    ):
        config = TrainConfig(**options(models, prompts, tmp_path / name, **base, **changes))
        found.append(DistillationTrainer(config).train().last_metrics)
    settings = options(models, prompts, tmp_path / "two", **base)
    found += run_multiprocess(in_ranks, 2, timeout_seconds=300, args=(settings,))
    expected = compared(found[0])
    for metrics in found[1:]:
        assert {name: metrics[name] for name in expected} == expected


def with_two_tokens_exchanged(folder, models):
    shutil.copytree(models / "teacher", folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    first, second = (next(n for n, i in vocab.items() if i == k) for k in (70, 90))
    vocab[first], vocab[second] = 90, 70
    path.write_text(json.dumps(content))
    return first, second


def test_another_tokenizer_is_refused_with_the_first_differing_id(tmp_path, models, prompts):
    first, second = with_two_tokens_exchanged(tmp_path / "other", models)
    config = TrainConfig(
        **options(models, prompts, tmp_path / "run", teacher=str(tmp_path / "other"))
    )
    with pytest.raises(ConfigError, match=f"token 70 is '{first}' in .* and '{second}' in"):
        DistillationTrainer(config).train()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"teacher": None}, "--teacher is missing"),
        ({"advantage_estimator": "rloo"}, "distillation has no advantage but the teacher's"),
        ({"top_p": 0.9}, "teacher needs tokens drawn from the whole distribution"),
        ({"dynamic_sampling": True}, "dynamic_sampling excludes advantage_estimator zero"),
        ({"use_fire": True}, "teacher needs tokens drawn from the whole distribution"),
        ({"teacher_coef": 0.0}, "teacher_coef: got 0.0, expected > 0"),
        ({"teacher_form": "k1_loss"}, "k1 as a loss has no expected gradient"),
        ({"teacher_form": "k3"}, "k3 as a reward has the expected gradient of"),
        ({"teacher_form": "forward_kl_topk"}, "equal for whatever token was sampled"),
        ({"teacher_form": "forwards"}, "teacher_form: got 'forwards'"),
    ],
)
def test_what_has_no_right_gradient_is_refused(models, prompts, tmp_path, changes, said):
    with pytest.raises(ConfigError, match=said):
        DistillationTrainer(TrainConfig(**options(models, prompts, tmp_path / "run", **changes)))
