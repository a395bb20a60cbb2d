"""Agents in real workers against a scripted or drawing engine."""

from pathlib import Path

from tests.datasets import chat_families as families
from tests.rollout import stages

from lightrft.config import TrainConfig
from lightrft.datasets.media import TextModality
from lightrft.rollout.agents.agents import Agents

CASES = Path(__file__).with_name("agent_cases.py")


def options_of(num_rows, **options):
    options = {"agent_timeout_seconds": 30.0, "tool_parser": "hermes", **options}
    return stages.options_of(num_rows, **options)


class AgentStage(stages.FakeStage):
    """An agent, its endpoint, and an engine whose answers follow from request id and context."""

    def __init__(self, tmp_path, agent, *, script=None, rows=None, family="Qwen2.5", **options):
        self.tokenizer = families.family_tokenizer(family)
        self.script, self.asked = script or self.drawn, []
        rows = rows or [{"input": "Find it.", "target": 7, "log": str(tmp_path / "log")}]
        if agent is not None:
            options["agent"] = agent if ":" in agent else f"{CASES}:{agent}"
        self.config = TrainConfig(**options_of(len(rows), **options))
        modality = TextModality(self.tokenizer)
        self.agents = Agents(self.config, self.tokenizer, folder=tmp_path, modality=modality)
        self.prompts = stages.load_rows(tmp_path, rows, self.tokenizer, self.config)
        self.set_engine()

    def drawn(self, request):
        return f"word {request.request_id % 1000}"

    def said(self, request):
        self.asked.append(request)
        return self.script(request)

    def sample(self, **keywords):
        self.last_requests = self.requests(**keywords)
        return self.agents.source(self.parts).sample(self.last_requests)

    def close(self):
        self.agents.close()
