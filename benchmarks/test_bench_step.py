"""One GRPO step of lightrft and of TRL, interleaved in one process at one thread.

    OMP_NUM_THREADS=1 uv run --group peers pytest benchmarks/test_bench_step.py -s
    OMP_NUM_THREADS=1 uv run --group peers pytest benchmarks/test_bench_step.py -m slow -s

The second one is of 135M parameters and takes ten minutes. Same model, prompts, samples, lengths,
reward and optimizer; a step is rollout, rewards, update and (ours) the verified weight sync. Ours
cuts micro-batches by tokens, so that rows of like lengths pad each other less; both see all samples
in one optimizer step. Times are medians over rounds, and the figure of merit is the ratio, that of
135M parameters held against the one in ratios.toml. CPU seconds are the measure where other
programs share the machine.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import platform
import statistics
import tempfile
import time
import tomllib
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

PROMPT_TOKENS, MICRO_BATCH_TOKENS = 16, 1200
RESULTS = Path(__file__).parent / "results"
RATIOS = Path(__file__).parent / "ratios.toml"
TOLERANCE = 1.2


@dataclass(frozen=True, slots=True)
class Size:
    """Of the model and of a step; `heads` are those of queries and of keys."""

    name: str
    num_samples: int
    new_tokens: int
    num_rounds: int
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: tuple[int, int]


TINY = Size("tiny", 64, 32, 9, 512, 64, 192, 2, (4, 2))
# The shape of SmolLM2-135M.
LARGER = Size("135M", 16, 64, 3, 49152, 576, 1536, 30, (9, 3))


def build_tokenizer(size):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, size.vocab)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )


def build_model(size, *, ends_early):
    """A random model; with `ends_early` about one token in twenty ends the response.

    A bias of the last layer's values is a constant part of all hidden vectors, four times as long
    as the rest: what is read along it is about the same everywhere.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads[0],
        num_key_value_heads=size.heads[1],
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config)
    if ends_early:
        ids, values = torch.randint(3, size.vocab, (32, 32)), model.model.layers[-1].self_attn
        with torch.no_grad():
            rest = model.model(ids, output_hidden_states=True).hidden_states[-2].norm(dim=-1).mean()
            values.v_proj.bias.normal_()
            shared = values.v_proj.bias.unflatten(0, (size.heads[1], -1))
            constant = shared.repeat_interleave(size.heads[0] // size.heads[1], 0).flatten()
            values.v_proj.bias *= 4 * rest / (values.o_proj.weight @ constant).norm()
            mean = model.model(ids).last_hidden_state.flatten(0, 1).mean(0)
            target = torch.log(torch.tensor(0.05 * size.vocab))
            model.lm_head.weight[1] = mean * target / mean.dot(mean)
    return model


def even_words(texts):
    shares = []
    for text in texts:
        words = [word for word in text.split() if word.startswith("w")]
        shares.append(sum(int(word[1:]) % 2 == 0 for word in words) / max(1, len(words)))
    return shares


class EvenWords:
    name = "even_words"
    needs_labels = False

    def score(self, prompts, responses, labels, columns):
        from lightrft.rewards.types import RewardResult

        return [RewardResult(share) for share in even_words(responses)]

    def close(self):
        pass


def build_ours(size, group, model, tokenizer, prompts):
    """A function that takes one whole step and returns its metrics."""
    from lightrft.datasets.types import Prompt
    from lightrft.models import Actor
    from lightrft.strategy import get_fake_strategy
    from lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainer

    num_samples, num_prompts = size.num_samples, size.num_samples // group
    args = Namespace(
        seed=0,
        max_norm=1.0,
        bf16=False,
        train_batch_size=num_samples,
        micro_train_batch_size=num_samples,
        micro_rollout_batch_size=num_samples,
        micro_batch_tokens=MICRO_BATCH_TOKENS,
        rollout_batch_size=num_prompts,
        n_samples_per_prompt=group,
        generate_max_len=size.new_tokens,
        prompt_max_len=PROMPT_TOKENS,
        actor_learning_rate=1e-5,
        lr_warmup_ratio=0.0,
        lr_scheduler="constant",
        init_kl_coef=0.0,
        engine_type="hf",
        advantage_estimator="group_norm",
        loss_agg_mode="token-mean",
        pretrain=None,
        plot_every=-1,
    )
    strategy = get_fake_strategy(args)
    actor, _, _, _ = strategy.prepare_models_and_optimizers(
        Actor(model), None, None, None, args, 10_000
    )
    strategy.setup_inference_engine(args, engine_type="hf", actor=actor)
    trainer = SPMDPPOTrainer(strategy, actor, None, EvenWords(), tokenizer=tokenizer, loggers=[])
    rows = [
        Prompt(i, text, tuple(tokenizer(text)["input_ids"]))
        for i, text in enumerate(prompts[:num_prompts])
    ]

    def step(index: int) -> dict[str, float]:
        trainer.make_experience(rows)
        return trainer.ppo_train(index)

    return step


def clocks():
    """(wall seconds, CPU seconds) so far."""
    return time.perf_counter(), time.process_time()


def since(begin):
    return tuple(now - then for now, then in zip(clocks(), begin, strict=True))


def time_interleaved(size, group, ours, model, tokenizer, prompts):
    """(Wall, CPU) seconds of each round of TRL and ours, in turn, and our metrics."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    peer_seconds, our_seconds, our_metrics = [], [], []

    class Turns(TrainerCallback):
        begin = (0.0, 0.0)

        def on_step_begin(self, *_args, **_kwargs):
            self.begin = clocks()

        def on_step_end(self, *_args, **_kwargs):
            peer_seconds.append(since(self.begin))
            begin = clocks()
            our_metrics.append(ours(len(our_seconds) + 1))
            our_seconds.append(since(begin))

    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        use_vllm=False,
        per_device_train_batch_size=size.num_samples,
        gradient_accumulation_steps=1,
        num_generations=group,
        max_completion_length=size.new_tokens,
        num_iterations=1,
        beta=0.0,
        learning_rate=1e-5,
        max_steps=size.num_rounds + 1,
        logging_steps=1000,
        report_to=[],
        save_strategy="no",
        temperature=1.0,
        gradient_checkpointing=False,
        disable_tqdm=True,
        seed=0,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda prompts, completions, **_: even_words(completions),
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": text} for text in prompts]),
        processing_class=tokenizer,
        callbacks=[Turns()],
    )
    trainer.train()
    return peer_seconds[1:], our_seconds[1:], our_metrics[1:]


@pytest.fixture(autouse=True)
def _one_thread():
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)


@pytest.mark.benchmark(group="grpo-step")
@pytest.mark.parametrize("lengths", ["equal", "uneven"])
@pytest.mark.parametrize("group", [8, 16])
@pytest.mark.parametrize(
    "size", [TINY, pytest.param(LARGER, marks=pytest.mark.slow)], ids=lambda size: size.name
)
def test_grpo_step(benchmark, size, group, lengths):
    tokenizer = build_tokenizer(size)
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(3, size.vocab, (512, PROMPT_TOKENS), generator=generator).tolist()
    prompts = [" ".join(f"w{i}" for i in row) for row in words]
    model = build_model(size, ends_early=lengths == "uneven")
    ours = build_ours(size, group, copy.deepcopy(model), tokenizer, prompts)
    if importlib.util.find_spec("trl") is None:
        print("\npeer absent: TRL (uv run --group peers ...)")
        benchmark.pedantic(ours, args=(1,), rounds=size.num_rounds, warmup_rounds=1)
        return
    peer_seconds, our_seconds, metrics = time_interleaved(
        size, group, ours, model, tokenizer, prompts
    )
    peer, peer_cpu = map(statistics.median, zip(*peer_seconds, strict=True))
    own, own_cpu = map(statistics.median, zip(*our_seconds, strict=True))
    phases = {
        name: statistics.median(row[name] for row in metrics)
        for name in metrics[0]
        if name.endswith("_seconds")
    }
    record = {
        "model": size.name,
        "group": group,
        "lengths": lengths,
        "trl_seconds": peer,
        "lightrft_seconds": own,
        "trl_over_lightrft": peer / own,
        "trl_cpu_seconds": peer_cpu,
        "lightrft_cpu_seconds": own_cpu,
        "trl_over_lightrft_cpu": peer_cpu / own_cpu,
        "rounds": len(our_seconds),
        "phases": phases,
        "mean_response_tokens": statistics.mean(row["response_length"] for row in metrics),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, 1 thread used",
        "torch": torch.__version__,
    }
    benchmark.extra_info.update(record)
    print(
        f"\n{size.name}, groups of {group}, {lengths} lengths: TRL {peer:.3f} s, "
        f"lightrft {own:.3f} s, ratio {peer / own:.2f}; "
        f"CPU {peer_cpu:.3f} s, {own_cpu:.3f} s, ratio {peer_cpu / own_cpu:.2f}"
    )
    print("  " + ", ".join(f"{name} {value:.3f}" for name, value in sorted(phases.items())))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"step_{size.name}_{group}_{lengths}.json").write_text(
        json.dumps(record, indent=2) + "\n"
    )
    benchmark.pedantic(ours, args=(size.num_rounds + 2,), rounds=1)
    name = f"step_over_trl_{size.name}_{group}_{lengths}"
    committed = tomllib.loads(RATIOS.read_text()).get(name, {}).get("ratio")
    assert committed is None or peer_cpu / own_cpu >= committed / TOLERANCE
