"""A tiny actor, its trainer and options, the same on every strategy."""

from __future__ import annotations

from argparse import Namespace

from tests.models.tiny import SPECIAL, tiny_model

from lightrft.models import Actor
from lightrft.strategy import get_fake_strategy, get_strategy
from lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainer

NUM_STEPS = 3
NUM_PROMPTS, GROUP_SIZE = 4, 4


class CharacterTokenizer:
    pad_token_id = 0

    def decode(self, token_ids, skip_special_tokens=True):
        return "".join(chr(32 + int(t)) for t in token_ids)

    def batch_decode(self, rows, skip_special_tokens=True):
        return [self.decode(row) for row in rows]


def tiny_actor(**shape):
    return Actor(tiny_model(**shape, **SPECIAL))


def trainer_on(backend, actor, reward, **changes):
    """Return a trainer of two optimizer steps a rollout, with the embedded engine."""
    args = Namespace(
        **{
            "fsdp": backend == "fsdp",
            "zero_stage": int(backend[-1]) if backend.startswith("zero") else 2,
            "seed": 3,
            "bf16": False,
            "micro_train_batch_size": 2,
            "train_batch_size": 8,
            "micro_rollout_batch_size": 4,
            "rollout_batch_size": NUM_PROMPTS,
            "n_samples_per_prompt": GROUP_SIZE,
            "generate_max_len": 12,
            "actor_learning_rate": 3e-4,
            "lr_warmup_ratio": 0.0,
            "lr_scheduler": "constant",
            "init_kl_coef": 0.0,
            "loss_agg_mode": "token-mean",
            "engine_type": "hf",
            "pretrain": None,
            **changes,
        }
    )
    strategy = get_fake_strategy(args) if backend == "fake" else get_strategy(args)
    ready = strategy.prepare_models_and_optimizers(actor, None, None, None, args, 100)[0]
    strategy.setup_inference_engine(args, engine_type="hf", actor=ready)
    return SPMDPPOTrainer(strategy, ready, None, reward, tokenizer=CharacterTokenizer(), loggers=[])
