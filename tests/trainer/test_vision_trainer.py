"""The trainer of vision-language models on rows with and without images."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.batches import copies
from tests.models.vision.tiny_families import write_tiny_vision_model
from tests.models.vision.tiny_world import Batch
from tests.runs import lines
from tests.trainer.vision_world import build_vision_trainer, scorer_folder, vision_options

from lightrft.config import ConfigError, TrainConfig
from lightrft.engines.media.media import RowMedia
from lightrft.models import Actor, Critic, RewardModel
from lightrft.models.loading import ModelLoadError, load_causal_lm, load_trunk
from lightrft.models.lora import LoraActor, target_layers
from lightrft.models.sequence_model import freeze, has_prefix
from lightrft.run.assembly import run_training

pytestmark = pytest.mark.shard("vision")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_tiny_vision_model(path, "tiny-qwen2.5-vl", seed=1)
    return str(path)


def three_steps(trainer, strategy):
    """Metrics of three steps, written as the seeds write them."""
    found = []
    for step in range(3):
        trainer.make_experience()
        metrics = trainer.ppo_train(step)
        assert metrics["engine_hash"] == strategy.last_weight_sync.engine_hash
        found.append(metrics)
    return found


def check_steps(steps):
    """Every step moved the weights and the engine's, and both agreed on all kinds of rows."""
    assert [metrics["weights_version"] for metrics in steps] == [1, 2, 3]
    assert len({metrics["engine_hash"] for metrics in steps}) == 3
    for metrics in steps:
        for name in ("grad_norm", "critic_grad_norm", "critic_loss"):
            assert metrics[name] > 0
        for kind in ("", "/text", "/media"):
            assert 0 < metrics[f"logprob_diff_mean{kind}"] < 1e-5
        assert metrics["logprob_diff_max"] == max(
            metrics["logprob_diff_max/text"], metrics["logprob_diff_max/media"]
        )
    assert steps[0]["kl"] == pytest.approx(0, abs=1e-9)
    assert steps[2]["kl"] > 1e-7


def weights_of(strategy, model):
    return copies(strategy.unwrap_model(model))


@pytest.mark.full
def test_three_steps_move_text_and_tower_of_all_models(model, data):
    trainer, strategy = build_vision_trainer(model, data, is_fake=True)
    before = weights_of(strategy, trainer.actor), weights_of(strategy, trainer.critic)
    check_steps(three_steps(trainer, strategy))
    for start, module in zip(before, (trainer.actor, trainer.critic), strict=True):
        moved = {n for n, p in weights_of(strategy, module).items() if not torch.equal(p, start[n])}
        assert any("visual" in name for name in moved)
        assert any("language_model" in name for name in moved)
    strategy.close()


def moved_names(model, trained):
    """Tensors that differ between two folders with the same ones."""
    before, after = (load_file(f"{each}/model.safetensors") for each in (model, trained))
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.full
@pytest.mark.parametrize("adapters", [{}, {"lora_rank": 4, "target_modules": ("all-linear",)}])
def test_a_frozen_tower_stays_and_is_accounted_for(adapters, model, data, tmp_path):
    """The tower is as it was, the rest moved, and the engine followed it."""
    frozen = {"freeze_prefix": ("visual",), "gradient_checkpointing": True, "fsdp": True}
    config = TrainConfig(**vision_options(data, model, tmp_path / "run", **frozen | adapters))
    assert run_training(config).verdict.startswith("trained")
    moved = moved_names(model, config.model_dir)
    assert moved
    assert not any("visual" in name for name in moved)
    steps = lines(tmp_path / "run/metrics.jsonl")
    assert [step["weights_version"] for step in steps] == [1, 2]
    # The second step was sampled after a sync that left the tower out.
    assert all(step["logprob_diff_max"] < 1e-4 for step in steps)


@pytest.mark.parametrize("kind", [Actor, Critic])
@pytest.mark.parametrize("prefix", ["visual", r"visual(?!\.merger)"])
def test_what_is_frozen_gets_no_optimizer_state(kind, prefix, model):
    """A prefix, and the tower of Qwen-VL without its projector, which lies within it."""
    module = kind.from_pretrained(model)
    freeze(module, (prefix,))
    frozen = {name for name, value in module.named_parameters() if not value.requires_grad}
    tower = {name for name, _ in module.named_parameters() if "visual." in name}
    projector = {name for name in tower if "visual.merger" in name}
    assert frozen == (tower if prefix == "visual" else tower - projector)
    assert frozen < {name for name, _ in module.named_parameters()}
    assert projector


def test_a_prefix_is_whole_parts_of_a_name(model):
    assert has_prefix("model.visual.blocks.0", ["visual"])
    assert has_prefix("visual.blocks.0", ["model.visual.blocks"])
    assert not has_prefix("model.visual_norm.weight", ["visual"])
    assert not has_prefix("model.language_model.visual.weight", ["visual"])
    with pytest.raises(ConfigError, match=r"begin with 'vision'; there are .*visual\.blocks"):
        freeze(Actor.from_pretrained(model), ("vision",))
    with pytest.raises(ConfigError, match="leave nothing"):
        freeze(Actor.from_pretrained(model), ("model", "lm_head"))
    with pytest.raises(ConfigError, match="is no regular expression"):
        freeze(Actor.from_pretrained(model), ("visual(",))


@pytest.mark.parametrize(
    "target, parts",
    [
        ("language_model.*", {"language_model"}),
        (r"visual\.merger.*", {"visual.merger"}),
        (r"visual\.blocks.*", {"visual.blocks"}),
        ("q_proj", {"language_model"}),
    ],
)
def test_adapters_lie_on_the_part_that_is_named(model, target, parts):
    found = target_layers(load_causal_lm(model), (target,))
    known = ("language_model", "visual.merger", "visual.blocks")
    assert {part for name in found for part in known if part in name} == parts
    with pytest.raises(ConfigError, match="no linear layer is called none"):
        target_layers(load_causal_lm(model), (target, "none.*"))


@pytest.mark.parametrize("frozen, has_tower", [((), True), (("visual",), False)])
def test_adapters_of_a_tower_follow_what_is_frozen(frozen, has_tower, model):
    actor = LoraActor(load_causal_lm(model), TrainConfig(lora_rank=2, freeze_prefix=frozen))
    adapted = {name for name, value in actor.named_parameters() if value.requires_grad}
    assert any("language_model" in name for name in adapted)
    assert any("visual" in name for name in adapted) == has_tower


def test_a_reward_model_sees_the_images(model, data, tmp_path):
    """Its scores are the head on transformers' own hidden states of each row alone."""
    path, weight = scorer_folder(model, tmp_path / "scorer")
    scorer = RewardModel.from_pretrained(path).eval()
    trainer, strategy = build_vision_trainer(model, data, is_fake=True, reward_model=scorer)
    rollouts = trainer.make_experience().rollouts
    own = Batch(load_causal_lm(model), trainer.stage.maker.encoder, prompts=[(1, 2)])
    trunk = load_trunk(model)
    seen = []
    for row, prompt in enumerate(rollouts.media.prompts):
        own.rows = [rollouts.token_ids[row][rollouts.attention_mask[row]]]
        own.media = RowMedia((prompt,))
        with torch.no_grad():
            hidden = trunk(**own.arguments(0), use_cache=False).last_hidden_state[0, -1]
        assert float(weight[0] @ hidden) == pytest.approx(float(rollouts.rewards[row]), abs=1e-4)
        seen.append(prompt is not None)
    assert 0 < sum(seen) < len(seen)
    strategy.close()


def test_a_reward_model_of_text_is_not_left_blind(model, data, tmp_path):
    class Classifier(torch.nn.Module):
        def forward(self, token_ids, attention_mask):
            return token_ids.sum(dim=1).float()

    trainer, strategy = build_vision_trainer(model, data, is_fake=True, reward_model=Classifier())
    with pytest.raises(ValueError, match=r"model cannot see the images.*--text_only"):
        trainer.make_experience()
    strategy.close()


def test_a_scorer_without_its_head_is_refused(model, tmp_path):
    with pytest.raises(ModelLoadError, match=r"no trained head: score.safetensors"):
        RewardModel.from_pretrained(model)
    path, _ = scorer_folder(model, tmp_path / "scorer")
    save_file({"weight": torch.zeros(1, 3)}, tmp_path / "scorer/score.safetensors")
    with pytest.raises(ModelLoadError, match=r"expected one tensor `weight` of shape \(1, 128\)"):
        RewardModel.from_pretrained(path)
