"""One optimizer step of TRL's trainers, and what it is compared with, for tests."""

from __future__ import annotations

import json

import pytest
import torch
from tests.stages.stage_world import distance
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from lightrft.config import TrainConfig
from lightrft.tools.model_presets import write_tiny_model

# An optimizer step on four rows in two passes.
TWO_BATCHES = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}


def tiny_checkpoint(folder):
    """Path of a tiny model and its tokenizer, one token a byte."""
    write_tiny_model(folder / "model", "tiny-qwen3", seed=1)
    return str(folder / "model")


def causal(path):
    """The causal language model of a path, in float32."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def read(load, path, folder, rows, *, tokenizer=None, **options):
    """Our items of some rows."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    tokenizer = tokenizer or AutoTokenizer.from_pretrained(path)
    config = TrainConfig(**options)
    return load(str(file), tokenizer, config, max_samples=99, split="train").rows


def step_of(trainer_class, config_class, model, folder, rows, *, tokenizer, **given):
    """A trainer of TRL with the loss and the gradient of the one step that it takes on all rows.

    Args:
        trainer_class, config_class: Of TRL.
        model: Is trained.
        folder: For what it writes.
        rows: In this order.
        tokenizer: Reads them.
        **given: Its options; `ref_model` and `peft_config` go to the trainer itself, and `start`
            is called with its model before the step.
    """
    from datasets import Dataset

    start = given.pop("start", None)
    of_trainer = {name: given.pop(name) for name in ("ref_model", "peft_config") if name in given}
    options = {
        "max_length": None,
        "gradient_checkpointing": False,
        "bf16": False,
        "per_device_train_batch_size": len(rows),
        "max_steps": 1,
        "max_grad_norm": 0.0,
        "learning_rate": 0.0,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "report_to": "none",
        **given,
    }
    trainer = trainer_class(
        model=model,
        args=config_class(output_dir=str(folder / "trl"), **options),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        **of_trainer,
    )
    if start is not None:
        start(trainer.model)
    gradient = {}

    class Keep(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, *, model, **_):
            for name, value in model.named_parameters():
                if value.requires_grad:
                    gradient[f"model.{name}"] = value.grad.clone()

    trainer.add_callback(Keep())
    return trainer, trainer.train().training_loss, gradient


def require_equal(ours, theirs):
    """The same loss and the same gradient.

    Args:
        ours: Gradient and metrics, of `train_step`.
        theirs: Trainer, loss and gradient, of `step_of`.
    """
    (found, metrics), (_, loss, gradient) = ours, theirs
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert distance(found, gradient) <= 1e-4


def require_other(ours, theirs):
    """Another gradient, by far more than roundings."""
    assert distance(ours[0], theirs[2]) > 1e-2
