"""The recipes of the strategy guide run as printed, scaled down to four processes on a CPU.

The test appends the model, data, batch sizes and what a CPU needs (the embedded engine); a later
flag wins over an earlier one.
"""

import runpy
import shlex
import sys

import pytest
from tests.contracts.recipes import RECIPES
from tests.programs import run_python
from tests.runs import rollout_options, say_rows, tiny_models, words, write_inputs

pytestmark = pytest.mark.shard("training")

REWARD = """
def score(responses):
    return [float(sum(map(ord, text)) % 2) for text in responses]
"""


@pytest.mark.parametrize("name", ["train.py", "train_vl.py"])
def test_an_example_is_short_and_takes_a_learning_rate(repository, name, monkeypatch, capsys):
    script = repository / "examples" / name
    assert len(script.read_text().splitlines()) < 60
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(script), run_name="__main__")
    assert "--actor_learning_rate" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_the_recipe_trains_on_four_processes(tmp_path, repository, recipe):
    from safetensors.torch import load_file

    write_inputs(tiny_models(tmp_path, "model"), say_rows(16), reward=REWARD)
    printed = shlex.split(RECIPES[recipe].replace("\\\n", " "), comments=True)
    script = repository / "examples" / printed[1]
    appended = rollout_options(
        tmp_path,
        rollout_batch_size=8,
        n_samples_per_prompt=2,
        generate_max_len=6,
        micro_train_batch_size=1,
        bf16=True,
        save_path=tmp_path / "trained",
        log_dir=tmp_path / "logs",
    )
    for name in ("fsdp", "output_dir", "prompt_max_len", "init_kl_coef"):
        del appended[name]  # the recipe's choice, and what the examples have no flag for
    finished = run_python(
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "4",
        script,
        *printed[2:],
        *words(appended),
        timeout_seconds=1200,
        cwd=tmp_path,
        code=0,
    )
    assert "step 2: reward" in finished.stdout
    before, after = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "model", tmp_path / "trained")
    )
    assert any(not before[name].to(after[name].dtype).equal(after[name]) for name in after)
    if "--plot_every" in printed:
        assert (tmp_path / "logs/gen_len_step_0.png").exists()
    # Nothing that the recipe asks for is ignored without a word.
    ignored = [line for line in finished.stdout.splitlines() if "option without effect" in line]
    for flag in ("fsdp_cpu_offload", "use_mp_opt", "zero_stage"):
        assert not any(flag in line for line in ignored), ignored
