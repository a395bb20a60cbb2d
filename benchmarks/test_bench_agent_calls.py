"""200 calls of agents at once on one rank, beside the same requests given to the engine at once.

    OMP_NUM_THREADS=1 uv run pytest benchmarks/test_bench_agent_calls.py -s

Every episode of an agent makes one call: workers start them, the endpoint reads, renders and
answers. The engine's share of that time is what matters, and that its work is that of one batch:
given at once, the same requests keep it busy throughout. Its work is compared by processor time,
since other programs hold up two runs unequally. The peak of Python's memory is bounded as well.
"""

from __future__ import annotations

import json
import statistics
import time
import tracemalloc
from contextlib import closing
from dataclasses import replace

import pytest
from tests.rollout.agents.agent_stage import families, options_of

from lightrft.config import TrainConfig
from lightrft.datasets import load_prompts
from lightrft.datasets.media import TextModality
from lightrft.engines import EngineConfig
from lightrft.engines.hf.engine import HFEngine
from lightrft.rewards.build import CombinedReward
from lightrft.rollout.agents.agents import Agents
from lightrft.rollout.sampler import training_params
from lightrft.rollout.source import SampleRequests, SourceParts
from lightrft.strategy import get_fake_strategy

NUM_PROMPTS, GROUP_SIZE, NUM_TOKENS = 25, 8, 256
NUM_CALLS, NUM_ROUNDS = NUM_PROMPTS * GROUP_SIZE, 3
MAX_BYTES_A_CALL = 1 << 18
# Without a package for HTTP, whose time would be that of the agent.
AGENT = """
import asyncio, json
from urllib.parse import urlsplit


async def run(base_url, api_key, row):
    place = urlsplit(base_url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    body = json.dumps({"model": "policy", "messages": row["prompt"]})
    head = (
        f"POST {place.path}/chat/completions HTTP/1.1", f"host: {place.netloc}",
        f"authorization: Bearer {api_key}", "content-type: application/json",
        f"content-length: {len(body)}", "connection: close", "", body,
    )
    writer.write("\\r\\n".join(head).encode())
    head, _, answer = (await reader.read()).partition(b"\\r\\n\\r\\n")
    assert b" 200 " in head
    return len(json.loads(answer)["choices"][0]["message"]["content"]) % 7
"""


class TimedEngine(HFEngine):
    """Notes what it was asked for, and how long that took."""

    def generate(self, requests, sampling_params, **options):
        wall, work = time.perf_counter(), time.process_time()
        found = super().generate(requests, sampling_params, **options)
        self.seconds += time.perf_counter() - wall
        self.work_seconds += time.process_time() - work
        self.asked = [*self.asked, *requests]
        return found

    def forget(self):
        self.seconds = self.work_seconds = 0.0
        self.asked = []


class Stage:
    """Agents of a run and an engine with a small model."""

    def __init__(self, folder):
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        self.tokenizer = families.family_tokenizer("Qwen2.5")
        (folder / "agent.py").write_text(AGENT)
        rows = [json.dumps({"input": f"Tell a story of {i} lines."}) for i in range(NUM_PROMPTS)]
        (folder / "rows.jsonl").write_text("\n".join(rows))
        options = {"agent": f"{folder / 'agent.py'}:run", "generate_max_len": NUM_TOKENS}
        options |= {"n_samples_per_prompt": GROUP_SIZE, "train_batch_size": NUM_CALLS}
        options |= {"agent_timeout_seconds": 3600.0}
        self.config = TrainConfig(**options_of(NUM_PROMPTS, **options))
        torch.manual_seed(0)
        shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
        model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(self.tokenizer), **shape, **heads))
        self.engine = TimedEngine(EngineConfig("hf", ""), module=model.eval())
        self.strategy = get_fake_strategy(self.config)
        self.strategy.inference_engine = self.engine
        modality = TextModality(self.tokenizer)
        self.agents = Agents(self.config, self.tokenizer, modality=modality)
        self.prompts = load_prompts(folder / "rows.jsonl", self.tokenizer, self.config).prompts
        self.params = replace(training_params(self.config), ignore_eos=True)
        parts = SourceParts(
            self.strategy.session, self.config, self.tokenizer, CombinedReward((), ())
        )
        self.source = self.agents.source(parts)

    def by_the_endpoint(self, num_tokens=NUM_TOKENS):
        self.engine.forget()
        count, params = len(self.prompts), replace(self.params, max_tokens=num_tokens)
        return self.source.episodes(
            SampleRequests(self.prompts, range(count), count, params, step=1)
        )

    def at_once(self):
        params = self.agents.chat.with_end_of_turn(replace(self.params, n=1))
        asked = self.engine.asked
        self.engine.forget()
        return self.engine.generate(asked, params)


@pytest.mark.timeout(1800)
def test_the_engine_is_busy_while_200_calls_wait(benchmark, tmp_path):
    stage = Stage(tmp_path)
    with closing(stage.agents):
        episodes = stage.by_the_endpoint()
        assert len(episodes) == len(stage.engine.asked) == NUM_CALLS
        assert not any(episode.failure for episode in episodes)
        assert sum(episode.counts["lost_calls"] for episode in episodes) == 0
        shares, waits = [], []
        for _ in range(NUM_ROUNDS):
            start = time.perf_counter()
            stage.by_the_endpoint()
            wall, busy = time.perf_counter() - start, stage.engine.seconds
            work = stage.engine.work_seconds
            stage.at_once()
            shares.append(busy / wall * min(1.0, stage.engine.work_seconds / work))
            waits.append(wall - busy)
        tracemalloc.start()
        stage.by_the_endpoint(num_tokens=4)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    shown = " ".join(f"{share:.3f}" for share in shares)
    print(f"\nthe engine is busy for {statistics.median(shares):.3f} of the time   ({shown})")
    print(f"without the engine {1000 * statistics.median(waits):.0f} ms, memory {peak >> 20} MiB")
    benchmark.extra_info.update(shares=shares, peak_bytes=peak)
    benchmark.pedantic(stage.at_once, rounds=1, iterations=1)
    assert peak < MAX_BYTES_A_CALL * NUM_CALLS
    assert statistics.median(shares) >= 0.9
