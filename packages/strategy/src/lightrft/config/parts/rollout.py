"""Rollouts: sampling, overlap with training, episodes, and what becomes of their rewards."""

from lightrft.config.options import (
    Arguments,
    option,
    part,
)
from lightrft.config.parts.data import LengthOptions
from lightrft.config.registry import (
    ADVANTAGE_ESTIMATORS,
    KL_ESTIMATORS,
)
from lightrft.engines.types import MIN_TEMPERATURE


@part("rollout")
class DrawOptions:
    """The draw of a token, and the end of a response."""

    temperature: float = option(
        1.0,
        "Sampling temperature.",
        at_least=MIN_TEMPERATURE,
        common=True,
    )
    stop: tuple[str, ...] = option(
        (),
        "Texts that end a response, beside the model's own end; they stay in it.",
    )


@part("rollout")
class TruncationOptions(DrawOptions):
    """Tokens that can be drawn."""

    top_p: float = option(
        1.0,
        "Sample from the smallest set of tokens with this probability; 1 keeps all.",
        above=0,
        at_most=1,
    )
    top_k: int = option(
        -1,
        "Sample from the k most likely tokens; -1 keeps all.",
        at_least=-1,
    )
    min_p: float = option(
        0.0,
        "Sample from the tokens with at least this share of the probability of the most likely "
        "one; 0 keeps all.",
        at_least=0,
        at_most=1,
    )


@part("rollout")
class SamplingOptions(TruncationOptions, LengthOptions):
    """Prompts of a step, and how tokens are drawn."""

    rollout_batch_size: int = option(
        512,
        "Prompts per step, over all ranks.",
        at_least=1,
        common=True,
    )
    use_fire: bool = option(
        False,
        "Draw the first token at first_token_temperature (FIRE).",
    )
    first_token_temperature: float = option(
        10.0,
        "Temperature of the first token with use_fire.",
        at_least=MIN_TEMPERATURE,
        acts_with="use_fire",
    )
    max_num_gen_batches: int = option(
        10,
        "Rollout batches of one step with dynamic_sampling, at most.",
        at_least=1,
        acts_with="dynamic_sampling",
    )


@part("rollout")
class StreamingOptions:
    """Overlap of sampling and training."""

    rollout_lag: int = option(
        0,
        "Updates between the weights that sample a step and those that it trains: with 1 the next "
        "step is sampled before this one is trained on.",
        at_least=0,
    )
    rollout_ranks: int = option(
        0,
        "Processes that only generate, the last ones of the launch: they sample the steps to come "
        "while the others train. 0 lets every process do both.",
        at_least=0,
    )
    stream_chunk: int | None = option(
        None,
        "Tokens that an open response samples between two updates: steps train on the groups that "
        "are complete, the others go on. Unset waits for all responses of a step.",
        at_least=1,
    )
    stream_prompts: int | None = option(
        None,
        "Prompts in flight with stream_chunk; unset is 1.5 rollout_batch_size, and with tool_lag "
        "tool_lag * (max_turns - 1) more of them, up to max_staleness + 1.",
        at_least=1,
        acts_with="stream_chunk",
    )
    max_staleness: int = option(
        4,
        "Updates between the first token of a response and the step that trains on it, at most, "
        "with stream_chunk.",
        at_least=1,
        acts_with="stream_chunk",
    )
    tool_lag: int = option(
        0,
        "Rounds of stream_chunk that pass between a turn of an episode and the next one, while its "
        "tools, or its reward, take their time; 0 waits for them within the round.",
        at_least=0,
    )
    use_rollout_logprobs: bool = option(
        False,
        "Take the old logprobs from the engine instead of a forward pass of the actor.",
    )

    @property
    def keeps_rows(self) -> bool:
        """True if steps train on rows that older weights sampled."""
        return self.rollout_lag > 0 or self.stream_chunk is not None


@part("rollout")
class EnvironmentOptions:
    """Environments and tools."""

    environment: str | None = option(
        None,
        "Class FILE.py:NAME whose reset(**row) begins an episode and whose other public "
        "methods are tools of the model; get_reward() is added to the reward. A dict of classes "
        "is chosen from by the column environment. Also skyrl_gym:FILE.py:NAME, skyrl_gym:ID and "
        "openenv:http://HOST:PORT.",
        path="file",
    )
    tools: tuple[str, ...] = option(
        (),
        "Functions FILE.py:NAME that the model may call, beside the environment's methods.",
        path="file",
    )
    max_turns: int = option(
        8,
        "Maximum turns of an episode; tool calls in the last turn are not executed. For an agent, "
        "the turns that a conversation of full length has room for.",
        acts_with="environment or tools or agent or agent_command",
        at_least=1,
    )
    environment_args: Arguments = option(
        None,
        "Keyword arguments of the environment's class, for each episode; of SkyRL-Gym's make its "
        "env_config.",
        acts_with="environment",
    )
    environment_env: tuple[str, ...] = option(
        (),
        "Environment variables with secrets that environments, tools and agents that are functions "
        "may read; others are kept from them.",
        acts_with="environment or tools or agent",
        may_change=True,
    )
    environment_memory_gb: float | None = option(
        16.0,
        "Memory in GB that a worker of environments and its children may hold; none sets no limit.",
        acts_with="environment or tools",
        above=0,
        may_change=True,
    )
    tool_timeout_seconds: float = option(
        60.0,
        "Deadline of one reset, call or reward of an environment; past it its worker is killed.",
        acts_with="environment or tools",
        above=0,
        may_change=True,
    )
    environment_workers: int | None = option(
        None,
        "Worker processes that host the environments or agents of one rank; unset is one a core.",
        acts_with="environment or tools or agent or agent_command",
        at_least=1,
        may_change=True,
    )


@part("rollout")
class EpisodeOptions(EnvironmentOptions):
    """Environments and agents."""

    late_join: bool = option(
        False,
        "Let an episode whose tool is busy join a later round, once half of the others are "
        "ready or all that took no part in the last one; off, a round waits for all, and timing "
        "changes no bit.",
        acts_with="environment or tools or agent or agent_command",
    )
    agent: str | None = option(
        None,
        "Function FILE.py:NAME, async def run(base_url, api_key, row) -> reward, a dict of named "
        "parts or None, which calls the model through OpenAI's protocol; or verifiers:NAME.",
        path="file",
    )
    agent_command: str | None = option(
        None,
        "Command of an agent that is a program, such as 'prog {base_url} {row}' with the row as a "
        "JSON file; it runs in the sandbox, and the last line that it prints is its reward.",
    )
    agent_timeout_seconds: float = option(
        600.0,
        "Deadline of one episode of the agent; past it the episode has failed.",
        acts_with="agent or agent_command",
        above=0,
        may_change=True,
    )
    max_agent_calls: int = option(
        64,
        "Calls that an episode of the agent may make; further ones are refused.",
        acts_with="agent or agent_command",
        at_least=1,
        at_most=128,
    )
    max_tool_calls: int | None = option(
        None,
        "Calls that an episode may make; further ones are answered by an error.",
        acts_with="environment or tools",
        at_least=1,
    )
    tool_parser: str = option(
        "auto",
        "How calls are written; auto takes the tokenizer's response template or what reads the "
        "calls that its chat template writes. A run begins only if a call is read back.",
        acts_with="environment or tools or agent or agent_command",
        choices=(
            *("auto", "hermes", "xml", "glm", "deepseek", "lfm", "gemma", "harmony", "mistral"),
            *("llama", "pythonic"),
        ),
    )
    max_observation_tokens: int = option(
        1024,
        "Longest answer of a call, in tokens; the rest is cut.",
        acts_with="environment or tools or agent or agent_command",
        at_least=16,
    )

    @property
    def has_episodes(self) -> bool:
        """True if responses may have several turns."""
        return bool(self.environment or self.tools) or self.has_agent

    @property
    def has_agent(self) -> bool:
        """True if an agent that owns its loop calls the model."""
        return bool(self.agent or self.agent_command)


@part("rollout")
class ShapingOptions:
    """Rewards of samples, shaped to advantages."""

    micro_rollout_batch_size: int = option(
        2,
        "Samples per rank in one forward pass before training.",
        at_least=1,
        acts_with="not micro_batch_tokens",
    )
    n_samples_per_prompt: int = option(
        8,
        "Completions per prompt.",
        at_least=1,
        common=True,
    )
    advantage_estimator: str = option(
        "group_norm",
        "Advantage estimator; gae is PPO with a critic.",
        choices=ADVANTAGE_ESTIMATORS,
        common=True,
        group="algorithm",
    )
    use_kl_loss: bool = option(
        False,
        "Put the KL divergence into the loss instead of the reward.",
    )
    kl_estimator: str | None = option(
        None,
        "Estimator of the KL divergence; unset is k1 in the reward, where no other is right, and "
        "k3+ in the loss.",
        choices=KL_ESTIMATORS,
        acts_with="init_kl_coef",
    )
    advantages_norm: bool = option(
        False,
        "Normalise advantages over all ranks.",
    )
    advantage_clip: float = option(
        0.0,
        "Clip advantages to this magnitude; 0 is off.",
        at_least=0,
    )
    reward_clip: float = option(
        0.0,
        "Clip rewards to this magnitude; 0 is off.",
        at_least=0,
    )
    reward_running_norm: bool = option(
        False,
        "Divide rewards by their running standard deviation.",
    )
    reward_running_norm_minus_mean: bool = option(
        False,
        "Subtract the running mean as well.",
        acts_with="reward_running_norm",
    )
    overlong_buffer: bool = option(
        False,
        "Punish overlong responses softly.",
    )
    overlong_buffer_len: int = option(
        1024,
        "Tokens before the limit in which the punishment rises.",
        at_least=1,
        acts_with="overlong_buffer",
    )
    overlong_buffer_penalty_factor: float = option(
        1.0,
        "Punishment at the limit.",
        at_least=0,
        acts_with="overlong_buffer",
    )
    mask_truncated: bool = option(
        False,
        "Train on no token of a response that was cut at its limit; its reward still counts in "
        "the baseline of its group.",
    )
    dynamic_sampling: bool = option(
        False,
        "Draw again for groups whose rewards are all equal.",
    )
