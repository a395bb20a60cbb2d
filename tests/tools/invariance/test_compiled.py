"""What compiling a model's blocks gives on this machine is measured once, and runs say it."""

import json
from types import SimpleNamespace

import pytest
import torch

from lightrft.cli.main import main
from lightrft.config import TrainConfig
from lightrft.tools.invariance import compiled
from lightrft.tools.invariance.cells import FP32_BOUNDS, Cell
from lightrft.tools.invariance.verdict import (
    CompileVerdict,
    keep_verdict,
    known_verdicts,
    say_verdict,
)
from lightrft.tools.model_presets import write_tiny_model

pytestmark = pytest.mark.shard("command_line")

FASTER = CompileVerdict(0.3, 0.2, 2048)
SLOWER = CompileVerdict(0.2, 0.199, 2048)
WRONG = CompileVerdict(0.3, 0.2, 2048, "differs by more than rounding: loss 1.0e-01")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compiled") / "model"
    write_tiny_model(folder, "tiny-llama", seed=1)
    return str(folder)


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def lines_of(model, **options):
    lines = []
    config = TrainConfig(**{"pretrain": model, "fsdp": True, **options})
    assert say_verdict(config, SimpleNamespace(print=lines.append)) is config
    return lines


def test_a_run_says_in_one_line_what_was_faster_here_and_stays_as_it_is(model):
    assert lines_of(model) == []
    keep_verdict(model, "inductor", FASTER)
    keep_verdict(model, "aot_eager", CompileVerdict(0.3, 0.25, 2048))
    (line,) = lines_of(model)
    assert line == (
        "--compile_backend inductor was tried here: 0.2 s in place of 0.3 s a step of 2048 tokens, "
        "the same results within rounding"
    )
    assert lines_of(model, fsdp=False) == []
    assert lines_of(model, compile_backend="inductor") == []


@pytest.mark.parametrize("verdict", [SLOWER, WRONG, CompileVerdict(problem="RuntimeError: no gcc")])
def test_what_is_slower_or_wrong_is_not_proposed(verdict, model):
    keep_verdict(model, "inductor", verdict)
    assert lines_of(model) == []


def test_a_run_that_compiles_wrongly_is_warned(model):
    keep_verdict(model, "inductor", WRONG)
    (line,) = lines_of(model, compile_backend="inductor")
    assert line.startswith("warning: compile_backend inductor was tried here: differs by more than")


def test_a_verdict_is_of_this_torch_and_of_this_shape(model, tmp_path, monkeypatch):
    keep_verdict(model, "inductor", FASTER)
    other = tmp_path / "other"
    write_tiny_model(other, "tiny-qwen3", seed=1)
    assert dict(known_verdicts(str(other))) == {}
    # Another checkpoint of the same shape has it.
    write_tiny_model(tmp_path / "trained", "tiny-llama", seed=2)
    assert dict(known_verdicts(str(tmp_path / "trained"))) == {"inductor": FASTER}
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    assert dict(known_verdicts(model)) == {}


def test_a_damaged_verdict_is_none(model, tmp_path):
    keep_verdict(model, "inductor", FASTER)
    (file,) = (tmp_path / "cache/lightrft/compile").iterdir()
    file.write_text(file.read_text().replace("0.2", "0.1"))
    assert lines_of(model) == []


def tried(monkeypatch, tmp_path, model, measure):
    """The verdict of planted measurements of the compiled way."""

    def measured(rank, world_size, cells):
        return [measure() if cells[0][0].compiler else FP32_BOUNDS]

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(compiled, "write_reference", lambda *_: None)
    monkeypatch.setattr(compiled, "measure_cells", measured)
    monkeypatch.setattr(compiled, "seconds_of_step", lambda *_: 0.5)
    cells = [Cell(backend="fsdp"), Cell(backend="fsdp", compiler="inductor")]
    compiled.try_cells(0, 1, cells, model, tmp_path / "verdict.json")
    return CompileVerdict(**json.loads((tmp_path / "verdict.json").read_text()))


def test_results_beyond_rounding_and_errors_of_a_compiler_are_problems(
    monkeypatch, tmp_path, model
):
    def fails():
        raise RuntimeError("no compiler\nin many lines")

    good = tried(monkeypatch, tmp_path, model, lambda: FP32_BOUNDS)
    assert (good.problem, good.compiled_seconds, good.tokens) == ("", 0.5, 1024)
    wrong = tried(
        monkeypatch, tmp_path, model, lambda: type(FP32_BOUNDS)(1.0, 0.0, 0.0, 0.5, 0.0, 0.0)
    )
    assert wrong.problem == "differs by more than rounding: outputs 1.0e+00, gradient 5.0e-01"
    failed = tried(monkeypatch, tmp_path, model, fails)
    assert failed == CompileVerdict(problem="RuntimeError: no compiler")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_doctor_compares_a_step_with_a_compiler_and_keeps_the_verdict(model, capsys):
    assert main(["doctor", "--compile_backend", "aot_eager", "--pretrain", model]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("ok  compile_backend aot_eager: ")
    assert line.endswith("a step of 1024 tokens, the same results within rounding")
    assert dict(known_verdicts(model))["aot_eager"].compiled_seconds > 0
