"""What the loop costs beside the model: start, a step's own time, the verified sync, the decoder.

    uv run pytest benchmarks/test_bench_overheads.py -s --timeout 3000

Sides take turns in one run, and each ratio is held against the one in ratios.toml: more than a
fifth worse fails. `.ci/slow overheads decoder` runs it.
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
import resource
import statistics
import subprocess
import sys
import time
import tomllib
from argparse import Namespace
from contextlib import contextmanager
from pathlib import Path

import harness
import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

pytestmark = pytest.mark.slow

RATIOS = Path(__file__).parent / "ratios.toml"
TOLERANCE = 1.2
BASE_IMPORTS = {
    "import torch, transformers": "import torch, transformers",
    "with the model classes": (
        "import torch, torch.distributed.fsdp\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM"
    ),
}
# `lightrft train` up to the point where it would load the model.
START = """
import sys
from lightrft.cli.main import main
from lightrft.run import assembly
assembly.run_training = lambda config, **_: sys.exit(0)
main(sys.argv[1:])
"""
SIZES = {
    "10M": {
        "hidden_size": 320,
        "intermediate_size": 864,
        "num_hidden_layers": 7,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "vocab_size": 4096,
    },
    "135M": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
    },
}


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def hold(name: str, value: float) -> None:
    """Compares a ratio with the committed one; skips where none was measured."""
    entry = tomllib.loads(RATIOS.read_text()).get(name)
    print(f"\n{name}: {value:.3f} (committed: {entry and entry['ratio']})")
    if entry is None:
        pytest.skip(f"ratios.toml has no {name}: {value:.3f} is not compared")
    if entry["better"] == "lower":
        assert value <= entry["ratio"] * TOLERANCE, name
    else:
        assert value >= entry["ratio"] / TOLERANCE, name


def build_model(size: str):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        **SIZES[size],
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def processor_seconds_of(*words: str) -> float:
    """CPU time of a Python process."""

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    begin = spent()
    # As a user's: compiled once.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", *words], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return spent() - begin


def test_the_start_of_a_run_costs_little_more_than_its_imports(tmp_path):
    from lightrft.tools.model_presets import write_tiny_model

    write_tiny_model(tmp_path / "model", "tiny-qwen3", seed=0)
    (tmp_path / "rows.jsonl").write_text('{"input": "a", "label": "1"}\n')
    command = (
        START,
        "train",
        "--fsdp",
        "--engine_type",
        "hf",
        "--pretrain",
        str(tmp_path / "model"),
        "--prompt_data",
        str(tmp_path / "rows.jsonl"),
        "--reward_fn",
        "gsm8k",
        "--output_dir",
        str(tmp_path / "run"),
    )
    sides = {**{name: (code,) for name, code in BASE_IMPORTS.items()}, "start": command}
    rounds = {name: [] for name in sides}
    for words in sides.values():
        processor_seconds_of(*words)
    for _ in range(harness.MIN_ROUNDS):
        for name, words in sides.items():
            rounds[name].append(processor_seconds_of(*words))
    found = {name: statistics.median(seconds) for name, seconds in rounds.items()}
    print("\nCPU seconds:", {name: round(seconds, 2) for name, seconds in found.items()})
    hold("start_over_imports", found["start"] / found["import torch, transformers"])
    hold("start_over_model_imports", found["start"] / found["with the model classes"])


class Clock:
    """Seconds inside of some functions; calls inside of others count once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0
        self._begin = 0.0

    def enter(self, *_: object) -> None:
        if self._depth == 0:
            self._begin = time.perf_counter()
        self._depth += 1

    def leave(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.seconds += time.perf_counter() - self._begin

    def around(self, function):
        @functools.wraps(function)
        def timed(*args, **kwargs):
            self.enter()
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

        return timed


@contextmanager
def model_time(trainer, monkeypatch):
    """A clock of forward and backward passes, optimizer steps, generation and weight syncs."""
    from lightrft.models import Actor

    clock = Clock()
    monkeypatch.setattr(Actor, "forward", clock.around(Actor.forward))
    monkeypatch.setattr(torch.Tensor, "backward", clock.around(torch.Tensor.backward))
    strategy = type(trainer.strategy)
    synchronise = clock.around(strategy.update_engine_weights)  # the canary's passes count once
    monkeypatch.setattr(strategy, "update_engine_weights", synchronise)
    engine = type(trainer.strategy.session.running)
    monkeypatch.setattr(engine, "generate", clock.around(engine.generate))
    monkeypatch.setattr(engine, "poll", clock.around(engine.poll))
    hooks = [
        register_optimizer_step_pre_hook(clock.enter),
        register_optimizer_step_post_hook(clock.leave),
    ]
    yield clock
    for hook in hooks:
        hook.remove()


def build_trainer(
    model, num_prompts: int, group_size: int, prompt_tokens: int, new_tokens: int, *, trunk=None
):
    """A trainer with the embedded engine, and prompts; with a trunk it has a critic, too."""
    import test_bench_step as step

    from lightrft.datasets.types import Prompt
    from lightrft.models import Actor, Critic
    from lightrft.strategy import get_fake_strategy
    from lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainer

    samples = num_prompts * group_size
    args = Namespace(
        seed=0,
        max_norm=1.0,
        bf16=False,
        train_batch_size=samples,
        micro_train_batch_size=4,
        micro_rollout_batch_size=samples,
        rollout_batch_size=num_prompts,
        n_samples_per_prompt=group_size,
        generate_max_len=new_tokens,
        prompt_max_len=prompt_tokens,
        actor_learning_rate=1e-5,
        lr_warmup_ratio=0.0,
        lr_scheduler="constant",
        init_kl_coef=0.0,
        engine_type="hf",
        advantage_estimator="gae" if trunk else "group_norm",
        pretrain=None,
        plot_every=-1,
        **({"critic_learning_rate": 1e-5} if trunk else {}),
    )
    strategy = get_fake_strategy(args)
    critic = Critic(trunk) if trunk else None
    actor, critic, *_ = strategy.prepare_models_and_optimizers(
        Actor(model), critic, None, None, args, 1000
    )
    strategy.setup_inference_engine(args, engine_type="hf", actor=actor)
    trainer = SPMDPPOTrainer(
        strategy,
        actor,
        critic if trunk else None,
        step.EvenWords(),
        tokenizer=step.build_tokenizer(),
        loggers=[],
    )
    words = torch.randint(3, step.VOCAB, (num_prompts, prompt_tokens)).tolist()
    rows = [Prompt(i, " ".join(f"w{t}" for t in ids), tuple(ids)) for i, ids in enumerate(words)]
    return trainer, rows


def test_the_loop_and_the_verified_sync_cost_little_of_a_step_of_135m(monkeypatch):
    trainer, rows = build_trainer(build_model("135M"), 2, 8, 64, 32)
    own, sync = [], []
    with model_time(trainer, monkeypatch) as clock:
        for index in range(harness.MIN_ROUNDS + 1):
            clock.seconds, begin = 0.0, time.perf_counter()
            trainer.make_experience(rows)
            metrics = trainer.ppo_train(index + 1)
            took = time.perf_counter() - begin
            moved = metrics["weight_sync_seconds"]
            own.append((took - clock.seconds) / took)
            sync.append(moved / took)
    print(f"\nlast step: {took:.2f} s, in model and sync {clock.seconds:.2f} s, sync {moved:.3f} s")
    print(f"shares: loop {statistics.median(own[1:]):.4f}, sync {statistics.median(sync[1:]):.4f}")
    hold("loop_share_of_a_step", statistics.median(own[1:]))
    hold("sync_share_of_a_step", statistics.median(sync[1:]))


def test_the_critic_path_of_a_step_of_10m():
    """CPU seconds of a PPO step with a critic of the actor's size over those of a GRPO step."""
    sides = {
        "group_norm": build_trainer(build_model("10M"), 2, 8, 64, 32),
        "gae": build_trainer(build_model("10M"), 2, 8, 64, 32, trunk=build_model("10M").model),
    }
    rounds = {name: [] for name in sides}
    for index in range(harness.MIN_ROUNDS + 1):
        for name, (trainer, rows) in sides.items():
            begin = time.process_time()
            trainer.make_experience(rows)
            metrics = trainer.ppo_train(index + 1)
            rounds[name].append(time.process_time() - begin)
            assert ("critic_loss" in metrics) == (name == "gae")
    found = {name: statistics.median(seconds[1:]) for name, seconds in rounds.items()}
    print("\nCPU seconds of a step:", {name: round(seconds, 2) for name, seconds in found.items()})
    hold("critic_step_over_group_norm_step", found["gae"] / found["group_norm"])


def bare_step(model, prompts, new_tokens: int, micro_batch: int, end: int | None = None):
    """Generation, forward and backward passes and an optimizer step, and nothing around them."""
    from transformers import GenerationConfig

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    config = GenerationConfig(
        do_sample=True, max_new_tokens=new_tokens, pad_token_id=0, eos_token_id=end, top_k=0
    )

    def step() -> None:
        with torch.no_grad():
            mask = torch.ones_like(prompts)
            tokens = model.generate(prompts, attention_mask=mask, generation_config=config)
        width = tokens.shape[1] - prompts.shape[1]
        for rows in tokens.split(micro_batch):
            logits = model(rows, logits_to_keep=width + 1).logits[:, :-1]
            targets = rows[:, -width:]
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def test_a_step_of_135m_against_its_bare_passes():
    num_prompts, group, prompt_tokens, new_tokens = 2, 4, 32, 24
    trainer, rows = build_trainer(
        build_model("135M"), num_prompts, group, prompt_tokens, new_tokens
    )
    prompts = torch.tensor([row.token_ids for row in rows]).repeat_interleave(group, 0)
    bare = bare_step(build_model("135M"), prompts, new_tokens, micro_batch=4)
    steps = itertools.count(1)

    def ours() -> None:
        trainer.make_experience(rows)
        trainer.ppo_train(next(steps))

    timings = harness.interleave({"step": ours, "bare": bare}, torch.device("cpu"), 60.0)
    seconds = {name: timing.median for name, timing in timings.items()}
    print("\nseconds:", {name: round(value, 2) for name, value in seconds.items()})
    hold("step_over_bare_passes", seconds["step"] / seconds["bare"])


@pytest.mark.parametrize("lengths", ["even", "uneven"])
def test_a_tiny_step_against_its_bare_passes(lengths):
    import test_bench_step as tiny

    words = torch.randint(3, tiny.VOCAB, (tiny.NUM_PROMPTS, tiny.PROMPT_TOKENS))
    texts = [" ".join(f"w{token}" for token in row) for row in words.tolist()]
    model = tiny.build_model(ends_early=lengths == "uneven")
    ours = tiny.build_ours(copy.deepcopy(model), tiny.build_tokenizer(), texts)
    prompts = words.repeat_interleave(tiny.GROUP_SIZE, 0)
    bare = bare_step(model, prompts, tiny.NEW_TOKENS, len(prompts), end=1)
    steps = itertools.count(1)
    sides = {"step": lambda: ours(next(steps)), "bare": bare}
    timings = harness.interleave(sides, torch.device("cpu"), 60.0)
    seconds = {name: timing.median for name, timing in timings.items()}
    print("\nseconds:", {name: round(value, 3) for name, value in seconds.items()})
    hold(f"tiny_step_over_bare_passes_{lengths}", seconds["step"] / seconds["bare"])


class Lengths:
    """Ends each row of `model.generate` at its own length."""

    def __init__(self, prompt_tokens: int, lengths: list[int]) -> None:
        self._ends = torch.tensor(lengths) + prompt_tokens

    def __call__(self, token_ids, scores, **_):
        return token_ids.shape[1] >= self._ends


def decoders(size: str, lengths: list[int], prompt_tokens: int = 32):
    """The embedded engine and transformers' generate on the same requests."""
    from transformers import GenerationConfig, StoppingCriteriaList

    from lightrft.engines.types import GenerationRequest, SamplingParams

    model = build_model(size)
    trainer, _ = build_trainer(model, 1, 4, prompt_tokens, max(lengths))
    engine = trainer.strategy.session.running
    trainer.strategy.session.wake_up()
    prompts = torch.randint(3, SIZES[size]["vocab_size"], (len(lengths), prompt_tokens))
    requests = [
        GenerationRequest(tuple(ids), request_id=i, max_tokens=lengths[i])
        for i, ids in enumerate(prompts.tolist())
    ]
    params = SamplingParams(max_tokens=max(lengths), ignore_eos=True)
    config = GenerationConfig(
        do_sample=True, max_new_tokens=max(lengths), pad_token_id=0, eos_token_id=None, top_k=0
    )
    ends = StoppingCriteriaList([Lengths(prompt_tokens, lengths)])

    def ours():
        done = engine.generate(requests, params)
        assert [len(each.output_token_ids) for each in done] == lengths

    def generate():
        with torch.no_grad():
            model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                generation_config=config,
                stopping_criteria=ends,
            )

    return {"hf engine": ours, "generate": generate}


def row_lengths(num_rows: int, longest: int, spread: str) -> list[int]:
    """Tokens of each row: even, or of eight rows one all and the others 1 to 7 sixteenths."""
    if spread == "even":
        return [longest] * num_rows
    shares = [1.0 if row % 8 == 0 else (row % 8) / 16 for row in range(num_rows)]
    return [max(1, round(longest * share)) for share in shares]


@pytest.mark.parametrize(
    "name, size, num_rows, longest, spread",
    [
        ("10M_even", "10M", 32, 96, "even"),
        ("10M_uneven", "10M", 32, 96, "uneven"),
        ("135M_even", "135M", 16, 48, "even"),
        ("135M_uneven", "135M", 16, 48, "uneven"),
        ("10M_uneven_128_rows", "10M", 128, 96, "uneven"),
    ],
)
def test_the_embedded_engine_against_generate(name, size, num_rows, longest, spread):
    """Both sides get all requests at once: the engine has no number of rows that it decodes at most
    unless it is given one, drops those that have ended, and takes no waiting ones in their place.
    """
    lengths = row_lengths(num_rows, longest, spread)
    timings = harness.interleave(decoders(size, lengths), torch.device("cpu"), 30.0)
    for side, timing in timings.items():
        print(f"\n{name}, {side}: {sum(lengths) / timing.median:.0f} tokens/s")
    ratio = timings["generate"].median / timings["hf engine"].median
    hold(f"engine_speed_{name}", ratio)


@contextmanager
def continuous_batching(size: str, lengths: list[int], prompt_tokens: int = 32):
    """Transformers' continuous batching of as many requests, with a cache that holds all of them.

    Left to itself it sizes cache and masks by the whole memory of the machine, and on a CPU was
    still filling them after 20 s; here it gets the blocks that the requests need. Its attention
    takes all rows as one sequence under a mask, so that each row reads the keys of all others.
    """
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    page, rows = 32, len(lengths)
    blocks_of_row = -(-(prompt_tokens + max(lengths)) // page) + 1
    manager = build_model(size).init_continuous_batching(
        generation_config=GenerationConfig(
            do_sample=True, max_new_tokens=max(lengths), pad_token_id=0, eos_token_id=-1, top_k=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=page,
            num_blocks=rows * blocks_of_row,
            max_batch_tokens=rows * prompt_tokens,
            max_requests_per_batch=rows,
            allow_block_sharing=False,
            use_async_batching=False,
        ),
    )
    prompts = torch.randint(3, SIZES[size]["vocab_size"], (rows, prompt_tokens)).tolist()

    def run():
        ids = {}
        for prompt, length in zip(prompts, lengths, strict=True):
            ids[manager.add_request(prompt, max_new_tokens=length)] = length
        while ids:
            result = manager.get_result(timeout=120)
            assert result is not None, f"{len(ids)} requests left: {manager.is_running()}"
            if result.is_finished():
                assert len(result.generated_tokens) == ids.pop(result.request_id)

    manager.start()
    yield run
    manager.stop(block=True)


@pytest.mark.parametrize("spread", ["even", "uneven"])
def test_the_embedded_engine_against_continuous_batching(spread):
    lengths = row_lengths(32, 96, spread)
    sides = {"hf engine": decoders("10M", lengths)["hf engine"]}
    with continuous_batching("10M", lengths) as sides["continuous batching"]:
        timings = harness.interleave(sides, torch.device("cpu"), 30.0)
    for side, timing in timings.items():
        print(f"\n10M, {spread}, {side}: {sum(lengths) / timing.median:.0f} tokens/s")
    ratio = timings["continuous batching"].median / timings["hf engine"].median
    hold(f"engine_speed_10M_{spread}_over_continuous_batching", ratio)
