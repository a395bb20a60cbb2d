"""Whole runs of distillation: the student moves to the teacher, alike however a step is done."""

from __future__ import annotations

import json
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from tests.ranks import run_multiprocess
from tests.runs import continued, in_ranks, steps, tiny_models, write

from lightrft.config import ConfigError, TrainConfig
from lightrft.datasets.types import DataError
from lightrft.tools.rows.row_file import RowRequest, write_rows
from lightrft.trainer import DistillationTrainer


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return tiny_models(tmp_path_factory.mktemp("distillation"), "student", "teacher")


@pytest.fixture
def prompts(tmp_path):
    return write(tmp_path / "prompts.jsonl", ({"input": f"say {c}"} for c in "aeioubcd"))


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


@pytest.mark.full
def test_the_student_moves_to_the_teacher(tmp_path, models, prompts):
    many = {"n_samples_per_prompt": 16, "generate_max_len": 3, "num_episodes": 40}
    many |= {"train_batch_size": 128, "micro_train_batch_size": 128, "lr_scheduler": "linear"}
    many |= {"micro_rollout_batch_size": 128, "actor_learning_rate": 3e-3}
    config = TrainConfig(**options(models, prompts, tmp_path / "run", **many))
    summary = DistillationTrainer(config).train()
    assert summary.verdict.startswith("trained: 40 of 40")
    assert summary.alarms == ()
    distances = [step["teacher_kl"] for step in steps(tmp_path / "run")]
    assert sum(distances[-5:]) < 0.6 * sum(distances[:5])


def test_a_run_without_rewards_shows_none(tmp_path, models, prompts, capsys):
    """A reward of 0 that nobody measured is no reward."""
    shared = {"max_steps": 1, "save_rollouts": True, "save_trajectories": True}
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps({"input": "say z", "label": "#### 2"}) + "\n")
    shared |= {"eval_data": str(held_out), "rollout_batch_size": 4, "train_batch_size": 16}
    for name, changes in (("bare", {}), ("measured", {"reward_fn": ("gsm8k",)})):
        if name == "measured":
            rows = map(json.loads, (tmp_path / "prompts.jsonl").read_text().splitlines())
            lines = [json.dumps({**row, "label": "#### 2"}) + "\n" for row in rows]
            (tmp_path / "prompts.jsonl").write_text("".join(lines))
        folder = tmp_path / name
        config = TrainConfig(**options(models, prompts, folder, **shared, **changes))
        summary = DistillationTrainer(config).train()
        entries = list(map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()))
        said = {name for entry in entries for name in entry if "reward" in name}
        said -= {"reward_seconds", "memory/reward_gb"}
        samples, rollouts, trajectories = (
            json.loads((folder / f"{each}.jsonl").read_text().splitlines()[0])
            for each in ("samples", "rollouts", "trajectories")
        )
        console = capsys.readouterr().out
        if name == "bare":
            assert said == set()
            assert not any("constant_group_share" in entry for entry in entries)
            assert "reward" not in samples
            assert "reward" not in trajectories
            assert rollouts["reward"] is rollouts["accuracy"] is None
            assert "teacher KL" in console
            assert "reward" not in summary.verdict
            with pytest.raises(DataError, match="the run measured no rewards, and rows are chosen"):
                request = RowRequest(folder, "sft", "right", threshold=1.0, max_per_prompt=None)
                write_rows(request, tmp_path / "rows.jsonl")
        else:  # the control
            assert "reward" in said
            assert "eval/reward" in said
            assert samples["reward"] == trajectories["reward"] == rollouts["reward"] == 0.0


def test_a_teacher_equal_to_the_student_gives_0(tmp_path, models, prompts):
    same = {"teacher": str(models / "student"), "max_steps": 1}
    config = TrainConfig(**options(models, prompts, tmp_path / "run", **same))
    metrics = DistillationTrainer(config).train().last_metrics
    assert abs(metrics["teacher_kl"]) < 1e-6
    assert metrics["advantage_abs"] < 1e-5
    assert "teacher = student gives 0" in (tmp_path / "run" / "logs" / "rank_0.log").read_text()


@pytest.mark.full
def test_an_interrupted_run_continues_to_the_bit(tmp_path, models, prompts):
    settings = partial(options, models, prompts, save_steps=1, max_steps=3, num_episodes=3)
    summary = continued(DistillationTrainer, tmp_path, settings, 3)
    assert (summary.num_resumed_steps, summary.num_steps) == (2, 3)


PADDED = {"fsdp": True, "micro_train_batch_size": 4}
PACKED = {"packing_samples": True, "fused_linear_logprob": True}
ADAPTERS = {"lora_rank": 2, "target_modules": ("q_proj", "down_proj")}
ALONE = (PADDED, {**PADDED, **PACKED}, {**PADDED, "micro_train_batch_size": 16}, ADAPTERS)
TWO = (
    PADDED,
    {**PADDED, **PACKED, "sp_size": 2},
    {"fsdp": False, "zero_stage": 2, "micro_train_batch_size": 2},
    {**PADDED, **PACKED, **ADAPTERS},
)


def trained(models, summary):
    """How far a run has moved the weights, one after the other."""
    before, after = (
        load_file(f"{folder}/model.safetensors")
        for folder in (models / "student", summary["model_dir"])
    )
    return torch.cat([(after[n].double() - before[n].double()).flatten() for n in before])


@pytest.mark.full
@pytest.mark.multiprocess
@pytest.mark.deepspeed
def test_a_step_is_equal_in_every_layout_on_one_rank_and_on_two(tmp_path, models):
    """Lengths differ: a quarter of the prompts is much longer."""
    rows = [{"input": "say " + "abcdef" * (n % 4 // 3)} for n in range(8)]
    prompts = write(tmp_path / "prompts.jsonl", rows)
    base = {"max_steps": 1, "train_batch_size": 16}
    found = []
    for world_size, ways in ((1, ALONE), (2, TWO)):
        runs = [
            options(models, prompts, tmp_path / f"{world_size}_{n}", **base, **way)
            for n, way in enumerate(ways)
        ]
        args = ("DistillationTrainer", runs)
        ranks = run_multiprocess(in_ranks, world_size, timeout_seconds=500, args=args)
        found += zip(ways, ranks[0], strict=True)
    names = ("teacher_kl", "policy_loss", "grad_norm", "advantage_abs", "response_length")
    for has_adapters in (False, True):
        plain, *others = [each for way, each in found if ("lora_rank" in way) == has_adapters]
        expected = {n: pytest.approx(plain["last_metrics"][n], rel=1e-4) for n in names}
        moved = trained(models, plain)
        assert len(others) == (1 if has_adapters else 5)
        assert moved.norm() > 1e-2
        for other in others:
            assert {name: other["last_metrics"][name] for name in names} == expected
            assert (trained(models, other) - moved).norm() <= 1e-3 * moved.norm()


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
