"""SmolLM2 behind the real packages: a step is trained, and is what the journal says.

The run's own gates compare every id with the engine's ledger, and every logprob with the trainer's;
the replay then samples each call once more.
"""

import json
from pathlib import Path

import pytest
from benchmarks.peers.verifiers_cases import resources, sums

from lightrft.cli.main import main

AGENTS = Path(__file__).with_name("package_agents.py")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def train(smollm2, agent, **options):
    """Metrics of one step with an agent, and its journal's calls."""
    options = {
        "pretrain": smollm2,
        "agent": agent,
        "n_samples_per_prompt": 2,
        "rollout_batch_size": 2,
        "train_batch_size": 4,
        "micro_train_batch_size": 1,
        "generate_max_len": 24,
        "max_steps": 1,
        "output_dir": "run",
        **options,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    assert main(["train", "--fsdp", "--no_bf16", "--apply_chat_template", *words]) == 0
    assert main(["replay", "run", "--step", "1"]) == 0
    (line,) = Path("run/metrics.jsonl").read_text().splitlines()
    return json.loads(line)


@pytest.fixture
def rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"input": f"What is {n} + 2?", "target": n + 2} for n in (3, 40)]
    data = tmp_path / "sums.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    return str(data)


@pytest.mark.shard("smollm2_agents")
@pytest.mark.parametrize(
    "package, calls, branches, options",
    [
        ("openai", 2, 1, {}),
        ("anthropic", 2, 2, {}),
        # Its prompt has some two thousand tokens.
        ("smolagents", 3, 3, {"max_len": 8192, "rollout_batch_size": 1, "train_batch_size": 2}),
    ],
)
def test_a_step_with_a_package(smollm2, rows, package, calls, branches, options):
    pytest.importorskip(package)
    found = train(smollm2, f"{AGENTS}:with_{package}", prompt_data=rows, **options)
    assert found["agent/calls"] == calls
    assert found["agent/branches"] == branches
    assert found["agent/lost_calls"] == 0


@pytest.mark.shard("verifiers")
def test_a_step_with_verifiers(smollm2, tmp_path, monkeypatch):
    pytest.importorskip("verifiers", reason="needs scripts/verifiers.txt")
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "sums.jsonl"
    data.write_text("\n".join(map(json.dumps, sums((3, 2), (40, 2), has_tool=False))))
    with resources() as address:
        environment = (
            f"verifiers:nemo_gym?taskset.dataset={data}&taskset.task.resources_url={address}"
            "&agent.harness.id=null"
        )
        found = train(smollm2, environment, prompt_data=environment)
    assert found["agent/calls"] == found["agent/branches"] == 1
    assert found["agent/lost_calls"] == 0
