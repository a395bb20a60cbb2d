"""Environments that pay for nothing are named by `lightrft data check`."""

from __future__ import annotations

import json

import pytest

from lightrft.cli.main import main
from lightrft.tools.data.environment_probes import report

CASES = """
class Sound:
    def reset(self, **row):
        self.target, self.is_right = row["target"], False

    def guess(self, number: int) -> str:
        \"\"\"Guess.

        Args:
            number: The guess.
        \"\"\"
        self.is_right = number == self.target
        return "no"

    def get_reward(self):
        return float(self.is_right)


class Generous(Sound):
    def get_reward(self):
        return 0.5 + self.is_right


class Echoes(Sound):
    def reset(self, **row):
        self.is_right = False
        return " the word is cat"

    def guess(self, text: str) -> str:
        \"\"\"Guess.

        Args:
            text: The guess.
        \"\"\"
        self.is_right = "cat" in text
        return "it was cat"
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "name, warnings",
    [
        ("Sound", []),
        ("Generous", ["4 of 4 empty turns", "4 of 4 random calls", "4 of 4 repeated answers"]),
        ("Echoes", ["4 of 4 repeated answers"]),
    ],
)
def test_what_an_environment_pays_for_without_a_model_is_named(
    tmp_path, monkeypatch, capsys, name, warnings
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cases.py").write_text(CASES)
    rows = [{"input": "Find it.", "target": 1000 + n} for n in range(4)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--apply_chat_template", "--environment", f"cases.py:{name}", "--max_turns", "3"]
    code = main(["data", "check", "p.jsonl", *flags, "--environment_workers", "1"])
    out = capsys.readouterr().out
    assert code == 0, out
    found = [line for line in out.splitlines() if line.startswith("warning")]
    assert found == [f"warning: {text} are paid" for text in warnings]


def test_luck_is_no_doubt_and_failures_are_counted():
    played = {
        "empty turns": [0.0, 0.0, None],
        "random calls": [0.0, 1.0],
        "repeated answers": [None, None],
    }
    assert report(played)[1:] == [
        "  empty turns: 0.000, 1 failed",
        "  random calls: 0.500",
        "  repeated answers: none came to an end, 2 failed",
    ]
