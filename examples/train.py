"""Reinforcement fine-tuning of a language model, written on the strategy interface.

    torchrun --nproc_per_node 1 examples/train.py --pretrain MODEL --prompt_data train.jsonl \
        --reward_fn boxed_math --fsdp --engine_type hf

`lightrft train` does the same with evaluation, checkpoints and metrics.
"""

import argparse

from lightrft.config import TrainConfig
from lightrft.datasets import collate_prompts, load_prompts
from lightrft.models import Actor, load_tokenizer
from lightrft.rewards import build_reward
from lightrft.strategy import get_strategy
from lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainer
from lightrft.utils import LIBRARY_FLAGS, add_arguments


def train(args):
    reward = build_reward(args.reward_fn)
    tokenizer = load_tokenizer(args.pretrain)
    prompts = load_prompts(args.prompt_data, tokenizer, TrainConfig(input_key=args.input_key))
    strategy = get_strategy(args)
    loader = strategy.setup_dataloader(
        prompts, args.rollout_batch_size // strategy.world_size, collate_fn=collate_prompts
    )
    with strategy.init_model_context():
        actor = Actor.from_pretrained(args.pretrain)
    updates = args.rollout_batch_size * args.n_samples_per_prompt // args.train_batch_size
    actor, _, _, _ = strategy.prepare_models_and_optimizers(
        actor, None, None, None, args, args.max_steps * updates
    )
    strategy.setup_inference_engine(args, engine_type=args.engine_type, actor=actor)
    trainer = SPMDPPOTrainer(
        strategy, actor, None, reward, None, tokenizer=tokenizer, prompts_dataloader=loader
    )
    for step in range(1, args.max_steps + 1):
        trainer.make_experience()
        metrics = trainer.ppo_train(step)
        strategy.print(f"step {step}: reward {metrics['reward']:.3f}")
    strategy.save_model(actor, tokenizer, args.save_path)
    reward.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, names=(*LIBRARY_FLAGS, "actor_learning_rate", "lr_warmup_ratio"))
    parser.add_argument("--pretrain", required=True, help="Directory of the model.")
    parser.add_argument("--prompt_data", required=True, help="JSONL, JSON or Parquet file.")
    parser.add_argument("--reward_fn", nargs="+", required=True, help="Name or FILE.py:FUNCTION.")
    parser.add_argument("--input_key", default="input", help="Column with the prompt.")
    parser.add_argument("--save_path", default="trained_model", help="Where the model goes.")
    parser.add_argument("--max_steps", type=int, default=10, help="Rollouts.")
    parser.add_argument("--rollout_batch_size", type=int, default=16, help="Prompts per rollout.")
    parser.add_argument("--n_samples_per_prompt", type=int, default=8, help="Group size.")
    parser.add_argument("--generate_max_len", type=int, default=1024, help="Longest response.")
    train(parser.parse_args())
