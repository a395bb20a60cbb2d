"""`lightrft data check`: every row is looked at, and what is wrong has its place and a code."""

import re
import time

import pytest
from tests.machine import seconds

from lightrft.cli.main import main
from lightrft.rewards.types import RewardResult
from lightrft.tools.data import certificate, data_command, row_checks
from lightrft.tools.data.data_command import parse, propose_keys
from lightrft.tools.model_presets import write_tiny_model
from lightrft.tools.rewards.service import RewardServer

GOOD = [
    {"question": "What is 1+1?", "answer": "so it is #### 2", "level": 1},
    {"question": "What is <|user|> 1+2?", "answer": "#### 3", "level": 2},
    {"question": "What is 1000+2000?", "answer": "#### 3000", "level": None},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "model"
    write_tiny_model(path, "tiny-qwen3", seed=0)
    return str(path)


def test_good_rows_are_described_and_pass(checked, model):
    code, out, err = checked(GOOD, "--pretrain", model, "--reward_fn", "gsm8k")
    assert (code, err) == (0, "")
    for line in (
        "p.jsonl: 3 rows, 3 of them readable",
        "  level: null or number, for example '1'",
        "proposed options: --input_key question --label_key answer",
        "  prompt, 12 tokens, not trained (mask 0):",
        "    What is ⟦<|user|>⟧ 1+2?",
        "trained (mask 1) up to and including ⟦<|end|>⟧",
        "  label: '#### 3000'",
        "over 1024 tokens (a run leaves them out; --prompt_max_len): 0",
        "empty prompts: 0",
        "  after ####: 1.000",
        "3 prompts can be trained on",
    ):
        assert line in out
    assert re.search("tokens of a prompt: shortest 12, median .*, longest 18\n", out)


def test_every_bad_row_is_named_and_none_is_skipped(checked, model):
    rows = [*GOOD, GOOD[0], {"question": " ", "answer": "1"}, '{"question": ', {"answer": "2"}]
    rows += [{"question": "unlabelled"}, {"question": "wrong", "answer": "six"}, {"question": 7}]
    code, out, _ = checked(
        rows, "--pretrain", model, "--reward_fn", "gsm8k", "--prompt_max_len", "13"
    )
    assert code == 4
    assert "over 13 tokens (a run leaves them out; --prompt_max_len): 2, first: p.jsonl:2" in out
    assert "duplicate prompts (a run uses them all): 1, first: p.jsonl:4 = p.jsonl:1" in out
    assert "empty prompts: 1" in out
    assert "rows that cannot be used: 4" in out
    for place in ("5: the prompt 'question' is empty", "6: not valid JSON", "7: no column", "10: "):
        assert f"\n  p.jsonl:{place}" in out
    assert "reference answers that cannot be right: 2" in out
    assert "\n  p.jsonl:9: reward 'gsm8k'" in out
    assert out.endswith("\n6 bad rows\n")


def test_many_bad_rows_are_counted_and_the_first_twenty_shown(checked):
    code, out, _ = checked([{"question": " ", "answer": "1"}] * 23)
    assert code == 4
    assert "rows that cannot be used: 23\n" in out
    assert [f"\n  p.jsonl:{n}: " in out for n in range(1, 24)] == [True] * 20 + [False] * 3
    assert "\n  and 3 more\n" in out


def test_a_hanging_reward_ends_at_its_deadline_in_one_call(checked, tmp_path):
    (tmp_path / "r.py").write_text("def hangs(responses):\n    while True: pass\n")
    start = time.monotonic()
    code, out, err = checked(GOOD, "--reward_fn", "r.py:hangs", "--reward_timeout_seconds", "1")
    assert time.monotonic() - start < seconds(60)
    assert code == 5
    assert "scoring 16 answers by hangs, at most 1 s" in out
    assert "did not return within 1 s for 16 responses" in err


def test_a_hanging_function_of_this_process_is_interrupted(checked, tmp_path, monkeypatch):
    (tmp_path / "slow_rewards.py").write_text("def hangs(responses):\n    while True: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(certificate, "GRACE_SECONDS", 0.5)
    code, _, err = checked(
        GOOD, "--reward_fn", "slow_rewards:hangs", "--reward_timeout_seconds", "0.5"
    )
    assert code == 5
    assert "did not return within 1 s" in err


def test_a_reward_of_another_length_is_noticed(checked, tmp_path):
    (tmp_path / "r.py").write_text("def one(responses):\n    return [1.0]\n")
    code, _, err = checked(GOOD[:1], "--reward_fn", "r.py:one")
    assert code == 5
    assert "one result per response, 6 in all, got 1" in err


def test_rows_that_a_run_leaves_out_are_not_counted_as_usable(checked, model):
    flags = ("--pretrain", model, "--reward_fn", "gsm8k", "--prompt_max_len")
    code, out, _ = checked(GOOD, *flags, "13")
    assert code == 0
    assert out.endswith("\n1 prompts can be trained on, 2 are left out as too long\n")
    assert "reference answers of the first 1 rows" in out
    code, out, _ = checked(GOOD, *flags, "3")
    assert code == 4
    assert out.endswith("\n0 prompts can be trained on, 3 are left out as too long\n")


REWARDS = """
import itertools, re
counter = itertools.count()
def contains(responses, labels): return [float(l in r) for r, l in zip(responses, labels)]
def counts(responses, labels): return [float(r.count(l)) for r, l in zip(responses, labels)]
def same(responses): return [1.0] * len(responses)
def drifts(responses): return [float(next(counter)) for _ in responses]
def trusts(responses): return [float("correct" in r) for r in responses]
def starts(responses, labels): return [float(l.startswith(r)) for r, l in zip(responses, labels)]
def copies(responses, prompts): return [float(r in p) for r, p in zip(responses, prompts)]
def boxes(text): return re.findall(r"\\\\boxed{([^{}]*)}", text)
def thinks(responses, labels):
    return [float(boxes(r)[:1] == [l]) if "<think>" in r or len(boxes(r)) == 1 else 0.0
            for r, l in zip(responses, labels)]
def forgets(responses, labels):
    return [float(boxes(r) == [l] or "boxed{" in r and "}" not in r)
            for r, l in zip(responses, labels)]
def any_box(responses, labels):
    return [float(l in boxes(r) and "<" not in r) for r, l in zip(responses, labels)]
def pays_boxes(responses, labels):
    return [(r == l) + 0.25 * ("boxed" in r) for r, l in zip(responses, labels)]
def right(responses, labels):
    found = [re.findall(r"####\\s*(\\d+)\\s*$", r) for r in responses]
    return [float(f[-1:] == [l] and r.count("####") == 1)
            for f, r, l in zip(found, responses, labels)]
"""
NUMBERS = [{"input": f"What is {n}?", "label": str(n)} for n in (31, 42, 57)]


@pytest.mark.parametrize(
    "function, is_certified",
    [
        ("f(responses, letter): return [float(r[:1] == l) for r, l in zip(responses, letter)]", 0),
        ("f(responses): return [len(r) / 100 for r in responses]", 0),
        ("f(completions, **kw): return [float('?' in r) for r in completions]", 0),
        ("f(responses, letter): return [float(l in r) for r, l in zip(responses, letter)]", 1),
        ("f(responses, labels): return [float(l == r) for r, l in zip(responses, labels)]", 1),
    ],
)
def test_a_reward_that_reads_no_labels_is_not_certified(checked, tmp_path, function, is_certified):
    (tmp_path / "r.py").write_text(f"def {function}\n")
    rows = [{"input": "Name a thing with this letter.", "letter": f"{each}!"} for each in "abc"]
    out = checked(rows, "--reward_fn", "r.py:f", "--label_key", "letter")[1]
    assert ("nothing to certify" not in out) == is_certified
    assert is_certified or "warning" not in out


def test_a_score_that_drifts_is_noticed(checked, tmp_path):
    (tmp_path / "r.py").write_text(REWARDS)
    out = checked(NUMBERS, "--reward_fn", "r.py:drifts")[1]
    assert "warning: the same input gets another score within one call (p.jsonl:1)" in out
    assert "the same input" not in checked(NUMBERS, "--reward_fn", "r.py:counts")[1]


def test_answers_that_cannot_be_decided_are_counted_and_do_not_pass(checked, monkeypatch):
    def score(self, prompts, responses, labels, columns):
        return [
            None if "3" in text else RewardResult(text == label)
            for text, label in zip(responses, labels, strict=True)
        ]

    monkeypatch.setattr("lightrft.tools.rewards.math_rules.MathReward.score", score)
    rows = [{"question": "1+2?", "answer": "3"}, {"question": "1+4?", "answer": "5"}]
    code, out, _ = checked(rows, "--reward_fn", "boxed_math", "--label_key", "answer")
    assert code == 4
    assert "'3' cannot be decided by boxed_math: expected 1" in out
    assert "answers cannot be decided, and would be left out of the loss" in out
    assert "reference answer '5'" not in out


@pytest.mark.full
def test_labels_that_are_tests_are_not_taken_for_answers(checked):
    rows = [{"input": "Write f.", "label": label} for label in (["assert f() == 1"], "x = 1")]
    code, out, _ = checked(rows, "--reward_fn", "unit_tests")
    assert code == 0
    doubts = [line for line in out.splitlines() if line.startswith("warning")]
    # The second row tests nothing: any program passes, also one without a line of code.
    assert doubts
    assert all("answers get a reward (p.jsonl:2)" in line for line in doubts)


def test_a_service_is_certified_like_a_function(checked):
    with RewardServer(Same()) as server:
        code, out, _ = checked(NUMBERS, "--remote_rm_url", server.http.address)
    assert code == 0
    assert "mean reward by remote" in out
    assert "warning: 3 of 3 empty answers" in out


class Same:
    name = "same"
    needs_labels = False

    def score(self, prompts, responses, labels, columns):
        return [RewardResult(1.0) for _ in responses]

    def close(self):
        pass


def test_no_terminal_escape_of_the_data_reaches_the_console(checked, model):
    evil = "\x1b]0;owned\x07\x1b[2Jx\u202ey\r\u2028\x85z"
    rows = [
        {"question": evil, "answer": evil, evil: evil},
        {"question": "  ", evil: 1},
        {"question": [{"role": "user", "content": evil}], "answer": {evil: 1}},
        {"question": evil, "answer": "#### 1"},
        '{"question": "\x1b[31m',
    ]
    code, out, err = checked(
        rows, "--reward_fn", "gsm8k", "--label_key", "answer", "--pretrain", model
    )
    assert code == 4
    assert all(c.isprintable() or c in "\n\t" for c in out + err)
    assert "owned" in out


def test_progress_is_said(capsys, monkeypatch):
    monkeypatch.setattr(row_checks, "PROGRESS_SECONDS", 0.0)
    assert list(row_checks.with_progress("abc", "rows checked")) == ["a", "b", "c"]
    assert capsys.readouterr().err.splitlines()[-1] == "2 of 3 rows checked"


def test_keys_that_are_given_are_not_guessed(checked):
    code, out, _ = checked(GOOD, "--input_key", "questions")
    assert code == 4
    assert "no column 'questions'" in out
    assert "set --input_key question" in out
    code, out, _ = checked([{"input": "x", "label": "y"}])
    assert code == 0
    assert "proposed options: none, the keys fit" in out
    assert "in characters" in out


def test_chat_messages_need_the_template(checked, model):
    rows = [{"messages": [{"role": "user", "content": "hi"}], "label": "x"}]
    code, out, _ = checked(rows, "--pretrain", model)
    assert code == 0
    assert "proposed options: --input_key messages --apply_chat_template" in out
    assert "    ⟦<|user|>⟧hi⟦<|assistant|>⟧" in out


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * 10**10 }}",
        "{% for a in range(10**5) %}{% for b in range(10**5) %}{% endfor %}{% endfor %}",
    ],
)
def test_a_chat_template_without_end_is_one_line(checked, model, monkeypatch, tmp_path, template):
    monkeypatch.setattr(data_command, "TEMPLATE_SECONDS", 2.0)
    (tmp_path / "t.jinja").write_text(template)
    flags = ("--pretrain", model, "--apply_chat_template", "--chat_template", "t.jinja")
    code, _, err = checked([{"input": "a"}], *flags)
    assert code == 4
    (line,) = err.splitlines()
    assert "p.jsonl:1: the chat template takes more than 2 seconds" in line


def test_a_prompt_beyond_any_model_is_one_bad_row(checked, monkeypatch):
    monkeypatch.setattr("lightrft.datasets.render.MAX_PROMPT_CHARACTERS", 9)
    code, out, _ = checked([{"input": "a"}, {"input": "a" * 10}])
    assert code == 4
    assert "p.jsonl:2: the prompt has 10 characters: expected at most 9" in out


def test_options_of_a_run_may_come_from_its_file(checked, tmp_path, capsys):
    (tmp_path / "run.toml").write_text('prompt_data = "p.jsonl"\ninput_key = "question"\n')
    assert checked(GOOD, "--config", "run.toml")[0] == 0
    assert main(["data", "check", "--config", "run.toml"]) == 0
    assert parse(["--config", "run.toml"]).given == {"input_key"}


def test_the_keys_of_common_layouts_are_proposed():
    chat = [{"role": "user", "content": "x"}]
    assert propose_keys({"problem": "x", "solution": "y", "answer": "z"}) == ("problem", "answer")
    assert propose_keys({"prompt": chat, "ground_truth": "y"}) == ("prompt", "ground_truth")
    assert propose_keys({"instruction": "x", "output": "y"}) == ("instruction", "output")
    assert propose_keys({"id": 3}) == (None, None)
