"""A tiny model, a toy reward, and trainers in one process."""

from copy import deepcopy
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.models.batches import copies
from tests.runs import TextReward, compared
from tests.trainer.vision_world import STEP, write_data

from lightrft.config import TrainConfig
from lightrft.datasets.types import Prompt
from lightrft.models import Actor, Critic
from lightrft.models.loading import load_tokenizer
from lightrft.rewards.types import RewardResult
from lightrft.strategy import get_fake_strategy
from lightrft.tools.model_presets import write_tiny_model
from lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainer


def vowels(text):
    """Share of vowels among the characters, and a little for lower case."""
    share, lower = (
        sum(map(kind, text)) / max(len(text), 1) for kind in ("aeiou".__contains__, str.islower)
    )
    return RewardResult(share + 0.1 * lower, {"vowels": share, "lower": lower})


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny_model(path, "tiny-qwen3", seed=1)
    return str(path)


@pytest.fixture(scope="session")
def tokenizer(tiny_model):
    return load_tokenizer(tiny_model)


# Options that the strategy reads, too.
OF_BOTH = {"train_batch_size", "rollout_batch_size"}


def make_prompts(tokenizer, count):
    texts = [f"say {'aeiou'[i % 5] * (1 + i % 3)}" for i in range(count)]
    return [Prompt(i, text, tuple(tokenizer(text)["input_ids"])) for i, text in enumerate(texts)]


@dataclass
class World:
    """Everything a test may want to look at."""

    trainer: SPMDPPOTrainer
    strategy: object
    prompts: list
    judge: Actor | None = None

    @property
    def actor(self):
        return self.strategy.unwrap_model(self.trainer.actor)

    @property
    def experience(self):
        """What was sampled and is to be trained on."""
        return self.trainer.pending[1].experience

    def weights(self):
        return copies(self.actor)

    def is_unmoved(self, before):
        """Return whether every weight of the actor is still the same."""
        return all(value.equal(before[name]) for name, value in self.weights().items())

    def state_dict(self):
        return deepcopy(self.actor.state_dict())

    def logprobs_under(self, weights, rows, row):
        """[response] logprobs of a row under some weights, by one plain pass in float64."""
        if self.judge is None:
            self.judge = Actor.from_pretrained(self.strategy.config.pretrain).double()
        self.judge.load_state_dict(weights)
        stop, first = int(rows.lengths[: row + 1].sum()), int(rows.prompt_lengths[row])
        ids = rows.token_ids[stop - int(rows.lengths[row]) : stop].astype(np.int64)
        ids = torch.from_numpy(ids)
        with torch.no_grad():
            scores = self.judge.model(input_ids=ids[None]).logits[0].log_softmax(-1)
        return scores[first - 1 : -1].gather(1, ids[first:, None])[:, 0].numpy()

    def end_early(self):
        """Let a third of the vocabulary end a response: lengths vary from 1 to the limit."""
        engine = self.strategy.inference_engine
        generate, ends = engine.generate, tuple(range(0, 256, 10))
        engine.generate = lambda requests, params, **named: generate(
            requests, replace(params, stop_token_ids=ends), **named
        )

    def sample(self):
        """Sample a step; return what is to be trained on."""
        self.trainer.make_experience()
        return self.experience

    def train(self):
        """Train on what was sampled; return the metrics of the step."""
        return self.trainer.ppo_train(self.trainer.state.num_steps + 1)

    def step(self):
        """Sample and train a step; return its metrics."""
        self.sample()
        return self.train()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Folder of rows with and without images, and a reward."""
    return write_data(tmp_path_factory.mktemp("data"))


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
            **STEP,
            "pretrain": tiny_model,
            "init_kl_coef": 0.1 if with_reference else 0.0,
            "engine_type": engine,
            **{name: keywords[name] for name in OF_BOTH & keywords.keys()},
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
            reward or TextReward(vowels),
            reference,
            tokenizer=tokenizer,
            **{"loggers": (), "prompts_dataloader": loader, **keywords},
        )
        opened.append(trainer)
        return World(trainer, strategy, prompts)

    yield build
    for item in reversed(opened):
        item.close()


@pytest.fixture
def goes_on_exactly(tmp_path):
    """`goes_on_exactly(build)`: a run of five steps that is saved after two ends as a whole one.

    Its argument is a function of options that builds a world; that which was saved is returned.
    """

    def check(build):
        whole, half, again = build(), *(build(ckpt_path=str(tmp_path / "c")) for _ in range(2))
        for _ in range(4):
            whole.step()
        expected = whole.sample().rows, compared(whole.train())
        for _ in range(2):
            half.step()
        half.trainer.save_checkpoint()
        assert again.trainer.load_checkpoint()
        saved, loaded = (each.trainer.stage.memory.in_flight for each in (half, again))
        assert saved.stream.groups == loaded.stream.groups
        entries = [{entry.key: entry for entry in each.stream.entries} for each in (saved, loaded)]
        assert entries[0] == entries[1]
        for _ in range(2):
            again.step()
        rows, metrics = again.sample().rows, compared(again.train())
        assert rows.token_ids.tolist() == expected[0].token_ids.tolist()
        assert rows.rollout_logprobs.tobytes() == expected[0].rollout_logprobs.tobytes()
        np.testing.assert_equal(metrics, expected[1])
        assert whole.is_unmoved(again.weights())
        left, expected = (each.trainer.stage.memory.in_flight for each in (again, whole))
        assert (left.stream, left.num_requests) == (expected.stream, expected.num_requests)
        return half

    return check
