"""The recipes of the strategy guide run as printed, scaled down to four processes on a CPU.

The test appends the model, data, batch sizes and what a CPU needs (the embedded engine); a later
flag wins over an earlier one.
"""

from __future__ import annotations

import json
import runpy
import shlex
import subprocess
import sys

import pytest
from tests.contracts.recipes import RECIPES
from tests.machine import seconds
from tests.ranks import find_free_port

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
@pytest.mark.multiprocess
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_the_recipe_trains_on_four_processes(tmp_path, repository, recipe):
    from safetensors.torch import load_file

    from lightrft.tools.model_presets import write_tiny_model

    model = tmp_path / "model"
    write_tiny_model(str(model), "tiny-qwen3", seed=1)
    rows = [json.dumps({"input": f"say {'aeiou'[i % 5] * (1 + i % 3)}"}) for i in range(16)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    (tmp_path / "reward.py").write_text(REWARD)
    words = shlex.split(RECIPES[recipe].replace("\\\n", " "), comments=True)
    script = repository / "examples" / words[1]
    appended = [
        "--pretrain",
        model,
        "--prompt_data",
        tmp_path / "train.jsonl",
        "--reward_fn",
        f"{tmp_path / 'reward.py'}:score",
        "--save_path",
        tmp_path / "trained",
        "--max_steps",
        2,
        "--rollout_batch_size",
        8,
        "--n_samples_per_prompt",
        2,
        "--generate_max_len",
        6,
        "--train_batch_size",
        8,
        "--micro_train_batch_size",
        1,
        "--log_dir",
        tmp_path / "logs",
        "--engine_type",
        "hf",
        "--bf16",
        "--actor_learning_rate",
        "1e-3",
    ]
    finished = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc_per_node",
            "4",
            "--master_port",
            str(find_free_port()),
            script,
            *words[2:],
            *map(str, appended),
        ],
        capture_output=True,
        text=True,
        timeout=seconds(1200),
        check=False,
        cwd=tmp_path,
    )
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-6000:]
    assert "step 2: reward" in finished.stdout
    before, after = (
        load_file(folder / "model.safetensors") for folder in (model, tmp_path / "trained")
    )
    assert any(not before[name].to(after[name].dtype).equal(after[name]) for name in after)
    if "--plot_every" in words:
        assert (tmp_path / "logs" / "gen_len_step_0.png").exists()
    # Nothing that the recipe asks for is ignored without a word.
    ignored = [line for line in finished.stdout.splitlines() if "option without effect" in line]
    for flag in ("fsdp_cpu_offload", "use_mp_opt", "zero_stage"):
        assert not any(flag in line for line in ignored), ignored
