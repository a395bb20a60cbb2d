"""Rows with and without images, and a trainer of vision-language models on any strategy."""

from types import SimpleNamespace

import torch
from tests.datasets.media_files import picture
from tests.runs import TextReward, rollout_options, write_inputs

from lightrft.config import TrainConfig
from lightrft.datasets import collate_prompts, load_prompts
from lightrft.models import Actor, Critic, load_tokenizer
from lightrft.models.loading import load_processor, load_trunk
from lightrft.models.reward_model import RewardModel
from lightrft.models.score_heads import ScoreHead
from lightrft.stages.start_checks import load_modality
from lightrft.strategy import get_fake_strategy, get_strategy
from lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainerVL

REWARD = "def score(responses):\n    return [float(len(r) % 3) for r in responses]\n"
# Sizes of the images of a row, in turn.
SIZES = ([(84, 84)], [], [(112, 56), (56, 84)], [])


# Options of a step of a trainer that a test builds.
STEP = {
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
    "engine_type": "hf",
}


def write_data(folder):
    """Eight prompts: one image, none, two of other sizes, none, and again; and a reward."""
    rows = []
    for i in range(8):
        names = [f"{i}_{k}.png" for k in range(len(SIZES[i % 4]))]
        for name, size in zip(names, SIZES[i % 4], strict=True):
            picture(*size, seed=i).save(folder / name)
        rows.append({"input": "<image>" * len(names) + f" say {i}", "images": names})
    return write_inputs(folder, rows, reward=REWARD)


def vision_options(data, model, output, **changes):
    """Options of two steps on the rows of `write_data`."""
    common = {
        "pretrain": str(model),
        "input_key": "input",
        "apply_chat_template": True,
        "prompt_max_len": 400,
        "generate_max_len": 6,
        "train_batch_size": 16,
        "micro_train_batch_size": 8,
        "fsdp": False,
    }
    return rollout_options(data, output, **common | changes)


def scorer_folder(model, folder):
    """The actor's checkpoint as a reward model, with a head of noise."""
    trunk = load_trunk(model)
    weight = torch.randn(1, 128, generator=torch.Generator().manual_seed(2)) / 10
    head = ScoreHead(torch.nn.Parameter(weight))
    RewardModel(trunk, head).save_pretrained(folder)
    load_processor(model).save_pretrained(folder)
    return str(folder), weight


def build_vision_trainer(model, data, *, is_fake=False, reward_model=None, **options):
    """A trainer with critic and reference, written as the seeds write it; and its strategy."""
    args = SimpleNamespace(
        **{
            **STEP,
            "pretrain": model,
            "train_batch_size": 16,
            "generate_max_len": 5,
            "init_kl_coef": 0.01,
            "advantage_estimator": "gae",
            **options,
        }
    )
    strategy = get_fake_strategy(args) if is_fake else get_strategy(args)
    config = TrainConfig(pretrain=model, apply_chat_template=True, prompt_max_len=400)
    vision = load_modality(config, None)
    prompts = load_prompts(str(data / "train.jsonl"), vision, config)
    loader = strategy.setup_dataloader(
        prompts, args.rollout_batch_size // strategy.world_size, collate_fn=collate_prompts
    )
    with strategy.init_model_context():
        models = (
            Actor.from_pretrained(model),
            Critic.from_pretrained(model),
            None,
            Actor.from_pretrained(model),
        )
    actor, critic, _, reference = strategy.prepare_models_and_optimizers(*models, args, 100)
    strategy.setup_inference_engine(args, engine_type="hf", actor=actor)
    trainer = SPMDPPOTrainerVL(
        strategy,
        actor,
        critic,
        reward_model or TextReward(lambda text: len(text) % 3),
        reference,
        tokenizer=load_tokenizer(model),
        processor=vision.encoder.processor,
        prompts_dataloader=loader,
    )
    return trainer, strategy
