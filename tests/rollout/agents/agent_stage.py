"""Agents in real workers against a scripted or drawing engine."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

from tests.engines.fake_engine import FakeEngine

from lightrft.config import TrainConfig
from lightrft.datasets import load_prompts
from lightrft.datasets.media import TextModality
from lightrft.engines.types import EngineConfig
from lightrft.rewards.build import CombinedReward
from lightrft.rollout.agents.agents import Agents
from lightrft.rollout.sampler import training_params
from lightrft.rollout.source import SampleRequests, SourceParts
from lightrft.strategy import get_fake_strategy

HERE = Path(__file__).parent
CASES = HERE / "agent_cases.py"
_SPEC = importlib.util.spec_from_file_location(
    "chat_families", HERE.parent.parent / "datasets" / "chat_families.py"
)
families = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(families)


def options_of(num_rows, **options):
    return {
        "apply_chat_template": True,
        "n_samples_per_prompt": 2,
        "generate_max_len": 200,
        "prompt_max_len": 700,
        "bf16": False,
        "environment_workers": 1,
        "agent_timeout_seconds": 30.0,
        "label_key": None,
        "rollout_batch_size": num_rows,
        "train_batch_size": 2 * num_rows,
        "max_turns": 6,
        "tool_parser": "hermes",
        "enable_engine_sleep": False,
        **options,
    }


class AgentStage:
    """An agent, its endpoint, and an engine whose answers follow from request id and context."""

    def __init__(self, tmp_path, agent, *, script=None, rows=None, family="Qwen2.5", **options):
        self.tokenizer = families.family_tokenizer(family)
        self.script = script or self.drawn
        rows = rows or [{"input": "Find it.", "target": 7, "log": str(tmp_path / "log")}]
        data = tmp_path / "rows.jsonl"
        data.write_text("\n".join(json.dumps(row) for row in rows))
        if agent is not None:
            options["agent"] = agent if ":" in agent else f"{CASES}:{agent}"
        self.config = TrainConfig(**options_of(len(rows), **options))
        modality = TextModality(self.tokenizer)
        self.agents = Agents(self.config, self.tokenizer, folder=tmp_path, modality=modality)
        self.prompts = load_prompts(data, self.tokenizer, self.config).prompts
        self.strategy = get_fake_strategy(self.config)
        self.engine = FakeEngine(EngineConfig("fake", ""), script=self.say)
        self.engine.eos_ids = (self.tokenizer.eos_token_id,)
        self.engine.set_weights_version(3)
        self.strategy.inference_engine = self.engine
        self.reward = CombinedReward((), ())
        self.asked = []

    def drawn(self, request):
        return f"word {request.request_id % 1000}"

    def say(self, request, index):
        self.asked.append(request)
        text = self.script(request)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = [*ids, self.tokenizer.eos_token_id]
        return ids, [-0.25 - 0.5 * (i % 7) for i in range(len(ids))]

    @property
    def parts(self):
        return SourceParts(self.strategy.session, self.config, self.tokenizer, self.reward)

    def requests(self, **keywords):
        params = replace(training_params(self.config), **keywords)
        return SampleRequests(
            self.prompts, range(len(self.prompts)), len(self.prompts), params, step=1
        )

    def sample(self, **keywords):
        self.last_requests = self.requests(**keywords)
        return self.agents.source(self.parts).sample(self.last_requests)

    def text(self, rollout):
        return self.tokenizer.decode(rollout.completion.output_token_ids)

    def close(self):
        self.agents.close()
