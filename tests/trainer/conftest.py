"""A tiny model, a toy reward, and trainers in one process."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from lightrft.config import TrainConfig
from lightrft.datasets.types import Prompt
from lightrft.models import Actor, Critic
from lightrft.models.loading import load_tokenizer
from lightrft.rewards.types import RewardResult
from lightrft.strategy import get_fake_strategy
from lightrft.tools.model_presets import write_tiny_model
from lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainer


class VowelReward:
    """Share of vowels among the characters of a response; needs no label."""

    name = "vowels"
    needs_labels = False

    def score(self, prompts, responses, labels, columns):
        results = []
        for response in responses:
            share = sum(c in "aeiou" for c in response) / max(len(response), 1)
            lower = sum(c.islower() for c in response) / max(len(response), 1)
            results.append(RewardResult(share + 0.1 * lower, {"vowels": share, "lower": lower}))
        return results

    def close(self):
        pass


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny_model(path, "tiny-qwen3", seed=1)
    return str(path)


@pytest.fixture(scope="session")
def tokenizer(tiny_model):
    return load_tokenizer(tiny_model)


def make_prompts(tokenizer, count):
    texts = [f"say {'aeiou'[i % 5] * (1 + i % 3)}" for i in range(count)]
    return [Prompt(i, text, tuple(tokenizer(text)["input_ids"])) for i, text in enumerate(texts)]


@dataclass
class World:
    """Everything a test may want to look at."""

    trainer: SPMDPPOTrainer
    strategy: object
    prompts: list

    def weights(self):
        model = self.strategy.unwrap_model(self.trainer.actor)
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def make_actor(path, lora_rank):
    """The policy; with adapters if they have a rank."""
    if lora_rank == 0:
        return Actor.from_pretrained(path)
    from lightrft.models.loading import load_causal_lm
    from lightrft.models.lora import LoraActor

    return LoraActor(load_causal_lm(path), TrainConfig(lora_rank=lora_rank, seed=3))


@pytest.fixture
def build_world(tiny_model, tokenizer):
    """Builds a trainer on a FakeStrategy and the embedded engine."""
    opened = []

    def build(
        *,
        with_critic=False,
        with_reference=False,
        num_prompts=8,
        engine="hf",
        trainer_class=SPMDPPOTrainer,
        reward=None,
        args=None,
        **keywords,
    ):
        torch.manual_seed(0)
        settings = {
            "pretrain": tiny_model,
            "seed": 3,
            "train_batch_size": 8,
            "micro_train_batch_size": 4,
            "micro_rollout_batch_size": 8,
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 4,
            "generate_max_len": 6,
            "actor_learning_rate": 1e-3,
            "critic_learning_rate": 1e-3,
            "lr_warmup_ratio": 0.0,
            "init_kl_coef": 0.1 if with_reference else 0.0,
            "engine_type": engine,
            **(args or {}),
        }
        strategy = get_fake_strategy(SimpleNamespace(**settings))
        opened.append(strategy)
        actor, critic, _, reference = strategy.prepare_models_and_optimizers(
            make_actor(tiny_model, settings.get("lora_rank", 0)),
            Critic.from_pretrained(tiny_model) if with_critic else None,
            None,
            Actor.from_pretrained(tiny_model) if with_reference else None,
            None,
            100,
        )
        strategy.setup_inference_engine(None, engine, actor=actor)
        prompts = make_prompts(tokenizer, num_prompts)
        loader = strategy.setup_dataloader(prompts, settings["rollout_batch_size"], collate_fn=list)
        trainer = trainer_class(
            strategy,
            actor,
            critic if with_critic else None,
            reward or VowelReward(),
            reference,
            tokenizer=tokenizer,
            **{"loggers": (), "prompts_dataloader": loader, **keywords},
        )
        opened.append(trainer)
        return World(trainer, strategy, prompts)

    yield build
    for item in reversed(opened):
        item.close()
