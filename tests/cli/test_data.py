"""`lightrft data check`: every row is looked at, and what is wrong has its place and a code."""

from __future__ import annotations

import itertools
import json

import pytest

from lightrft.cli.data import parse
from lightrft.cli.main import main
from lightrft.datasets.check import histogram, propose_keys
from lightrft.models.presets import write_tiny_model

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


@pytest.fixture
def check(tmp_path, capsys, monkeypatch):
    """`check(rows, *flags)`: the exit code, what was printed and what was complained about."""
    monkeypatch.chdir(tmp_path)

    def run(rows, *flags):
        text = "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
        (tmp_path / "p.jsonl").write_text(text)
        code = main(["data", "check", "p.jsonl", *flags])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def test_good_rows_are_described_and_pass(check, model):
    code, out, err = check(GOOD, "--pretrain", model, "--reward_fn", "gsm8k")
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
    assert "tokens\n  12 to 12        1" in out
    assert "\n  18 to 18        1" in out


def test_every_bad_row_is_named_and_none_is_skipped(check, model):
    rows = [*GOOD, GOOD[0], {"question": " ", "answer": "1"}, '{"question": ', {"answer": "2"}]
    rows += [{"question": "unlabelled"}, {"question": "wrong", "answer": "six"}, {"question": 7}]
    code, out, _ = check(
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


def test_keys_that_are_given_are_not_guessed(check):
    code, out, _ = check(GOOD, "--input_key", "questions")
    assert code == 4
    assert "no column 'questions'" in out
    assert "set --input_key question" in out
    code, out, _ = check([{"input": "x", "label": "y"}])
    assert code == 0
    assert "proposed options: none, the keys fit" in out
    assert "in characters" in out


def test_chat_messages_need_the_template(check, model):
    rows = [{"messages": [{"role": "user", "content": "hi"}], "label": "x"}]
    code, out, _ = check(rows, "--pretrain", model)
    assert code == 0
    assert "proposed options: --input_key messages --apply_chat_template" in out
    assert "    ⟦<|user|>⟧hi⟦<|assistant|>⟧" in out


def test_an_own_reward_is_shown_without_a_verdict(check, tmp_path):
    code = (
        "def half(responses, labels):\n"
        "    return [0.5 * (r == l) for r, l in zip(responses, labels)]\n"
    )
    (tmp_path / "r.py").write_text(code)
    status, out, _ = check(GOOD, "--reward_fn", "r.py:half")
    assert status == 0
    assert "  as it is: 0.500" in out
    assert "  after ####: 0.000" in out
    (tmp_path / "r.py").write_text("def half(responses):\n    return 1 / 0\n")
    status, out, _ = check(GOOD, "--reward_fn", "r.py:half")
    assert status == 4
    assert "ZeroDivisionError" in out


def test_options_of_a_run_may_come_from_its_file(check, tmp_path, capsys):
    (tmp_path / "run.toml").write_text('prompt_data = "p.jsonl"\ninput_key = "question"\n')
    assert check(GOOD, "--config", "run.toml")[0] == 0
    assert main(["data", "check", "--config", "run.toml"]) == 0
    assert parse(["--config", "run.toml"]).given == {"input_key"}


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["data"], 2, "data check SOURCE"),
        (["data", "chek", "x"], 2, "data check SOURCE"),
        (["data", "check"], 2, "give a file"),
        (["data", "check", "x.jsonl", "--inputkey", "a"], 2, "did you mean input_key"),
        (["data", "check", "x.jsonl", "--pretrain", "nowhere"], 2, "no model directory"),
        (["data", "check", "x.jsonl"], 4, "x.jsonl does not exist"),
        (["data", "check", "x.jsonl", "--temperature", "1"], 2, "temperature"),
    ],
)
def test_mistakes_on_the_command_line(argv, code, message, capsys):
    assert main(argv) == code
    assert message in capsys.readouterr().err


def test_the_keys_of_common_layouts_are_proposed():
    def keys(row):
        proposal = propose_keys(row)
        return proposal.input_key, proposal.label_key, proposal.holds_messages

    chat = [{"role": "user", "content": "x"}]
    assert keys({"problem": "x", "solution": "y", "answer": "z"}) == ("problem", "answer", False)
    assert keys({"prompt": chat, "ground_truth": "y"}) == ("prompt", "ground_truth", True)
    assert keys({"instruction": "x", "output": "y"}) == ("instruction", "output", False)
    assert keys({"id": 3}) == (None, None, False)


def test_the_histogram_counts_every_length_once():
    counts = [3, 3, 4, 9, 40, 41]
    bins = histogram(counts)
    assert sum(count for _, _, count in bins) == len(counts)
    assert bins[0] == (3, 7, 3)
    for (_, last, _), (first, _, _) in itertools.pairwise(bins):
        assert first == last + 1
    assert histogram([]) == []
    assert histogram([5]) == [(5, 5, 1)]
