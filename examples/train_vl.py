"""Reinforcement fine-tuning of a vision-language model; a text model works as well.

    torchrun --nproc_per_node 1 examples/train_vl.py --pretrain MODEL --prompt_data train.jsonl \
        --apply_chat_template --reward_fn boxed_math --fsdp --mixed_mm_data --engine_type hf
"""

import argparse

from lightrft.config import TrainConfig
from lightrft.datasets import collate_prompts, load_prompts
from lightrft.models import Actor, load_tokenizer
from lightrft.rewards import build_reward
from lightrft.stages.start_checks import load_modality
from lightrft.strategy import get_strategy
from lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainerVL
from lightrft.utils import LIBRARY_FLAGS, add_arguments

PROMPT_FLAGS = ("input_key", "apply_chat_template", "images_key", "prompt_max_len")
RUN_FLAGS = ("actor_learning_rate", "lr_warmup_ratio", "generate_max_len", "n_samples_per_prompt")


def train(args):
    reward = build_reward(args.reward_fn)
    tokenizer = load_tokenizer(args.pretrain)
    config = TrainConfig(**{name: getattr(args, name) for name in ("pretrain", *PROMPT_FLAGS)})
    modality = load_modality(config, tokenizer)
    prompts = load_prompts(args.prompt_data, modality.renderer, config)
    processor = modality.processor or tokenizer
    strategy = get_strategy(args)
    num_prompts = args.rollout_batch_size // strategy.world_size
    loader = strategy.setup_dataloader(prompts, num_prompts, collate_fn=collate_prompts)
    with strategy.init_model_context():
        actor = Actor.from_pretrained(args.pretrain)
    updates = args.max_steps * args.rollout_batch_size * args.n_samples_per_prompt
    actor, _, _, _ = strategy.prepare_models_and_optimizers(
        actor, None, None, None, args, updates // args.train_batch_size
    )
    strategy.setup_inference_engine(args, engine_type=args.engine_type, actor=actor)
    kit = {"tokenizer": tokenizer, "processor": processor, "prompts_dataloader": loader}
    trainer = SPMDPPOTrainerVL(strategy, actor, None, reward, None, **kit)
    for step in range(1, args.max_steps + 1):
        trainer.make_experience()
        strategy.print(f"step {step}: reward {trainer.ppo_train(step)['reward']:.3f}")
    strategy.save_model(actor, processor, args.save_path)
    reward.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    names = (*LIBRARY_FLAGS, *PROMPT_FLAGS, *RUN_FLAGS)
    add_arguments(parser, config_type=TrainConfig, names=names)
    parser.add_argument("--pretrain", required=True, help="Directory of the model.")
    parser.add_argument("--prompt_data", required=True, help="JSONL, JSON or Parquet file.")
    parser.add_argument("--reward_fn", nargs="+", required=True, help="Name or FILE.py:FUNCTION.")
    parser.add_argument("--save_path", default="trained_model", help="Where the model goes.")
    parser.add_argument("--max_steps", type=int, default=10, help="Rollouts.")
    parser.add_argument("--rollout_batch_size", type=int, default=16, help="Prompts per rollout.")
    train(parser.parse_args())
