"""Scalar reward models: one number at the last token, and clear refusals."""

import pytest
import torch
from tests.models.all_types import types

from lightrft.models.loading import ModelLoadError
from lightrft.models.reward_model import RewardModel
from lightrft.tools.model_presets import PRESETS, byte_level_tokenizer


def write_classifier(folder, num_labels=1):
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(4)
    config = PRESETS["tiny-qwen3"]()
    config.num_labels = num_labels
    config.pad_token_id = 256
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    byte_level_tokenizer().save_pretrained(folder)
    return str(folder)


def test_models_without_one_trained_head_are_refused(tmp_path, checkpoints):
    with pytest.raises(ModelLoadError, match="one label: got num_labels = 3"):
        RewardModel.from_pretrained(write_classifier(tmp_path / "three", num_labels=3))
    with pytest.raises(ModelLoadError, match="one label: got num_labels = 2"):
        RewardModel.from_pretrained(checkpoints["tiny-qwen3"])
    import json
    from pathlib import Path
    from shutil import copytree

    folder = Path(copytree(checkpoints["tiny-qwen3"], tmp_path / "headless"))
    config = json.loads((folder / "config.json").read_text())
    config["id2label"], config["label2id"] = {"0": "reward"}, {"reward": 0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"1 missing \(score\.weight\)"):
        RewardModel.from_pretrained(str(folder))


def test_adapters_are_saved_with_the_head_that_was_trained_beside_them(tmp_path):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForSequenceClassification

    from lightrft.config import TrainConfig
    from lightrft.models.reward_model import LoraRewardModel

    path = write_classifier(tmp_path / "base")
    config = TrainConfig(pretrain=path, lora_rank=2)

    def with_adapters(config):
        return LoraRewardModel(RewardModel.from_pretrained(path).model, config).eval()

    model = with_adapters(config)
    assert model.coverage == "adapters on 14 layers"
    with torch.no_grad():
        for value in model.parameters():
            value += value.requires_grad * 0.1
    model.save_adapters(dict(model.state_dict()), tmp_path / "adapter")
    base = AutoModelForSequenceClassification.from_pretrained(path)
    of_peft = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    again = with_adapters(config.replaced({"lora_path": str(tmp_path / "adapter")}))
    ids = torch.tensor([[5, 9, 33]])
    with torch.no_grad():
        score = model(ids, ids > 0)
        assert abs(score - RewardModel.from_pretrained(path).eval()(ids, ids > 0)) > 0.1
        torch.testing.assert_close(of_peft(ids).logits[:, 0], score, rtol=0, atol=2e-5)
        torch.testing.assert_close(again(ids, ids > 0), score, rtol=0, atol=0)


# Without a classifier in transformers, and with one whose head has another name.
@pytest.mark.parametrize("model_type", ["granite", "mamba", "lfm2", "ctrl", "gpt_neox"])
def test_a_type_without_a_classifier_has_its_head_beside_the_trunk(model_type, tmp_path):
    types.tiny_model(model_type).save_pretrained(tmp_path / "model")
    made = RewardModel.with_new_head(str(tmp_path / "model"), seed=0).eval()
    made.save_pretrained(tmp_path / "reward")
    again = RewardModel.from_pretrained(str(tmp_path / "reward")).eval()
    ids = torch.arange(5, 21).view(2, 8)
    real = torch.arange(8) < torch.tensor([[8], [5]])
    with torch.no_grad():
        scores = again(ids, real)
        torch.testing.assert_close(scores, made(ids, real), rtol=0, atol=1e-5)
        alone = again(ids[1:, :5], real[1:, :5])
    torch.testing.assert_close(scores[1:], alone, rtol=0, atol=1e-5)
    assert scores[0] != scores[1]
