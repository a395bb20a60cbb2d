"""Options of one part of a run: environments and agents."""

from __future__ import annotations

from dataclasses import dataclass

from lightrft.config.options import (
    DATA_AND_EVAL,
    EVAL,
    Arguments,
    rollout_option,
)


@dataclass(kw_only=True)
class EpisodeOptions:
    """Environments and agents."""

    environment: str | None = rollout_option(
        None,
        "Class FILE.py:NAME whose reset(**row) begins an episode and whose other public "
        "methods are tools of the model; get_reward() is added to the reward. A dict of classes "
        "is chosen from by the column environment. Also skyrl_gym:FILE.py:NAME, skyrl_gym:ID and "
        "openenv:http://HOST:PORT.",
        path="file",
        commands=DATA_AND_EVAL,
    )
    tools: tuple[str, ...] = rollout_option(
        (),
        "Functions FILE.py:NAME that the model may call, beside the environment's methods.",
        path="file",
        commands=DATA_AND_EVAL,
    )
    agent: str | None = rollout_option(
        None,
        "Function FILE.py:NAME, async def run(base_url, api_key, row) -> reward, a dict of named "
        "parts or None, which calls the model through OpenAI's protocol; or verifiers:NAME.",
        path="file",
        commands=EVAL,
    )
    agent_command: str | None = rollout_option(
        None,
        "Command of an agent that is a program, such as 'prog {base_url} {row}' with the row as a "
        "JSON file; it runs in the sandbox, and the last line that it prints is its reward.",
        commands=EVAL,
    )
    agent_timeout_seconds: float = rollout_option(
        600.0,
        "Deadline of one episode of the agent; past it the episode has failed.",
        acts_with="agent or agent_command",
        above=0,
        may_change=True,
        commands=EVAL,
    )
    max_agent_calls: int = rollout_option(
        64,
        "Calls that an episode of the agent may make; further ones are refused.",
        acts_with="agent or agent_command",
        at_least=1,
        at_most=128,
        commands=EVAL,
    )
    max_turns: int = rollout_option(
        8,
        "Turns of an episode; the calls in the last one are not made. Of an agent, turns of which "
        "a conversation of full length has room.",
        acts_with="environment or tools or agent or agent_command",
        at_least=1,
        commands=DATA_AND_EVAL,
    )
    environment_args: Arguments = rollout_option(
        None,
        "Keyword arguments of the environment's class, for each episode; of SkyRL-Gym's make its "
        "env_config.",
        acts_with="environment",
        commands=DATA_AND_EVAL,
    )
    environment_env: tuple[str, ...] = rollout_option(
        (),
        "Environment variables with secrets that environments, tools and agents that are functions "
        "may read; others are kept from them.",
        acts_with="environment or tools or agent",
        may_change=True,
        commands=DATA_AND_EVAL,
    )
    environment_memory_gb: float | None = rollout_option(
        16.0,
        "Memory in GB that a worker of environments and its children may hold; none sets no limit.",
        acts_with="environment or tools",
        above=0,
        may_change=True,
        commands=DATA_AND_EVAL,
    )
    max_tool_calls: int | None = rollout_option(
        None,
        "Calls that an episode may make; further ones are answered by an error.",
        acts_with="environment or tools",
        at_least=1,
        commands=EVAL,
    )
    tool_timeout_seconds: float = rollout_option(
        60.0,
        "Deadline of one reset, call or reward of an environment; past it its worker is killed.",
        acts_with="environment or tools",
        above=0,
        may_change=True,
        commands=DATA_AND_EVAL,
    )
    tool_parser: str = rollout_option(
        "auto",
        "How calls are written; auto takes the tokenizer's response template or what reads the "
        "calls that its chat template writes. A run begins only if a call is read back.",
        acts_with="environment or tools or agent or agent_command",
        choices=(
            *("auto", "hermes", "xml", "glm", "deepseek", "lfm", "gemma", "harmony", "mistral"),
            *("llama", "pythonic"),
        ),
        commands=EVAL,
    )
    max_observation_tokens: int = rollout_option(
        1024,
        "Longest answer of a call, in tokens; the rest is cut.",
        acts_with="environment or tools or agent or agent_command",
        at_least=16,
        commands=EVAL,
    )
    environment_workers: int | None = rollout_option(
        None,
        "Worker processes that host the environments or agents of one rank; unset is one a core.",
        acts_with="environment or tools or agent or agent_command",
        at_least=1,
        may_change=True,
        commands=DATA_AND_EVAL,
    )
