"""Rollout and reward together, beside the rollout alone: rewards run while others still generate.

    OMP_NUM_THREADS=1 uv run pytest benchmarks/test_bench_reward_overlap.py -s

32 groups whose responses are 24 to 192 tokens long, in evenly spread lengths, and a reward in one
worker whose pauses sum to the time T of the generation. One after the other would take 2 T.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lightrft.config import TrainConfig
from lightrft.datasets.types import Prompt
from lightrft.engines import EngineConfig, SamplingParams
from lightrft.engines.hf.engine import HFEngine
from lightrft.rewards import build_reward
from lightrft.rollout.sampler import RolloutSampler
from lightrft.rollout.source import SourceParts
from lightrft.strategy import get_fake_strategy

NUM_GROUPS, GROUP_SIZE, SHORTEST, LONGEST = 32, 2, 24, 192
NUM_ROUNDS = 5
MODEL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
PARAMS = SamplingParams(n=GROUP_SIZE, max_tokens=LONGEST, ignore_eos=True)
SOURCE = """
import time

def waits(responses, pause):
    time.sleep(pause[0])
    return [float(len(text)) for text in responses]
"""


def bound(request_id: int) -> int:
    """Its length: evenly spread, in another order than that of the prompts."""
    place = request_id * 11 % NUM_GROUPS
    return SHORTEST + (LONGEST - SHORTEST) * place // (NUM_GROUPS - 1)


class SpreadEngine(HFEngine):
    """Ends every response at its own length."""

    def submit(self, requests, sampling_params):
        bounded = [replace(r, max_tokens=bound(r.request_id)) for r in requests]
        super().submit(bounded, sampling_params)


class LateEngine(SpreadEngine):
    """Gives everything at the end."""

    def stream_rows(self, rows, params):
        yield [row for part in super().stream_rows(rows, params) for row in part]


class Numbers:
    pad_token_id = 0

    def decode(self, token_ids, *, skip_special_tokens):
        return ",".join(map(str, token_ids))


@dataclass(frozen=True, slots=True)
class Way:
    """An engine and who samples and scores with it."""

    engine: HFEngine
    sampler: RolloutSampler

    @classmethod
    def of(cls, engine_type, model, reward):
        strategy = get_fake_strategy()
        strategy.inference_engine = engine_type(EngineConfig("hf", ""), module=model)
        sampler = RolloutSampler(SourceParts(strategy.session, TrainConfig(), Numbers(), reward))
        return cls(strategy.inference_engine, sampler)


def timed(run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def test_scoring_overlaps_generation(benchmark, tmp_path):
    path = tmp_path / "r.py"
    path.write_text(SOURCE)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**MODEL)).eval()

    def prompts(pause: float) -> list[Prompt]:
        columns = {"pause": pause}
        return [
            Prompt(id=i, text=f"p{i}", token_ids=(5 + i, 9), label=None, columns=columns)
            for i in range(NUM_GROUPS)
        ]

    with build_reward([f"{path}:waits"]) as reward:
        early, late = Way.of(SpreadEngine, model, reward), Way.of(LateEngine, model, reward)

        def generation() -> float:
            return timed(lambda: early.sampler.sample_all(prompts(0.0), PARAMS))

        tables = [way.sampler.sample_all(prompts(0.0), PARAMS)[1] for way in (early, late)]
        assert tables[0].rewards.tolist() == tables[1].rewards.tolist()
        ratios: dict[str, list[float]] = {"beside": [], "after": []}
        seconds = []
        for _ in range(NUM_ROUNDS):
            before = generation()
            rows = prompts(before / NUM_GROUPS)
            found = {
                "beside": timed(lambda: early.sampler.sample_all(rows, PARAMS)),  # noqa: B023
                "after": timed(lambda: late.sampler.sample_all(rows, PARAMS)),  # noqa: B023
            }
            # Other programs come and go: the mean of both sides.
            alone = (before + generation()) / 2
            seconds.append(alone)
            for name, took in found.items():
                ratios[name].append(took / alone)
    medians = {name: statistics.median(values) for name, values in ratios.items()}
    print(f"\n{NUM_GROUPS} groups, T = {statistics.median(seconds):.2f} s, pauses sum to T")
    for name, values in ratios.items():
        shown = " ".join(f"{value:.2f}" for value in values)
        print(f"  scored {name:<7} the generation: {medians[name]:.3f} T   ({shown})")
    benchmark.extra_info.update(ratios=ratios, seconds=seconds)
    benchmark.pedantic(generation, rounds=1, iterations=1)
    assert medians["beside"] <= 1.25 + 1 / NUM_GROUPS
    assert medians["after"] >= 1.6  # the same work is there
