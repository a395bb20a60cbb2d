"""The table of a GPU: limits, lines that survive, culprits, and what is made of a folder."""

import importlib
import json
import os
import sys
import threading
import time
import tomllib

import pytest
from tests.programs import run_program

from lightrft.tools.plan.sizes import Constant


@pytest.fixture
def gpu(repository, monkeypatch):
    """Import a module of benchmarks/gpu."""
    monkeypatch.syspath_prepend(str(repository / "benchmarks/gpu"))
    monkeypatch.setenv("LIGHTRFT_TABLE", "")
    return importlib.import_module


@pytest.fixture
def runner(gpu, tmp_path):
    (tmp_path / "out").mkdir()
    return gpu("steps").Runner(tmp_path / "out", 600, tmp_path / "scratch")


def planted(repository, code):
    """Arguments of python3 for a step that begins with `code`."""
    place = str(repository / "benchmarks/gpu")
    return ("-c", f"import sys, time\nsys.path.insert(0, {place!r})\nimport lines\n{code}")


@pytest.mark.parametrize("call", ["first", "second"])
def test_limits_of_the_steps_add_up_to_the_seconds_of_their_call(gpu, call):
    steps = gpu("steps")
    limits = sum(step.limit for step in steps.CALLS[call])
    assert steps.PREPARE_SECONDS[call] + limits <= steps.SECONDS[call] <= 595


def test_all_tests_that_need_a_gpu_are_run(gpu, repository):
    chosen = gpu("steps").TESTS
    for path in (repository / "tests").rglob("test_*.py"):
        name = str(path.relative_to(repository))
        if "mark.gpu" in path.read_text() and path.name != "test_gpu_script.py":
            assert any(name == each or name.startswith(f"{each}/") for each in chosen), name


@pytest.mark.full
def test_a_step_that_meets_its_limit_keeps_what_it_has_measured(gpu, runner, repository):
    code = 'lines.add("grpo", "0.5b", step=2, mfu=0.3)\ntime.sleep(600)'
    step = gpu("steps").Step("slow", 9, (planted(repository, code),))
    assert runner.step(step, time.monotonic() + 9) == "limit"
    runner.keep()
    assert gpu("lines").read(runner.folder / "table.jsonl")[0]["mfu"] == 0.3
    assert "| 0.5B |" in (runner.folder / "table.md").read_text()
    assert "0.3" in (runner.folder / "table.md").read_text()


@pytest.mark.parametrize(
    "runs_with, culprit",
    [("enforce_eager=true", "CUDA graphs"), ("TRITON_ATTN", "FlashAttention"), ("x", "binaries")],
)
def test_a_way_that_runs_names_the_culprit_and_is_kept(gpu, runner, repository, runs_with, culprit):
    steps = gpu("steps")
    code = f"sys.exit(not any({runs_with!r} in each for each in sys.argv))"
    step = steps.Step("grpo_0.5b", 60, (planted(repository, code),), steps.TRIES)
    assert runner.run((step,)) == (runs_with != "x")
    (line,) = (each for each in gpu("lines").read(runner.folder / "table.jsonl") if "text" in each)
    assert culprit in line["text"]
    if runs_with != "x":
        assert runner.run((step,))
        assert (
            len(list(runner.raw.iterdir()))
            == {"enforce_eager=true": 3, "TRITON_ATTN": 4}[runs_with]
        )


def test_a_failure_after_the_first_number_is_not_repeated(gpu, runner, repository):
    steps = gpu("steps")
    code = 'lines.add("grpo", "0.5b", step=1, step_seconds=2)\nsys.exit(1)'
    step = steps.Step("grpo_0.5b", 60, (planted(repository, code),), steps.TRIES)
    assert not runner.run((step,))
    assert len(list(runner.raw.iterdir())) == 1


def test_a_step_without_time_is_left_out_and_named(gpu, tmp_path, repository):
    (tmp_path / "out").mkdir()
    runner = gpu("steps").Runner(tmp_path / "out", 1, tmp_path / "scratch")
    assert runner.run(gpu("steps").CALLS["second"])
    lines = gpu("lines").read(tmp_path / "out/table.jsonl")
    assert {line["outcome"] for line in lines} == {"left out"}


def test_steps_are_written_as_the_run_records_them_with_what_its_start_decided(
    gpu, tmp_path, monkeypatch
):
    start = {"attention": "packed", "planned_bytes": {"train": 4 * 2**30}}
    (tmp_path / "run.json").write_text(json.dumps(start))
    steps = [{"global_step": n, "mfu": n / 10, "memory/train_gb": 3.0} for n in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in steps))
    monkeypatch.setenv("LIGHTRFT_TABLE", str(tmp_path / "table.jsonl"))
    ended = threading.Event()
    ended.set()
    gpu("grpo").Watch("0.5b").follow(tmp_path / "metrics.jsonl", ended)
    results = gpu("report").Measured(gpu("lines").read(tmp_path / "table.jsonl"))
    values = [results.median("grpo", "0.5b", key) for key in ("planned_gib", "train_gib", "mfu")]
    assert values == [4.0, 3.0, 0.2]
    assert "- 0.5b: attention: packed" in gpu("report").table_of(results.lines)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.shard("start_vllm")
@pytest.mark.timeout(1200)
def test_the_rehearsal_with_vllm_makes_the_whole_row_of_grpo(gpu, repository, tmp_path):
    pytest.importorskip("vllm")
    script = repository / "benchmarks/gpu/run_all.sh"
    run_program(
        script,
        "--rehearse",
        "--out",
        tmp_path,
        "grpo_0.5b",
        "grpo_0.5b_stream",
        timeout_seconds=1100,
        env={**os.environ, "PYTHON": sys.executable, "PREPARE_SECONDS": "300"},
        code=0,
    )
    results = gpu("report").Measured(gpu("lines").read(tmp_path / "table.jsonl"))
    keys = ("rollout_tokens_per_second", "train_tokens_per_second", "sync_seconds", "sync_gb")
    keys += ("idle_seconds_share", "thin_seconds_share", "logprob_diff_mean", "train_gib")
    for name in ("0.5b", "0.5b_stream"):
        assert all(results.median("grpo", name, key) is not None for key in keys)
    assert results.median("grpo", "0.5b", "bare_tokens_per_second") > 0


LINES = [
    {"part": "machine", "name": "versions", "device": "NVIDIA H100", "torch": "2.11.0"},
    {"part": "grpo", "name": "0.5b", "step": 1, "mfu": 0.01, "rollout_tokens_per_second": 9.0},
    {"part": "grpo", "name": "0.5b", "step": 2, "mfu": 0.31, "rollout_tokens_per_second": 7e4},
    {"part": "grpo", "name": "0.5b", "step": 3, "mfu": 0.33, "rollout_tokens_per_second": 8e4},
    {"part": "grpo", "name": "0.5b", "bare_tokens_per_second": 1e5},
    {"part": "grpo", "name": "0.5b", "step": 1, "sync_seconds": 9.0, "sync_gb": 1.0},
    {"part": "grpo", "name": "0.5b", "step": 2, "sync_seconds": 0.02, "sync_gb": 1.0},
    {
        "part": "rows",
        "name": "0.6b_16k",
        "kind": "ours",
        "step": 2,
        "step_seconds": 1.6384,
        "tokens": 16384,
    },
    {"part": "rows", "name": "0.6b_16k", "kind": "ours", "gradient_difference": 0.004},
    {"part": "rows", "name": "0.6b_16k", "kind": "ours", "context_gb": 0.6},
    {
        "part": "rows",
        "name": "0.6b_16k",
        "kind": "trl",
        "step": 2,
        "step_seconds": 3.2768,
        "tokens": 16384,
    },
    {"part": "step", "name": "grpo_0.5b", "outcome": "limit", "seconds": 130.0},
]


def test_the_table_has_medians_of_warm_steps_beside_what_others_publish(gpu):
    text = gpu("report").table_of(LINES)
    (row,) = (line for line in text.splitlines() if line.startswith("| 0.5B |"))
    assert "| 75,000 / 100,000 | 0.75 | 0.02 s, 50 / - |" in row
    assert "| 0.32 |" in row
    assert "| Qwen3-0.6B, 2 x 16,384: lightrft | 1.64 | 20,000 |" in text
    assert "| Qwen3-0.6B, 2 x 16,384: TRL 1.16 | 3.28 | 10,000 |" in text
    assert "as published (H100) | 1.99 | 16,466 |" in text
    assert "| 1.5B | not measured |" in text
    assert "- grpo_0.5b: limit, 130 s" in text


def test_constants_come_from_a_gpu_alone_and_are_those_of_the_plan(gpu, tmp_path):
    constants = gpu("report").constants_of(LINES)
    assert constants == {"context_gb": {"value": 0.6, "measured_on": "NVIDIA H100, torch 2.11.0"}}
    report, table = gpu("report"), gpu("report").CONSTANTS.read_text("utf-8")
    for _ in range(2):  # measured again
        table = report.with_measured(table, constants)
    found = {name: Constant(**entry) for name, entry in tomllib.loads(table).items()}
    assert found["context_gb"].source == "measured on NVIDIA H100, torch 2.11.0"
    assert (found["context_gb"].value, found["useful_rows"].source) == (0.6, "assumed")
    assert gpu("report").constants_of([{**LINES[0], "device": "CPU"}, *LINES[1:]]) == {}


def test_the_page_is_that_of_the_lines_that_were_kept(gpu):
    report = gpu("report")
    measured = gpu("lines").read(report.KEPT)
    assert report.PAGE.read_text("utf-8") == report.write_page(measured)
