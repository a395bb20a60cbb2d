"""GRPO by TRL on the sums of the quick start; `learning_parity.py` runs it, and its translation."""

import re

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

BOX_AT_END = r"\\boxed\{(\d+)\}\Z"


def is_right(completions, answer, **columns):
    boxes = [re.search(BOX_AT_END, text) for text in completions]
    pairs = zip(boxes, answer, strict=True)
    return [float(box is not None and box.group(1) == right) for box, right in pairs]


rows = load_dataset("json", data_files="sums.jsonl", split="train")
args = GRPOConfig(
    output_dir="trl",
    seed=0,
    per_device_train_batch_size=128,
    num_generations=8,
    max_completion_length=48,
    learning_rate=4e-4,
    lr_scheduler_type="constant",
    max_steps=30,
    logging_steps=1,
    bf16=False,
    gradient_checkpointing=False,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
)
trainer = GRPOTrainer(model="warm_start", reward_funcs=is_right, args=args, train_dataset=rows)
trainer.train()
trainer.save_state()
trainer.save_model()
