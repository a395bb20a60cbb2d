"""Exported reward models whose scores have mean 0 and deviation 1, for every reader."""

import copy
import json

import pytest
import torch
from tests.stages.reward.reward_world import answers_of, pairs, run, scores_of
from tests.stages.reward.test_score_heads import scorer
from transformers import AutoModelForSequenceClassification
from transformers.models.gpt_neox import GPTNeoXConfig

from lightrft.cli.main import main
from lightrft.models import RewardModel
from lightrft.tools.export.normalised_scores import NormalisingError, normalise_scores


@pytest.mark.full
@pytest.mark.parametrize("pooling, way", [("last", "deviation"), ("attention", "standard")])
def test_exported_scores_are_normalised_wherever_they_are_read(
    tmp_path, model, rows, pooling, way, capsys
):
    texts = answers_of(pairs(24))
    run(model, rows, tmp_path / "run", max_epochs=3, reward_pooling=pooling)
    plain = scores_of(tmp_path / "run/model", texts)
    stored = json.loads((tmp_path / "run/model/config.json").read_text())
    arguments = ["export", str(tmp_path / "run"), str(tmp_path / "out")]
    assert main([*arguments, f"--normalize_score={way}"]) == 0
    scores = scores_of(tmp_path / "out", texts)
    assert scores.std(correction=0).item() == pytest.approx(1.0, abs=1e-3)
    mean = 0.0 if way == "standard" else stored["score_mean"] / stored["score_std"]
    assert scores.mean().item() == pytest.approx(mean, abs=1e-3)
    shift = stored["score_mean"] if way == "standard" else 0.0
    torch.testing.assert_close(scores, (plain - shift) / stored["score_std"], rtol=1e-4, atol=1e-4)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["score_std"], config["score_mean"]) == (1.0, pytest.approx(mean))
    assert "read back: weights equal" in capsys.readouterr().out


def test_a_mean_that_no_weight_can_move_is_refused(tmp_path, model, rows, capsys):
    run(model, rows, tmp_path / "run", max_steps=2)
    arguments = ["export", str(tmp_path / "run"), str(tmp_path / "out")]
    assert main([*arguments, "--normalize_score", "standard"]) == 2
    said = capsys.readouterr().err
    assert (
        "neither the head nor the final norm of Qwen3ForSequenceClassification has a bias" in said
    )
    assert not (tmp_path / "out").exists()
    config = tmp_path / "run/model/config.json"
    values = json.loads(config.read_text())
    for change, words in (
        ({"score_std": 0.0}, "deviation 0 cannot be normalised"),
        ({"score_mean": None}, "has no score_mean and score_std"),
    ):
        config.write_text(json.dumps(values | change))
        assert main([*arguments, "--normalize_score", "deviation"]) == 2
        assert words in capsys.readouterr().err


def neox():
    """A reward model whose final norm has a bias, and whose head has none."""
    config = GPTNeoXConfig(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        num_labels=1,
    )
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value) * 0.1)
    model.config.score_mean, model.config.score_std = 1.75, 0.25
    return RewardModel(model).eval()


def test_the_bias_of_a_final_norm_takes_the_mean():
    made = neox()
    before = copy.deepcopy(made)
    assert normalise_scores(made, "standard") < 1e-5
    ids = torch.randint(60, (5, 9), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = (before.model(input_ids=ids[:1]).logits - 1.75) / 0.25
        torch.testing.assert_close(
            made.model(input_ids=ids[:1]).logits, expected, rtol=0, atol=1e-5
        )
    assert (made.config.score_mean, made.config.score_std) == (0.0, 1.0)


def test_a_head_that_reads_more_than_the_norm_is_found():
    made = neox()
    norm = made.pretrained.final_layer_norm
    # Planted: what follows the norm doubles what it gives, once the change is made.
    calls = []

    def doubled(module, args, output):
        calls.append(1)
        return output if len(calls) < 3 else 2 * output

    norm.register_forward_hook(doubled)
    with pytest.raises(NormalisingError, match="the head does not read the final norm alone"):
        normalise_scores(made, "standard")


def test_several_scores_have_no_common_mean():
    made = scorer("last", {"a": 1.0, "b": 1.0})
    made.config.score_mean, made.config.score_std = 0.5, 2.0
    with pytest.raises(NormalisingError, match="several scores have no common mean"):
        normalise_scores(made, "deviation")
