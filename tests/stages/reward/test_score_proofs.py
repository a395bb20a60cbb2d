"""What a run has written scores as what it trained, and what does not is named."""

import json

import pytest
from safetensors.torch import load_file, save_file
from tests.stages.reward.reward_world import LABELLED, PAIRS, RANKED, STEPS, build_stage
from tests.stages.stage_world import STILL

from lightrft.models.loading import ModelLoadError
from lightrft.strategy import get_fake_strategy


def saved(folder, items=PAIRS, **changes):
    """A stage, and the folder with its model."""
    strategy = get_fake_strategy(STILL)
    stage = build_stage(strategy, items, **changes)
    strategy.save_model(stage.models.main.model, None, str(folder))
    strategy.finish_saving()
    return stage


@pytest.mark.parametrize("items", [PAIRS, LABELLED, RANKED, STEPS], ids=len)
def test_what_is_written_scores_as_it_was_trained(tmp_path, items):
    saved(tmp_path, items).prove_saved(tmp_path)


def test_merged_adapters_score_as_they_were_trained(tmp_path):
    stage = saved(tmp_path, lora_rank=2, target_modules=("q_proj",))
    stage.prove_saved(tmp_path)
    model = stage.models.main.model
    for name, value in model.named_parameters():
        if ".lora_B." in name:
            value.data.mul_(2)
    with pytest.raises(ModelLoadError, match="does not score as the one that was trained"):
        stage.prove_saved(tmp_path)


def test_another_head_is_found(tmp_path):
    stage = saved(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    weights["score.weight"] *= 1.01
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match="read by lightrft it has"):
        stage.prove_saved(tmp_path)


def test_an_end_that_transformers_takes_for_padding_is_found(tmp_path):
    stage = saved(tmp_path)
    shortest = min((row for pair in PAIRS for row in pair.rows), key=lambda row: len(row.token_ids))
    config = json.loads((tmp_path / "config.json").read_text())
    config["pad_token_id"] = int(shortest.token_ids[-1])
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="read by transformers it has"):
        stage.prove_saved(tmp_path)
