"""The export of a run's final model, on models written here."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file
from tests.runs import row_options, train, write
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lightrft.cli.main import main
from lightrft.cli.preflight import written_bytes
from lightrft.config import TrainConfig
from lightrft.models.adapter_files import WEIGHTS_FILE
from lightrft.tools.export.exported_model import ExportError, compare_models, differing_tensors
from lightrft.tools.model_presets import write_tiny_model


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        write_tiny_model(folder / str(seed), "tiny-qwen3", seed)
    return folder


@pytest.fixture
def run(tmp_path, models):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "model").symlink_to(models / "1")
    (folder / "config.toml").write_text(f'pretrain = "{models / "0"}"\nseed = 5\n')
    (folder / "metrics.jsonl").write_text(
        '{"step": 1, "reward": 0.25}\n{"step": 2, "reward": 0.5}\n'
    )
    (folder / "samples.jsonl").write_text(json.dumps({"step": 1, "prompt": "say aaa"}) + "\n")
    return folder


def export(run, target):
    """Code of the command."""
    return main(["export", str(run), str(target)])


def test_the_exported_model_is_the_trained_one(tmp_path, run, capsys):
    target = tmp_path / "out/exported"
    assert export(run, target) == 0
    assert "weights equal, logits of one prompt within" in capsys.readouterr().out
    names = {path.name for path in target.iterdir()}
    assert {"model.safetensors", "config.json", "README.md"} <= names
    assert [path.name for path in target.parent.iterdir()] == ["exported"]
    trained = AutoModelForCausalLM.from_pretrained(run / "model").eval()
    exported = AutoModelForCausalLM.from_pretrained(target).eval()
    assert differing_tensors(trained.state_dict(), exported.state_dict()) == []
    token_ids = AutoTokenizer.from_pretrained(target)("say aaa", return_tensors="pt").input_ids
    with torch.no_grad():
        torch.testing.assert_close(trained(token_ids).logits, exported(token_ids).logits)


def test_a_place_that_can_be_none_is_one_line_before_anything_is_read(run, capsys):
    assert export(run, "/proc/x") == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert "/proc/x cannot be written (No such file or directory): choose another" in line


def test_the_model_card_tells_what_was_done_and_no_path(tmp_path, run):
    assert export(run, tmp_path / "out") == 0
    card = (tmp_path / "out/README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "for 2 steps" in card
    assert "Mean training reward: 0.250 at first, 0.500 at last." in card
    assert "| `seed` | `5` |" in card
    assert str(tmp_path) not in card
    assert "base_model" not in card


def test_a_base_model_of_the_hub_is_named(tmp_path, run):
    (run / "config.toml").write_text('pretrain = "owner/name"\n')
    assert export(run, tmp_path / "out") == 0
    assert 'base_model: "owner/name"\n' in (tmp_path / "out/README.md").read_text()


def test_a_base_model_inside_of_a_moved_run_is_found_and_not_taken_for_a_hub_name(
    tmp_path, run, models, capsys
):
    (run / "config.toml").write_text('pretrain = "old/start"\noutput_dir = "old"\n')
    (run / "start").symlink_to(models / "0")
    assert export(run, tmp_path / "out") == 0
    assert "base_model" not in (tmp_path / "out/README.md").read_text()
    (run / "start").unlink()
    (run / "start").symlink_to(models / "1")
    assert export(run, tmp_path / "again") == 8
    assert "nothing was learned" in capsys.readouterr().err


def test_a_model_that_learned_nothing_is_not_exported(tmp_path, run, models, capsys):
    (run / "config.toml").write_text(f'pretrain = "{models / "1"}"\n')
    assert export(run, tmp_path / "out") == 8
    assert "nothing was learned" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


LEARNED = torch.full((2, 3), 0.5)
NORM, HEAD = (f"base_model.model.{name}.weight" for name in ("model.norm", "lm_head"))


@pytest.mark.parametrize(
    "factor, whole, starts, code",
    [
        (0 * LEARNED, (), False, 8),
        (LEARNED, (), False, 0),
        (LEARNED, (), True, 8),
        # Parts that are trained whole are compared with the base: norms begin as ones.
        (0 * LEARNED, (NORM,), False, 8),
        (0 * LEARNED, (NORM, HEAD), False, 0),
    ],
)
def test_adapters_that_learned_nothing_are_not_exported(
    tmp_path, run, models, factor, whole, starts, code
):
    """The base in 4 bits differs from its file in any case."""
    adapters = {
        "base_model.model.q.lora_A.weight": LEARNED,
        "base_model.model.q.lora_B.weight": factor.clone(),
        **{name: LEARNED.clone() for name in whole},
    }
    (run / "model").unlink()
    shutil.copytree(models / "1", run / "model")
    (run / "model/adapter").mkdir()
    save_file(adapters, run / "model/adapter" / WEIGHTS_FILE)
    if starts:
        save_file(
            {name: value.bfloat16() for name, value in adapters.items()}, tmp_path / WEIGHTS_FILE
        )
        with (run / "config.toml").open("a") as file:
            file.write(f'lora_path = "{tmp_path}"\n')
    assert export(run, tmp_path / "out") == code
    if starts:  # without its adapters a model is compared with the base alone
        shutil.rmtree(run / "model/adapter")
        assert export(run, tmp_path / "lost") == 0


@pytest.mark.full
@pytest.mark.parametrize("rank, bits", [(0, None), (4, None), (4, "nf4")])
def test_a_run_writes_what_its_start_expects_and_is_not_exported_if_it_learned_nothing(
    tmp_path, models, rank, bits
):
    rows = write(tmp_path / "rows.jsonl", [{"text": "say a"}] * 4)
    changes = {"fsdp": True, "actor_learning_rate": 0.0, "lora_rank": rank}
    options = row_options(models / "0", rows, tmp_path / "run", quantize=bits)
    train({"stage": "sft", **options, **changes})
    expected = written_bytes(TrainConfig(**options | changes), [313_344])
    for place, num_bytes in zip(("checkpoints", "model"), expected, strict=True):
        files = [*(tmp_path / "run" / place).rglob("*.safetensors")]
        # Besides numbers there are headers and states of generators.
        assert 0 <= sum(file.stat().st_size for file in files) - num_bytes < 45_000
    assert export(tmp_path / "run", tmp_path / "out") == 8


def test_models_that_differ_in_weights_or_in_logits_alone_are_told_apart(models):
    trained, same, other = (
        AutoModelForCausalLM.from_pretrained(models / seed).eval() for seed in "110"
    )
    tokenizer = AutoTokenizer.from_pretrained(models / "1")
    assert compare_models(trained, same, tokenizer, "say aaa") < 1e-5
    with pytest.raises(ExportError, match="tensors of the exported model differ"):
        compare_models(trained, other, tokenizer, "say aaa")
    config = AutoConfig.from_pretrained(models / "1")
    config.rms_norm_eps = 1e-2  # of no weight, but of every logit
    altered = AutoModelForCausalLM.from_pretrained(models / "1", config=config).eval()
    with pytest.raises(ExportError, match="logits of the exported model differ"):
        compare_models(trained, altered, tokenizer, "say aaa")


@pytest.mark.parametrize("case", ["missing", "not a run", "no model", "full"])
def test_what_cannot_be_exported_is_one_line_and_exit_code_2(tmp_path, run, capsys, case):
    source, target = run, tmp_path / "out"
    if case == "missing":
        source = tmp_path / "nowhere"
    elif case == "not a run":
        source = tmp_path
    elif case == "no model":
        (run / "model").unlink()
    else:
        target = run
    assert export(source, target) == 2
    assert capsys.readouterr().err.count("\n") == 1
