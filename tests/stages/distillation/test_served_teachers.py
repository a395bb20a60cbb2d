"""Whole runs with served teachers: the numbers of a local one, and faults that end them."""

import pytest
import torch
from tests.runs import steps
from tests.stages.distillation.distillation_world import SAMPLED, run, write_rows
from tests.teacher_server import Served, serving

from lightrft.config import ConfigError
from lightrft.experience.teachers import TeacherError
from lightrft.models import Actor, load_tokenizer


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


@pytest.fixture
def train(models, tmp_path):
    """Carry out a run on rows that are prompts, too; return its last metrics."""
    write_rows(tmp_path)

    def train(name="run", **changes):
        changes = {"teacher_timeout_seconds": 20.0, **changes}
        return run(models, tmp_path, name, **changes).last_metrics

    return train


SAMPLES = {**SAMPLED, "max_steps": 2}


@pytest.mark.full
def test_a_served_teacher_teaches_what_a_local_one_does(train, served):
    local, other = train("local", **SAMPLES), train("served", **SAMPLES, teacher=served.url)
    for name in ("teacher_kl", "policy_loss", "grad_norm", "advantage_abs"):
        assert other[name] == pytest.approx(local[name], rel=1e-4), name
    # The control: it is not the other teacher that would give the same.
    assert local["teacher_kl"] > 0.1


def test_the_tail_makes_a_divergence_of_all_but_one_token_that_of_all(models, train, served):
    """With one token left for the tail nothing is lost."""
    size = Actor.from_pretrained(str(models / "student")).config.vocab_size
    base = {"teacher_form": "reverse", "max_epochs": 2}
    local = train("local", **base)
    whole, coarse = (
        train(f"top {number}", **base, teacher=served.url, teacher_top_k=number)
        for number in (size - 1, 3)
    )
    for name in ("loss", "grad_norm"):
        assert whole[name] == pytest.approx(local[name], rel=1e-4), name
    assert 0 < coarse["loss"] < local["loss"]


def test_a_noisy_server_is_refused_before_anything_is_written(train, served, tmp_path):
    def noisy(entries, number):
        # Whichever of two rounds of questions a text is in: never the same twice.
        shift = 0.01 * number
        for each in entries[1:]:
            for entry in each.values():
                entry["logprob"] -= shift
        return entries

    served.spoil = noisy
    with pytest.raises(ConfigError, match="scores the same tokens otherwise the second time"):
        train(**SAMPLES, teacher=served.url)
    assert not (tmp_path / "run").exists()
    train(**SAMPLES, teacher=served.url, teacher_tolerance=0.2)


def test_another_tokenizer_is_refused_with_the_first_differing_id(train, served, tmp_path):
    decode = served.decode
    served.decode = lambda i: decode({70: 90, 90: 70}.get(i, i))
    with pytest.raises(ConfigError, match="token 70 is 'F' to the student and 'Z' to http://127"):
        train(**SAMPLES, teacher=served.url)
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_a_server_that_fails_in_the_middle_ends_the_run_by_name(train, served, tmp_path):
    served.spoil = lambda entries, number: entries if number < 30 else None
    with pytest.raises(TeacherError, match=r"teacher http://127\.0\.0\.1:\d+/v1/completions, text"):
        train(**{**SAMPLES, "max_steps": 9, "num_episodes": 9}, teacher=served.url)
    assert all(abs(entry.get("teacher_kl", 1.0)) > 0.01 for entry in steps(tmp_path / "run"))
