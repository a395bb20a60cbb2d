"""Runs of several processes from configuration to the command line of the audit."""

from __future__ import annotations

import itertools
import json
import shutil

import pytest
from tests.runs import rollout_options, say_rows, train_on_ranks, write_inputs

from lightrft.cli.errors import ExitCode
from lightrft.cli.main import main
from lightrft.tools.audit.findings import DIFFERS
from lightrft.tools.audit.record import FACTS, recorded_steps, seal, step_folder
from lightrft.tools.model_presets import write_tiny_model

pytestmark = pytest.mark.shard("audit")

REWARD = """
def score(responses, kind):
    return [
        1.0 if k % 2 else float(sum(map(ord, text)) % 7)
        for text, k in zip(responses, kind, strict=True)
    ]
"""
RUNS = {
    "fsdp2, critic": {
        "fsdp": True,
        "advantage_estimator": "gae",
        "init_kl_coef": 0.05,
        "dynamic_sampling": True,
        "l2": 0.01,
    },
    "zero 2": {
        "zero_stage": 2,
        "advantage_estimator": "reinforce++",
        "init_kl_coef": 0.05,
        "use_kl_loss": True,
        "off_policy_correction": "tis",
        "max_norm": 0.2,
        "lr_scheduler": "cosine_with_min_lr",
        "lr_warmup_ratio": 0.3,
    },
}
MORE_RUNS = {
    "zero 0": {"zero_stage": 0, "policy_loss": "dapo"},
    "zero 1, adapters": {"zero_stage": 1, "lora_rank": 4, "init_kl_coef": 0.05},
    "zero 3, critic": {"zero_stage": 3, "advantage_estimator": "gae", "init_kl_coef": 0.05},
    "fsdp2, adapters": {"fsdp": True, "lora_rank": 4, "high_entropy_token_ratio": 0.4},
    "fsdp2, sequence parallel": {"fsdp": True, "sp_size": 2, "packing_samples": True},
    "zero 2, bf16": {"zero_stage": 2, "bf16": True, "init_kl_coef": 0.05, "zpg": 1},
    "fsdp2, bf16 masters": {"fsdp": True, "bf16": True, "use_mp_opt": True},
    "fsdp2, stream": {"fsdp": True, "stream_chunk": 3, "stream_prompts": 6, "audit_every": 1},
    "fsdp2, lag": {"fsdp": True, "rollout_lag": 1, "audit_every": 1},
    "zero 1, top_k": {"zero_stage": 1, "top_k": 20, "off_policy_correction": "tis"},
}


def train(folder, runs, **how):
    write_tiny_model(folder / "model", "tiny-qwen3", seed=1)
    write_inputs(folder, say_rows(32, kind=lambda number: number), reward=REWARD)
    rates = {"critic_learning_rate": 1e-3, "audit_every": 2, "fsdp": False}
    train_on_ranks(2, [rollout_options(folder, n, **rates | own) for n, own in runs.items()], **how)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    train(folder, RUNS, timeout_seconds=240)
    return folder


def audit(run, capsys, *flags):
    capsys.readouterr()  # what was printed before
    code = main(["audit", str(run), "--json", *flags])
    return code, json.loads(capsys.readouterr().out)


def compared(report, part):
    return [row for row in report["rows"] if row["quantity"].startswith(part)]


@pytest.mark.deepspeed
@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_two_ranks_has_no_difference(name, runs, capsys):
    assert recorded_steps(runs / name) == [2]
    code, report = audit(runs / name, capsys)
    assert [row for row in report["rows"] if row["verdict"] == DIFFERS] == []
    assert code == ExitCode.OK
    skipped = {row["quantity"] for row in report["rows"] if row["verdict"] == "not audited"}
    assert skipped == set()
    assert compared(report, "engine logprobs")
    assert compared(report, "learning rate")
    assert compared(report, "actor weights after")[0]["own"] > 1e-3


@pytest.mark.deepspeed
def test_a_changed_state_is_a_difference(runs, tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    run = tmp_path / "run"
    shutil.copytree(runs / "zero 2", run, ignore=shutil.ignore_patterns("checkpoints", "model"))
    path = next((step_folder(run, 2) / "after" / "actor").glob("*.safetensors"))
    states = load_file(path)
    name = next(n for n in states if n.endswith("layers.0.mlp.down_proj.weight") and "weight/" in n)
    states[name] *= 1 + 1e-3
    save_file(states, path)
    assert main(["audit", str(run)]) == ExitCode.USAGE
    assert "does not match its SHA-256" in capsys.readouterr().err
    folder = step_folder(run, 2)
    seal(folder, json.loads((folder / FACTS).read_text()))
    assert main(["audit", str(run)]) == ExitCode.VERIFICATION
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith("step 2 differs first in: actor we")


@pytest.mark.deepspeed
def test_what_is_not_there_is_said_in_a_line(runs, tmp_path, capsys):
    assert main(["audit", str(tmp_path)]) == ExitCode.USAGE
    assert "--audit_every" in capsys.readouterr().err
    assert main(["audit", str(runs / "zero 2"), "--step", "1"]) == ExitCode.USAGE
    assert "expected one of 2" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.timeout(1500)
def test_more_strategies(tmp_path, capsys):
    runs = {name: {**changes, "audit_every": 1} for name, changes in MORE_RUNS.items()}
    train(tmp_path, runs, timeout_seconds=1200)
    for name, step in itertools.product(MORE_RUNS, (1, 2)):
        code, report = audit(tmp_path / name, capsys, "--step", str(step))
        different = [row for row in report["rows"] if row["verdict"] == DIFFERS]
        assert (name, different) == (name, [])
        assert bool(compared(report, "states before")) == (step == 2)
        assert code == ExitCode.OK
        assert compared(report, "actor weights after")[0]["own"] > 1e-4
