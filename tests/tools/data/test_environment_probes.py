"""Environments that pay for nothing are named by `lightrft data check`."""

from __future__ import annotations

import json

import pytest

from lightrft.cli.main import main
from lightrft.tools.data.data_command import show_empty

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
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "name, warnings",
    [
        ("Sound", []),
        ("Generous", ["warning: 4 of 4 episodes of empty turns are paid"]),
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
    assert found == warnings


def test_failures_are_counted(capsys):
    show_empty([0.0, 0.0, None])
    show_empty([None])
    assert capsys.readouterr().out.splitlines() == [
        "episodes of empty turns, mean reward by the environment: 0.000, 1 gave none",
        "episodes of empty turns, mean reward by the environment: none, 1 gave none",
    ]
