"""The quick start of all stages: its refusals, its pairs, its table, and the whole."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightrft.cli.main import main
from lightrft.tools.quickstart.task import load_example
from lightrft.tools.report.chain import chain_of

pytestmark = pytest.mark.shard("quickstart")


def sample(prompt, response, accuracy, *, kind="sampled", is_cut=False):
    return {
        "pass": kind,
        "prompt": prompt,
        "response": response,
        "accuracy": accuracy,
        "truncated": is_cut,
    }


def test_pairs_hold_whole_right_and_wrong_samples_of_one_prompt_none_twice():
    samples = [
        sample("p", "greedy", 1.0, kind="greedy"),
        sample("p", "right", 1.0),
        sample("p", "right", 1.0),
        sample("p", "", 0.0),
        sample("p", "cut", 0.0, is_cut=True),
        sample("p", "wrong", 0.0),
        sample("p", "another", 0.0),
        sample("q", "alone", 1.0),
    ]
    pairs = load_example("pipeline.py:pairs")
    assert pairs(samples) == [{"prompt": "p", "chosen": "right", "rejected": "wrong"}]
    many = [sample("p", f"{kind}{i}", kind) for i in range(5) for kind in (0.0, 1.0)]
    assert [row["chosen"] for row in pairs(many)] == ["1.00", "1.01", "1.02", "1.03"]


class Killed(BaseException):
    """The test ends a pipeline here."""


@pytest.fixture
def stages(monkeypatch):
    """Stages that leave what the real ones leave, and end the pipeline at a place that is named."""
    begun = []
    at = {"end": None}

    def begin(folder):
        begun.append(Path(folder).name)
        if len(begun) == at["end"]:
            raise Killed

    def trained(config, stage):
        begin(config.output_dir)
        (Path(config.output_dir) / "model").mkdir(parents=True, exist_ok=True)
        return SimpleNamespace(last_eval={"eval/accuracy": 0.75}, seconds=2.0)

    def evaluated(config, settings):
        folder = Path(config.output_dir)
        folder.mkdir()  # what an end left behind is gone
        begin(folder)
        rows = [sample("p", "right", 1.0), sample("p", "wrong", 0.0)]
        (folder / "responses.jsonl").write_text("\n".join(map(json.dumps, rows)))
        metrics = {"greedy/accuracy": 0.5}
        (folder / "eval.json").write_text(json.dumps({"metrics": metrics}))
        return SimpleNamespace(metrics=metrics)

    monkeypatch.setattr("lightrft.run.assembly.run_training", trained)
    monkeypatch.setattr("lightrft.tools.evaluation.evaluation_run.run_evaluation", evaluated)
    pipeline = sys.modules[load_example("pipeline.py:pairs").__module__]
    monkeypatch.setattr(pipeline, "become_only_process", lambda: None)
    return begun, at


def test_a_pipeline_that_was_ended_goes_on_with_what_is_left(stages, tmp_path, monkeypatch, capsys):
    begun, at = stages
    monkeypatch.chdir(tmp_path)
    argv = ["quickstart", "--pipeline", "--steps", "2", "--warm_start_steps", "2"]
    monkeypatch.setattr("lightrft.tools.report.page.write_report", lambda folder: None)
    monkeypatch.setattr("lightrft.tools.report.report_command.write_comparison", lambda *_: None)
    for last in (1, 2, 4, 9):
        begun.clear()
        at["end"] = last
        with pytest.raises(Killed):
            main(argv)
    done = "sft reward dpo dpo_eval grpo grpo_eval answers distill distill_eval"
    assert begun == done.split()
    begun.clear()
    at["end"] = None
    assert main(argv) == 0
    # Runs say themselves that nothing is left to do.
    assert begun == ["sft", "reward", "dpo", "grpo", "distill", "distill_eval"]
    assert [path.name for path in tmp_path.iterdir()] == ["lightrft_quickstart"]
    assert "distill      0.500      2.0" in capsys.readouterr().out
    # Other numbers are another pipeline.
    other = [*argv, "--seed", "1", "--output_dir", "lightrft_quickstart"]
    assert main(other) == 2
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.shard("pipeline")
@pytest.mark.parametrize("seed", range(5))
def test_each_stage_improves_on_the_one_before(tmp_path, seed):
    folder = tmp_path / "run"
    argv = ["quickstart", "--pipeline", "--seed", str(seed), "--output_dir", str(folder)]
    assert main(argv) == 0
    stages = json.loads((folder / "summary.json").read_text())["stages"]
    accuracy = {name: stage["accuracy"] for name, stage in stages.items()}
    assert list(accuracy) == ["sft", "reward", "dpo", "grpo", "distill"]
    # Measured with these seeds: docs/recipes.md.
    assert accuracy["sft"] < 0.45
    assert accuracy["reward"] > 0.75
    assert accuracy["dpo"] > accuracy["sft"] + 0.15
    assert accuracy["grpo"] > accuracy["sft"] + 0.5
    assert accuracy["grpo"] > accuracy["dpo"] + 0.01
    # The student learns from right answers alone.
    assert accuracy["distill"] > accuracy["grpo"] - 0.02
    assert accuracy["distill"] > accuracy["sft"] + 0.55
    lines = chain_of(folder / "distill")
    for name in ("distill", "grpo", "reward", "sft"):
        assert any(f"{name} (" in line for line in lines), lines
    assert any("pairs.jsonl" in line for line in lines)
