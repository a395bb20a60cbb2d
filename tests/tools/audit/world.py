"""A step of a real trainer on a very small model, with scripted samples, recorded for an audit."""

from __future__ import annotations

import contextlib
import copy
import io
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM, LlamaConfig

from lightrft.config import TrainConfig
from lightrft.datasets.types import Prompt
from lightrft.engines.sampling import pack_ids
from lightrft.engines.types import KEPT_IDS, Completion
from lightrft.models import Actor, Critic, LoraActor
from lightrft.records.rollout import Rollout, ScoredRollout
from lightrft.records.table import row_table
from lightrft.rollout.scoring import overlong_penalty
from lightrft.rollout.source import Samples
from lightrft.strategy import get_fake_strategy
from lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainer

VOCAB = 23
GROUPS, SAMPLES = 4, 4
# Options whose objects the trainer is given.
GIVEN = ("pretrain", "reward_fn", "reward_weights")
# A rate at which the ratios of a step leave every clip range.
SETTINGS = {
    "seed": 3,
    "train_batch_size": 8,
    "micro_train_batch_size": 4,
    "micro_rollout_batch_size": 8,
    "rollout_batch_size": GROUPS,
    "n_samples_per_prompt": SAMPLES,
    "generate_max_len": 10,
    "actor_learning_rate": 1e-2,
    "critic_learning_rate": 1e-2,
    "lr_warmup_ratio": 0.0,
    "init_kl_coef": 0.0,
    "bf16": False,
    "max_epochs": 2,
    "audit_every": 1,
    "gamma": 0.97,
}


def model_config():
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=1,
        intermediate_size=48,
        max_position_embeddings=64,
        initializer_range=0.2,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )


def write_model(folder, seed=1):
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(model_config(), dtype=torch.float32).save_pretrained(folder)
    return str(folder)


class NoTokenizer:
    pad_token_id = 0

    def decode(self, token_ids, *, skip_special_tokens):
        return " ".join(map(str, token_ids))


class NoReward:
    name = "scripted"
    needs_labels = False

    def score(self, prompts, responses, labels, columns):
        raise AssertionError("rewards are scripted")

    def close(self):
        pass


@cache
def scripted_samples(path, has_greedy):
    """Ragged rows, one group that teaches nothing, one failed reward, an engine that is off."""
    actor = loaded(path, Actor)
    draw = np.random.default_rng(7)
    rows, scored = [], []
    for group in range(GROUPS):
        prompt = tuple(draw.integers(2, VOCAB, 2 + group).tolist())
        for index in range(SAMPLES):
            response = tuple(draw.integers(2, VOCAB, int(draw.integers(1, 11))).tolist())
            rows.append((group, index, prompt, response))
    rewards = draw.normal(size=len(rows)).round(2)
    rewards[-SAMPLES:] = 0.5
    for (group, index, prompt, response), reward in zip(rows, rewards, strict=True):
        ids = torch.tensor([[*prompt, *response]])
        with torch.no_grad():
            exact = actor(ids, torch.ones_like(ids, dtype=torch.bool)).logprobs[0, len(prompt) :]
        logprobs = exact.numpy() + 0.3 * draw.normal(size=len(response))
        completion = Completion(
            request_id=group,
            sample_index=index,
            prompt_token_ids=prompt,
            output_token_ids=response,
            output_logprobs=tuple(logprobs.tolist()),
            logprobs_mode="temperature",
            finish_reason="length" if len(response) == 10 else "stop",
            weights_version=0,
        )
        rollout = Rollout(
            Prompt(group, "p", prompt), completion, group, group * SAMPLES + index, "r"
        )
        is_failed = (group, index) == (1, 2)
        reward = 0.0 if is_failed else float(reward)
        scored.append(ScoredRollout(rollout, reward, is_masked=is_failed, unshaped_reward=reward))
    best = None
    if has_greedy:
        best = row_table([item for item in scored if item.rollout.completion.sample_index == 0])
    return Samples(scored, row_table(scored), GROUPS, greedy=best)


@cache
def loaded(path, kind):
    return kind.from_pretrained(path)


def fresh(path, kind):
    """A model of its own; loading costs more than copying."""
    return copy.deepcopy(loaded(path, kind))


def with_each(samples, change, **others):
    """The samples, each changed by a function of its number and itself."""
    scored = [change(number, item) for number, item in enumerate(samples.scored)]
    return replace(samples, scored=scored, table=row_table(scored), **others)


def shaped(samples, config):
    """The samples with the rewards that scoring would give them."""
    penalty = overlong_penalty(config) or (lambda _: 0.0)

    def change(_, item):
        length = len(item.rollout.completion.output_token_ids)
        shaping = 0.0 if item.is_masked else penalty(length)
        return replace(item, reward=item.unshaped_reward + shaping)

    return with_each(samples, change)


def of_completions(samples, change):
    """The samples with changed completions."""
    return with_each(
        samples,
        lambda number, item: replace(
            item, rollout=replace(item.rollout, completion=change(number, item.rollout.completion))
        ),
    )


def with_observations(samples):
    """A third of the tokens of a response, never the last, were answers of a tool."""

    def change(number, completion):
        size = len(completion.output_token_ids)
        sampled = tuple((i + number) % 3 != 1 or i + 1 == size for i in range(size))
        logprobs = tuple(x * f for x, f in zip(completion.output_logprobs, sampled, strict=True))
        return replace(completion, sampled=sampled, output_logprobs=logprobs)

    return of_completions(samples, change)


def with_kept_ids(samples):
    """Sampled ids and up to three others; every fifth token has no record."""
    draw = np.random.default_rng(0)

    def change(_, completion):
        texts = [
            pack_ids(sorted({token, *draw.integers(2, VOCAB, 3).tolist()})) * bool(draw.integers(5))
            for token in completion.output_token_ids
        ]
        return replace(completion, facts={KEPT_IDS: tuple(texts)}, logprobs_mode="truncated")

    return of_completions(samples, change)


def positive(samples):
    """Rewards without their signs."""
    return with_each(
        samples,
        lambda _, item: replace(
            item, reward=abs(item.reward), unshaped_reward=abs(item.unshaped_reward)
        ),
    )


def shape_of(name):
    return positive if name == "maxrl" else None


class Scripted:
    """Collects the same samples at every step, with rewards that rise."""

    def __init__(self, samples):
        self._samples, self._step = samples, 0

    def collect(self, prompts, *, timer, **_):
        for name in ("rollout", "reward", "exchange"):
            with timer.stage(name):
                pass
        step, self._step = self._step, self._step + 1
        return with_each(self._samples, lambda _, item: raised(item, 0.5 * step))


def raised(item, by):
    """A sample of a higher reward."""
    if item.is_masked:
        return item
    return replace(item, reward=item.reward + by, unshaped_reward=item.unshaped_reward + by)


def record_step(model_path, run, changes, *, sgd=False, steps=1, shape=None):
    """Trains and records; the last step is what is audited.

    Args:
        shape: Changes the scripted samples before they are given to the trainer.
    """
    settings = {**SETTINGS, "pretrain": model_path, "output_dir": str(run), **changes}
    config = TrainConfig(**settings, engine_type="hf")
    needs_critic = config.advantage_estimator == "gae"
    strategy = get_fake_strategy(config)
    actor = fresh(model_path, Actor)
    if config.lora_rank:
        actor = LoraActor(actor.model.__class__.from_pretrained(model_path), config)
        with torch.no_grad():
            for layer in actor.modules():
                if isinstance(layer, LoraLayer):
                    # Adapters that act, in pairs that cancel each other: training begins with the
                    # model of the options.
                    first, second = layer.lora_A["default"].weight, layer.lora_B["default"].weight
                    half = config.lora_rank // 2
                    second.normal_(std=0.1)
                    first[half : 2 * half] = first[:half]
                    second[:, half:] = 0.0
                    second[:, half : 2 * half] = -second[:, :half]
    critic = fresh(model_path, Critic) if needs_critic else None
    if critic is not None:
        torch.manual_seed(2)
        torch.nn.init.normal_(critic.value_head.weight, std=0.2)
    reference = fresh(model_path, Actor) if config.init_kl_coef > 0 else None
    teacher = None
    if config.teacher is not None:
        teacher = strategy.prepare_model(fresh(config.teacher, Actor))
    samples = scripted_samples(model_path, config.advantage_estimator == "remax")
    samples = shaped(samples, config)
    if shape is not None:
        samples = shape(samples)
    num_updates = steps * config.steps_per_rollout
    actor, critic_ready, _, reference = strategy.prepare_models_and_optimizers(
        actor,
        critic,
        None,
        reference,
        None,
        num_updates,
        frozen_steps=config.num_frozen_updates,
    )
    own = {}
    if sgd:
        own["actor_optim"] = torch.optim.SGD(actor.model.parameters(), lr=0.3)
        actor = actor.model
    else:
        run.mkdir(parents=True, exist_ok=True)
        config.save(run / "config.toml")
    trainer = SPMDPPOTrainer(
        strategy,
        actor,
        critic_ready if needs_critic else None,
        NoReward(),
        reference,
        tokenizer=NoTokenizer(),
        loggers=(),
        teacher_model=teacher,
        **own,
        **{name: getattr(config, name) for name in settings if name not in GIVEN},
    )
    trainer.stage.maker.sampler.collect = Scripted(samples).collect
    prompts = [Prompt(i, "p", (2, 3)) for i in range(GROUPS)]
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.fit({"max_steps": steps, "num_episodes": steps}, prompts_dataloader=[prompts])
    return trainer
