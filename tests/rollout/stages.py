"""Episodes and agents in real workers, with a fake engine that says what a script says."""

import json
from dataclasses import replace
from pathlib import Path

from tests.datasets import chat_families as families
from tests.engines.fake_engine import FakeEngine

from lightrft.config import TrainConfig
from lightrft.datasets import load_prompts
from lightrft.engines.types import EngineConfig
from lightrft.experience.ledger_gate import rebuild
from lightrft.rewards.build import CombinedReward
from lightrft.rollout.environments.environments import Environments
from lightrft.rollout.environments.episode import TURN_STEP
from lightrft.rollout.environments.pool import EnvironmentPool
from lightrft.rollout.ledger_records import take_evidence
from lightrft.rollout.sampler import RolloutSampler, training_params
from lightrft.rollout.source import SampleRequests, SourceParts
from lightrft.strategy import get_fake_strategy
from lightrft.strategy.distributed.deadlines import StepTimer

HERE = Path(__file__).parent
CASES = HERE / "environment_cases.py"
TEXT = HERE / "text_environments.py"
POOLS = {}


def pool_of(config, rank=0, **options):
    """Workers are slow to start: those of one class serve all tests of a module."""
    limits = config.tool_timeout_seconds, config.environment_workers
    key = config.environment, config.tools, *limits, rank
    if key not in POOLS:
        POOLS[key] = EnvironmentPool(config, **options)
    return POOLS[key]


def close_pools():
    for pool in POOLS.values():
        pool.close()
    POOLS.clear()


def call(name, **arguments):
    """A call as Qwen2.5 writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def answers_of(rollout):
    """What was answered, turn by turn."""
    return [[answer.text for answer in turn] for turn in rollout.conversation.answers]


def check_rows(rollouts, evidence):
    """Each row is what the ledger says of its calls."""
    for rollout in rollouts:
        row = rebuild(rollout.sample_id, evidence)
        assert tuple(row.token_ids.tolist()) == rollout.token_ids
        start = len(rollout.completion.prompt_token_ids)
        assert tuple((row.turns >= 0)[start:].tolist()) == rollout.completion.is_sampled


def options_of(num_rows, **options):
    return {
        "apply_chat_template": True,
        "n_samples_per_prompt": 2,
        "generate_max_len": 200,
        "prompt_max_len": 700,
        "bf16": False,
        "environment_workers": 1,
        "label_key": None,
        "rollout_batch_size": num_rows,
        "train_batch_size": 2 * num_rows,
        "max_turns": 6,
        "enable_engine_sleep": False,
        **options,
    }


def load_rows(folder, rows, tokenizer, config):
    """The prompts of a file with these rows."""
    data = folder / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    return load_prompts(data, tokenizer, config).prompts


class FakeStage:
    """A fake engine of version 3; a subclass has a config, a tokenizer, prompts, and `said`."""

    def set_engine(self):
        self.strategy = get_fake_strategy(self.config)
        self.engine = FakeEngine(EngineConfig("fake", ""), script=self.say)
        self.engine.eos_ids = (self.tokenizer.eos_token_id,)
        self.engine.set_weights_version(3)
        self.strategy.inference_engine = self.engine
        self.reward = CombinedReward((), ())

    def say(self, request, index):
        """What is said next, ended."""
        ids = self.tokenizer(self.said(request), add_special_tokens=False)["input_ids"]
        ids = [*ids, self.tokenizer.eos_token_id]
        return ids, [-0.25 - 0.5 * (i % 7) for i in range(len(ids))]

    @property
    def parts(self):
        return SourceParts(self.strategy.session, self.config, self.tokenizer, self.reward)

    def requests(self, **keywords):
        params = replace(training_params(self.config), **keywords)
        count = len(self.prompts)
        return SampleRequests(self.prompts, range(count), count, params, step=1)

    def text(self, rollout):
        return self.tokenizer.decode(rollout.completion.output_token_ids)


class Stage(FakeStage):
    """Environments whose model says, turn by turn, what a script says for each prompt and sample.

    Args:
        script: Turns of all samples, or a function of a request's number.
        environment: A class of `environment_cases.py`, or any environment as an option names it.
    """

    def __init__(self, tmp_path, script, *, rows=None, environment="Guess", pool=None, **options):
        self.tokenizer = families.family_tokenizer("Qwen2.5")
        self.script = script if callable(script) else lambda request_id: script
        rows = rows or [{"input": "Find it.", "target": 7}]
        if environment is not None and ":" not in environment:
            environment = f"{CASES}:{environment}"
        options = {"environment": environment, "tool_timeout_seconds": 20.0, **options}
        self.config = TrainConfig(**options_of(len(rows), **options))
        self.environments = Environments(
            self.config, self.tokenizer, folder=tmp_path, pool=pool or pool_of(self.config)
        )
        self.prompts = load_rows(tmp_path, rows, self.environments.prompt_tokenizer, self.config)
        self.set_engine()

    def said(self, request):
        context = self.tokenizer.decode(request.prompt_token_ids)
        turn = context.count("<|im_start|>assistant") - 1
        turns = self.script(request.request_id % TURN_STEP)
        return turns[min(turn, len(turns) - 1)]

    def sample(self, **keywords):
        """The rollouts of a step and the rewards of their environments."""
        source = self.environments.source(self.parts)
        return source.rollouts(self.requests(**keywords), lambda group: None)

    def check_rows(self, rollouts):
        special_ids = self.environments.special_ids
        session = self.strategy.session
        check_rows(rollouts, take_evidence(rollouts, session, special_ids=special_ids))

    def sampler(self):
        return RolloutSampler(self.parts, self.environments.source)

    def collect(self, reward=None, **options):
        """The samples of a step, scored by a reward function, too."""
        self.reward = reward or self.reward
        options = {"first_request_id": 0, "step": 1, "timer": StepTimer(), **options}
        return self.sampler().collect(self.prompts, **options)


class GatePassed(Exception):
    """The step has come to its forward passes."""


class UpToForward(StepTimer):
    def stage(self, name):
        if name == "forward":
            raise GatePassed
        return super().stage(name)
