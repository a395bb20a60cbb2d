"""Steps on episodes that a real engine samples, in any layout, on one process or two."""

import json
import math
import shutil
import tempfile
from pathlib import Path

import pytest
from tests.rollout.journal_edits import events_of, lines_of
from tests.runs import (
    assert_same,
    last_metrics,
    lines,
    rollout_options,
    tiny_models,
    with_stops,
    write_inputs,
)

from lightrft.cli.errors import ExitCode
from lightrft.cli.main import main
from lightrft.reporting.rollouts import read_rollout
from lightrft.rollout.environments.calls import ToolCall
from lightrft.tools.audit.findings import DIFFERS, NOT_AUDITED
from lightrft.tools.audit.report import audit_step
from lightrft.tools.replay import run_replay as replay
from lightrft.tools.rows.row_choice import count_fates
from lightrft.tools.rows.row_file import read_samples

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

FILE = "step-000001.rank-0.jsonl"
CASES = Path(__file__).parent.parent / "rollout/environment_cases.py"
TEMPLATE = """\
{%- for x in tools or [] %}{{- '<|system|>' + x.function.name }}{%- endfor %}\
{%- for m in messages %}\
{%- if m.role == 'tool' %}{{- '<|user|><tool_response>' + m.content + '</tool_response>' }}\
{%- else %}{{- '<|' + m.role + '|>' + m.content }}{%- for k in m.tool_calls or [] %}\
{{- '<tool_call>' + (k.function | tojson) + '</tool_call>' }}{%- endfor %}\
{%- if m.role == 'assistant' %}{{- eos_token }}{%- endif %}{%- endif %}{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
# Is paid call by call, more for later ones.
PAYING = """
import sys

sys.path.insert(0, {cases!r})
import environment_cases


class Counter(environment_cases.Counter):
    def get_call_reward(self):
        return self.count / 4

    def get_reward(self):
        return -0.125
"""
REWARD = """
def score(responses):
    return [(sum(map(ord, text)) % 7) / 7 for text in responses]
"""


def run(folder, world_size, variants):
    """Metrics and folder of each run; every turn of its episodes makes a call."""
    parent = Path(tempfile.mkdtemp(prefix="runs_", dir=folder))
    common = {
        "generate_max_len": 12,
        "prompt_max_len": 64,
        "max_steps": 1,
        "advantage_estimator": "gae",
        "init_kl_coef": 0.05,
        "use_kl_loss": True,
        "entropy_coef": 0.01,
        "loss_agg_mode": "token-mean",
        "critic_learning_rate": 1e-3,
        "max_norm": 0.5,
        "max_turns": 3,
        "environment": f"{CASES}:Counter",
        "chat_template": str(folder / "template.jinja"),
        "apply_chat_template": True,
        "environment_workers": 1,
        "save_trajectories": True,
        "save_rollouts": True,
        "max_observation_tokens": 32,
    }
    outputs = [parent / str(number) for number in range(len(variants))]
    runs = [
        rollout_options(folder, output, **common | changes)
        for output, changes in zip(outputs, variants, strict=True)
    ]
    calls = (ToolCall("count_up"),)
    metrics = last_metrics(world_size, runs, timeout_seconds=400, calls=calls)
    return list(zip(metrics, outputs, strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("environment_run")
    rows = [{"prompt": f"say {'aeiou'[i % 5] * (1 + 3 * (i % 4))}"} for i in range(8)]
    paying = PAYING.replace("{cases!r}", repr(str(CASES.parent)))
    files = {"paying.py": paying, "template.jinja": TEMPLATE}
    write_inputs(tiny_models(folder, "model"), rows, reward=REWARD, files=files)
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    padded = {"audit_every": 1}
    packed = {"packing_samples": True, "micro_batch_tokens": 150}
    longer = {
        "micro_train_batch_size": 4,
        "max_steps": 2,
        "audit_every": 2,
        "save_steps": 1,
        "turn_credit": "discounted",
        "gamma": 0.9,
    }
    paying = padded | {
        "environment": f"{folder / 'paying.py'}:Counter",
        "advantage_estimator": "reinforce",
        "reward_fn": (),
    }
    limited = paying | {"reward_clip": 0.3}
    return run(folder, 1, (padded, packed, longer, paying, limited))


def assert_same_step(found, expected):
    assert_same(expected[0], found[0], rel=2e-4, small=2e-6)


def assert_same_episodes(found, expected):
    """Ids, rewards and answers of each sample, and logprobs within 2e-5."""
    episodes = []
    for _, output in (found, expected):
        own = {}
        for path in (output / "journal").glob("step-000001.rank-*.jsonl"):
            for event in lines(path):
                if event["event"] in ("reset", "turn", "answer", "observation", "end"):
                    own.setdefault(event["sample_id"], []).append(event)
        episodes.append(own)
    assert sorted(episodes[0]) == sorted(episodes[1]) == list(range(16))
    for sample_id, events in episodes[1].items():
        for event, other in zip(episodes[0][sample_id], events, strict=True):
            for name in ("event", "prompt_token_ids", "token_ids", "reward"):
                assert event.get(name) == other.get(name), (sample_id, name)
            assert event.get("logprobs", []) == pytest.approx(other.get("logprobs", []), abs=2e-5)


def test_recorded_samples_mark_what_the_journal_says_was_sampled(alone):
    _, output = alone[0]
    parts = {}
    for event in lines(output / "journal" / FILE):
        if event["event"] in ("turn", "observation"):
            is_sampled = event["event"] == "turn"
            own = parts.setdefault(event["sample_id"], [])
            own += [(token_id, is_sampled) for token_id in event["token_ids"]]
    found = [
        read_rollout(line, "a line")
        for line in (output / "rollouts.jsonl").read_bytes().splitlines()
    ]
    assert [each.sample_id for each in found] == sorted(parts) == list(range(16))
    for each in found:
        marked = list(zip(each.response_ids, each.is_sampled, strict=True))
        assert marked == parts[each.sample_id]
    assert any(not all(each.is_sampled) for each in found)
    rows, pairs = (
        count_fates(samples, [])["answered"]
        for samples, _ in (
            read_samples(output / "rollouts.jsonl", holds_answers=holds) for holds in (True, False)
        )
    )
    assert (rows, pairs) == (0, sum(not all(each.is_sampled) for each in found))


def test_a_step_on_episodes_does_not_depend_on_the_layout(alone):
    expected, packed, *_ = alone
    metrics, output = expected
    assert_same_step(packed, expected)
    assert 1.5 < metrics["episode/turns"] <= 3
    assert metrics["episode/calls"] > 0.5
    assert metrics["tool/count_up/error_share"] == 0
    assert metrics["reward/Counter"] > 0
    assert math.isfinite(metrics["grad_norm"])
    # What is written: the journal, conversations, and which tokens were sampled.
    events = lines(output / "journal" / FILE)
    assert [e["event"] for e in events].count("reset") == 16
    assert sum(e["event"] == "turn" for e in events) == round(16 * metrics["episode/turns"])
    several = 0
    for entry in lines(output / "trajectories.jsonl"):
        flags = [
            any(a <= i < b for a, b in entry["sampled_spans"])
            for i in range(len(entry["token_ids"]))
        ]
        several += len(entry["sampled_spans"]) > 1
        for name in ("logprobs", "rollout_logprobs", "advantages", "returns", "values"):
            assert all(x == 0 for x, f in zip(entry[name], flags, strict=True) if not f), name
        assert all(x < 0 for x, f in zip(entry["rollout_logprobs"], flags, strict=True) if f)
    assert several > 0


def test_a_step_on_episodes_is_audited_like_any_other(alone):
    for (_, output), step in ((alone[0], 1), (alone[2], 2), (alone[3], 1), (alone[4], 1)):
        report = audit_step(output, step)
        assert [row for row in report.rows if row.verdict == DIFFERS] == []
        audited = {row.quantity for row in report.rows if row.verdict != NOT_AUDITED}
        assert {"engine logprobs", "returns", "advantages", "response mask"} <= audited


def test_rewards_of_calls_are_credited_to_the_turns_before_them(alone):
    paid, seen = (0.25, 0.5), set()
    for entry in lines(alone[3][1] / "trajectories.jsonl"):
        starts = [start for start, _ in entry["sampled_spans"]]
        left = [sum(paid[turn : len(starts) - 1]) - 0.125 for turn in range(len(starts))]
        assert [entry["returns"][start] for start in starts] == pytest.approx(left)
        assert entry["reward"] == pytest.approx(left[0])
        seen.add(len(starts))
    assert 3 in seen
    for entry in lines(alone[4][1] / "trajectories.jsonl"):
        starts = [start for start, _ in entry["sampled_spans"]]
        whole = min(sum(paid[: len(starts) - 1]) - 0.125, 0.3)
        assert [entry["returns"][start] for start in starts] == pytest.approx([whole] * len(starts))


def test_episodes_are_replayed_without_their_environment(alone, monkeypatch, capsys):
    monkeypatch.setattr(replay, "training_params", with_stops)
    folder = alone[2][1]
    journal = folder / "journal/step-000002.rank-0.jsonl"
    num_turns = sum(e["event"] == "turn" for e in lines(journal))

    def replayed(*words):
        code = main(["replay", str(folder), *words])
        return code, capsys.readouterr()

    # The weights before step 2 stand in the record for the audit, then in a checkpoint.
    code, shown = replayed("--json")
    assert code == ExitCode.OK
    found = json.loads(shown.out)
    assert (found["step"], found["num_turns"], found["differences"]) == (2, num_turns, [])
    assert found["max_difference"] <= 2e-5
    shutil.rmtree(folder / "audit")
    code, shown = replayed("--step", "2")
    assert code == ExitCode.OK
    assert shown.out.strip().endswith("equal to the run")
    # Other weights are refused, and missing ones.
    text = journal.read_text()
    header, *rest = events_of(text)
    journal.write_text(lines_of([{**header, "weights": 5}, *rest]))
    assert replayed("--step", "2")[0] == ExitCode.USAGE
    journal.write_text(text)
    shutil.rmtree(folder / "checkpoints")
    code, shown = replayed("--step", "2")
    assert code == ExitCode.USAGE
    assert "was sampled with weights that are gone" in shown.err
    assert replayed("--step", "9")[0] == ExitCode.USAGE


def test_steps_of_adapters_are_replayed_with_weights_that_round_as_in_the_run(folder, monkeypatch):
    monkeypatch.setattr(replay, "training_params", with_stops)
    common = {"lora_rank": 4, "max_steps": 2, "save_steps": 1, "actor_learning_rate": 1e-2}
    variants = ({"bf16": True, "audit_every": 2}, {"quantize": "nf4", "strict": True})
    (_, rounded), (_, packed) = run(folder, 1, [common | each for each in variants])
    _, of_record = replay.replay_run(rounded, 2)
    shutil.rmtree(rounded / "audit")
    _, of_checkpoint = replay.replay_run(rounded, 2)
    _, of_codes = replay.replay_run(packed, 2)
    assert of_record.differences == of_checkpoint.differences == of_codes.differences == []
    assert min(of_record.num_turns, of_codes.num_turns) > 16


def test_two_processes_give_the_step_of_one(folder, alone):
    sharing = {"sp_size": 2, "packing_samples": True, "micro_batch_tokens": 150}
    for found in run(folder, 2, ({}, sharing)):
        assert_same_step(found, alone[0])
        assert_same_episodes(found, alone[0])
        assert len(lines(found[1] / "journal/step-000001.rank-1.jsonl")) > 16
