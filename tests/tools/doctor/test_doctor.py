"""`lightrft doctor --invariance` measures a model and says by its exit code whether it is exact."""

from dataclasses import replace

import pytest

from lightrft.cli.main import main
from lightrft.tools.doctor import doctor_command as doctor
from lightrft.tools.invariance.cells import FP32_BOUNDS, Cell, Deviations
from lightrft.tools.model_presets import write_tiny_model

pytestmark = pytest.mark.shard("command_line")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doctor") / "model"
    write_tiny_model(folder, "tiny-llama", seed=1)
    return str(folder)


def lines_of(output):
    return [line for line in output.splitlines() if line.startswith(("ok ", "BAD ", "-- "))]


@pytest.mark.full
def test_a_sound_model_gives_the_same_step_in_every_way_of_one_process(model, capsys):
    assert main(["doctor", "--invariance", "--pretrain", model, "--nproc_per_node", "1"]) == 0
    output = capsys.readouterr().out
    assert len(lines_of(output)) == 4
    assert all(line.startswith("ok") for line in lines_of(output))
    assert "4 of 4 ways give the same step" in output


@pytest.mark.slow
def test_two_processes_try_every_backend(model, capsys):
    assert main(["doctor", "--invariance", "--pretrain", model]) == 0
    output = capsys.readouterr().out
    assert len(lines_of(output)) >= 6
    assert "fsdp x2, micro 4, packed, sp 2, recomputed" in output


def test_in_bfloat16_the_plainest_way_gives_the_bounds(monkeypatch, capsys):
    import lightrft.tools.invariance.measure as invariance

    names = Deviations.__dataclass_fields__
    plain = Deviations(**dict.fromkeys(names, 0.01))
    asked = {}

    def examine(path, **options):
        asked.update(options)
        yield Cell(bf16=True), plain
        yield Cell(bf16=True, micro_batch_size=2), replace(plain, gradient=0.029)
        yield Cell(bf16=True, micro_batch_size=1), replace(plain, gradient=0.031)

    monkeypatch.setattr(invariance, "examine", examine)
    arguments = ["doctor", "--invariance", "--bf16", "--pretrain", "m", "--nproc_per_node", "1"]
    assert main(arguments) == 8
    output = capsys.readouterr().out
    assert asked["bf16"]
    assert [line[:3].strip() for line in lines_of(output)] == ["ok", "ok", "BAD"]
    assert "3.1e-02!" in output
    assert "2 of 3 ways give the same step" in output


def test_a_deviation_is_marked_and_gives_exit_code_8(monkeypatch, capsys):
    import lightrft.tools.invariance.measure as invariance

    good = Deviations(**dict.fromkeys(Deviations.__dataclass_fields__, 1e-09))
    results = [
        (Cell(), good),
        (Cell(packs_samples=True), "Odd has layers of type conv"),
        (Cell(micro_batch_size=2), replace(good, gradient=2 * FP32_BOUNDS.gradient)),
    ]
    monkeypatch.setattr(invariance, "examine", lambda *_, **__: iter(results))
    assert main(["doctor", "--invariance", "--pretrain", "m", "--nproc_per_node", "2"]) == 8
    output = capsys.readouterr().out
    first, second, third = lines_of(output)
    assert first.startswith("ok")
    assert "layers of type conv" in second
    assert third.startswith("BAD")
    assert "2.0e-06!" in third
    assert "1 of 2 ways give the same step; 1 not possible with this model" in output


def test_rounding_of_the_plainest_way_widens_the_bounds_and_an_error_of_it_does_not():
    good = Deviations(**dict.fromkeys(Deviations.__dataclass_fields__, 7e-7))
    assert doctor.bounds_of([(Cell(), good)]).gradient == pytest.approx(2.1e-6)
    assert doctor.bounds_of([(Cell(), replace(good, gradient=1e-5))]) == FP32_BOUNDS


def test_two_processes_are_the_default_without_gpus():
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert doctor.default_processes() == 2
