"""The quick start's tokenizer and model, and the imitation of its careless teacher."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import Qwen3Config

from lightrft.tools.model_presets import (
    ASSISTANT,
    END,
    PAD,
    USER,
    chat_tokenizer,
    random_model,
    save_checked,
)
from lightrft.tools.quickstart.task import Exercise, MediaModel, Message, Task

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

CHARACTERS = "\n !\"'()*+,-./0123456789:=>?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz{}"
IGNORED = -100
NUM_WARMUP_STEPS = 20
# With so few steps, averages over fewer gradients learn faster than the usual 0.9 and 0.999.
BETAS = (0.8, 0.95)


def build_tokenizer(task: Task) -> PreTrainedTokenizerBase:
    """Return a tokenizer with one token per character and one for each of a few texts."""
    roles = [USER, ASSISTANT, *task.roles]
    tokens = [PAD, END, *roles, *task.whole_tokens, *CHARACTERS]
    core = Tokenizer(
        models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="?")
    )
    whole = "|".join(map(re.escape, task.whole_tokens))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{whole}|[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()  # without it, decoding puts spaces between tokens
    tokenizer = chat_tokenizer(core, roles, unk_token="?")
    tokenizer.chat_template = task.template or tokenizer.chat_template
    return tokenizer


@dataclass(frozen=True, slots=True)
class ImitationModel:
    """The model that imitates, with its tokenizer.

    Args:
        model: Model in fp32.
        tokenizer: Tokenizer of the model.
        processor: Processor of a model that reads media.
        media_model: Source of that model's inputs.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    processor: ProcessorMixin | None = None
    media_model: MediaModel | None = None

    def media(self, exercises: Sequence[Exercise], token_ids: Tensor) -> dict[str, Tensor]:
        """Return the model's inputs beside `token_ids`: none, or the media of `exercises`."""
        if self.processor is None or self.media_model is None:
            return {}
        return self.media_model.inputs(self.processor, exercises, token_ids)

    def save(self, directory: Path, sample: str) -> None:
        """Write a checkpoint; see `save_checked`."""
        save_checked(self.model, self.tokenizer, directory, sample=sample, processor=self.processor)


def build_student(task: Task, *, seed: int, width: int = 64) -> ImitationModel:
    """Return a random model of under half a million parameters; `width` is for text alone.

    The usual initializer_range of 0.02 is too small at this width: the warm start then ends with
    mistakes that no reward can repair. With the usual rope_theta most angles hardly turn in fifty
    tokens, so copying a digit from its place is learnt late.
    """
    tokenizer = build_tokenizer(task)
    if task.media_model is not None:
        model, processor = task.media_model.build(seed, tokenizer)
        return ImitationModel(model, tokenizer, processor, task.media_model)
    config = Qwen3Config(
        vocab_size=(len(tokenizer) + 31) // 32 * 32,
        hidden_size=width,
        head_dim=width // 2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=2,
        intermediate_size=width * 3 // 2,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        initializer_range=0.08,
        tie_word_embeddings=False,
    )
    return ImitationModel(random_model(config, tokenizer, seed), tokenizer)


def imitate(
    student: ImitationModel,
    task: Task,
    on_step: Callable[[int, float], None],
    *,
    num_steps: int,
    batch_size: int = 32,
    seed: int = 0,
) -> None:
    """Train the student's model in place on demonstrations, drawn afresh for each step.

    The learning rate rises linearly for `NUM_WARMUP_STEPS` and then falls to zero.

    Args:
        student: Model that learns.
        task: Task that is demonstrated.
        on_step: Callback for the number of steps done and the loss in nats per token.
        num_steps: Optimizer steps.
        batch_size: Demonstrations per step.
        seed: Seed of the demonstrations.
    """
    rng, model = random.Random(seed), student.model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=task.learning_rate, betas=BETAS, weight_decay=0.0, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / NUM_WARMUP_STEPS) * (1 - step / num_steps)
    )
    model.train()
    for step in range(1, num_steps + 1):
        exercises = list(islice(task.draw(rng, False), batch_size))
        token_ids, targets = demonstration_batch(student.tokenizer, exercises, rng)
        media = student.media(exercises, token_ids)
        loss = _response_loss(model, token_ids, targets, media)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        on_step(step, loss.item())
    model.eval()


def demonstration_batch(
    tokenizer: PreTrainedTokenizerBase, exercises: Sequence[Exercise], rng: random.Random
) -> tuple[Tensor, Tensor]:
    """Return token ids and targets, both [batch, seq] int64, of one demonstration each.

    Rows are padded on the right; `targets[:, t]` is `token_ids[:, t]` where the assistant speaks,
    and `IGNORED` elsewhere.
    """
    texts = ["".join(map(_marked, exercise.demonstration(rng))) for exercise in exercises]
    rows = tokenizer(texts)["input_ids"]  # one call: a call costs more than what it encodes
    opening = tokenizer.convert_tokens_to_ids(ASSISTANT)
    seq = max(map(len, rows))
    token_ids, targets = [], []
    for ids in rows:
        padding = seq - len(ids)
        token_ids.append(ids + [tokenizer.pad_token_id] * padding)
        targets.append(_said(ids, opening, tokenizer.eos_token_id) + [IGNORED] * padding)
    return torch.tensor(token_ids), torch.tensor(targets)


def _marked(message: Message) -> str:
    """Return a message after the mark of its role; the assistant's ends with `END`."""
    role, content = message
    return f"<|{role}|>{content}{END * (role == 'assistant')}"


def _said(ids: Sequence[int], opening: int, end: int) -> list[int]:
    """Return the ids after each `opening` up to its `end`, and `IGNORED` in place of the others."""
    targets, is_said = [], False
    for token in ids:
        targets.append(token if is_said else IGNORED)
        is_said = token == opening or (is_said and token != end)
    return targets


def _response_loss(
    model: PreTrainedModel, token_ids: Tensor, targets: Tensor, media: Mapping[str, Tensor]
) -> Tensor:
    """Return the mean cross entropy of the response tokens, in nats.

    No attention mask: rows are padded on the right and attention is causal, so no trained
    position sees the padding.
    """
    logits = model(input_ids=token_ids, use_cache=False, **media).logits  # [batch, seq, vocab]
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=IGNORED
    )
