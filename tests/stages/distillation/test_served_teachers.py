"""Whole runs with served teachers: the numbers of a local one, and faults that end them."""

from __future__ import annotations

import json

import pytest
import torch
from tests.teacher_server import Served, serving

from lightrft.config import ConfigError, TrainConfig
from lightrft.experience.teachers import TeacherError
from lightrft.models import Actor, load_tokenizer
from lightrft.tools.model_presets import write_tiny_model
from lightrft.trainer import DistillationTrainer


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    for seed, name in enumerate(("student", "teacher"), start=1):
        write_tiny_model(folder / name, "tiny-qwen3", seed=seed)
    return folder


@pytest.fixture(scope="module")
def teacher(models):
    return Actor.from_pretrained(str(models / "teacher"))


@pytest.fixture
def served(models, teacher):
    tokenizer = load_tokenizer(str(models / "student"))

    @torch.no_grad()
    def logits(ids):
        return teacher.pretrained(torch.tensor([ids])).logits[0]

    with serving(Served(logits, decode=lambda i: tokenizer.decode([i]))) as found:
        yield found


def options(models, folder, tmp_path, **changes):
    rows = [{"input": f"say {c}", "prompt": f"say {c}", "completion": c * 4} for c in "aeiou123"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "pretrain": str(models / "student"),
        "teacher": str(models / "teacher"),
        "prompt_data": str(tmp_path / "rows.jsonl"),
        "output_dir": str(tmp_path / folder),
        "train_batch_size": 8,
        "micro_train_batch_size": 4,
        "actor_learning_rate": 2e-3,
        "lr_warmup_ratio": 0.0,
        "num_threads": 1,
        "fsdp": True,
        "teacher_timeout_seconds": 20.0,
        **changes,
    }


SAMPLED = {
    "rollout_batch_size": 8,
    "n_samples_per_prompt": 2,
    "train_batch_size": 16,
    "generate_max_len": 5,
    "max_steps": 2,
}


def run(models, folder, tmp_path, **changes):
    config = TrainConfig(**options(models, folder, tmp_path, **changes))
    return DistillationTrainer(config).train().last_metrics


def test_a_served_teacher_teaches_what_a_local_one_does(models, served, tmp_path):
    found = [
        run(models, name, tmp_path, **SAMPLED, **changes)
        for name, changes in (("local", {}), ("served", {"teacher": served.url}))
    ]
    for name in ("teacher_kl", "policy_loss", "grad_norm", "advantage_abs"):
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-4), name
    # The control: it is not the other teacher that would give the same.
    assert found[0]["teacher_kl"] > 0.1


def test_the_tail_makes_a_divergence_of_all_but_one_token_that_of_all(models, served, tmp_path):
    """With one token left for the tail nothing is lost."""
    size = Actor.from_pretrained(str(models / "student")).config.vocab_size
    base = {"teacher_form": "reverse", "max_epochs": 2}
    found = [
        run(models, name, tmp_path, **base, **changes)
        for name, changes in (
            ("local", {}),
            ("whole", {"teacher": served.url, "teacher_top_k": size - 1}),
            ("coarse", {"teacher": served.url, "teacher_top_k": 3}),
        )
    ]
    for name in ("loss", "grad_norm"):
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-4), name
    assert 0 < found[2]["loss"] < found[0]["loss"]


@pytest.mark.full
@pytest.mark.parametrize("form", ["reverse", "forward", "jsd"])
def test_the_student_moves_to_a_teacher_of_few_tokens(models, served, tmp_path, form):
    changes = {"teacher_form": form, "teacher": served.url, "teacher_top_k": 20, "max_epochs": 25}
    config = TrainConfig(**options(models, "run", tmp_path, lr_scheduler="constant", **changes))
    DistillationTrainer(config).train()
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    losses = [entry["loss"] for entry in map(json.loads, lines) if "loss" in entry]
    assert losses[-1] < 0.3 * losses[0]


def test_a_noisy_server_is_refused_before_anything_is_written(models, served, tmp_path):
    def noisy(entries, number):
        # Whichever of two rounds of questions a text is in: never the same twice.
        shift = 0.01 * number
        for each in entries[1:]:
            for entry in each.values():
                entry["logprob"] -= shift
        return entries

    served.spoil = noisy
    with pytest.raises(ConfigError, match="scores the same tokens otherwise the second time"):
        run(models, "run", tmp_path, **SAMPLED, teacher=served.url)
    assert not (tmp_path / "run").exists()
    run(models, "run", tmp_path, **SAMPLED, teacher=served.url, teacher_tolerance=0.2)


def test_another_tokenizer_is_refused_with_the_first_differing_id(models, served, tmp_path):
    decode = served.decode
    served.decode = lambda i: decode({70: 90, 90: 70}.get(i, i))
    with pytest.raises(ConfigError, match="token 70 is 'F' to the student and 'Z' to http://127"):
        run(models, "run", tmp_path, **SAMPLED, teacher=served.url)
    assert not (tmp_path / "run").exists()


def test_a_server_that_fails_in_the_middle_ends_the_run_by_name(models, served, tmp_path):
    served.spoil = lambda entries, number: entries if number < 30 else None
    with pytest.raises(TeacherError, match=r"teacher http://127\.0\.0\.1:\d+/v1/completions, text"):
        run(
            models,
            "run",
            tmp_path,
            **{**SAMPLED, "max_steps": 9, "num_episodes": 9},
            teacher=served.url,
        )
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert all(abs(json.loads(line).get("teacher_kl", 1.0)) > 0.01 for line in lines)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"temperature": 0.7}, "log-probabilities of a prompt are those of temperature 1: got 0.7"),
        ({"teacher_form": "forward"}, "teacher_top_k: a server does not give the whole"),
        ({"teacher_top_k": 5}, "teacher_top_k and offpolicy_fraction are of the divergences"),
        ({"offpolicy_fraction": 0.5}, "teacher_top_k and offpolicy_fraction are of the"),
        ({"teacher": None, "teachers": ("a",)}, "teachers: got 'a', expected NAME=FOLDER"),
        ({"teacher": None, "teachers": ("a=x", "a=y")}, "teachers: got two of one name in a, a"),
        ({"teachers": ("a=x",)}, "teacher and teachers exclude each other"),
        (
            {"teacher": None, "teachers": ("a=x", "b=y"), "teacher_weights": (1.0,)},
            "teacher_weights: got 1 numbers for 2 teachers",
        ),
        (
            {"teacher": None, "teachers": ("a=x",), "teacher_weights": (-1.0,)},
            "teacher_weights: got",
        ),
        ({"teacher_prompt_column": "hint", "audit_every": 1}, "an audit follows one teacher"),
    ],
)
def test_what_cannot_be_is_refused(models, tmp_path, changes, said):
    given = {"teacher": "http://127.0.0.1:9/v1", **changes}
    with pytest.raises(ConfigError, match=said):
        TrainConfig(**options(models, "run", tmp_path, **{**SAMPLED, **given}))


def test_whole_vocabularies_are_of_folders(models, tmp_path):
    changes = {"teacher_form": "forward", "teacher_top_k": 3}
    with pytest.raises(ConfigError, match="teacher_top_k is of served teachers"):
        TrainConfig(**options(models, "run", tmp_path, **changes))
