"""Rollouts: sampling, overlap with training, episodes, and shaping of their rewards."""

import shlex

from lightrft.config.options import (
    Arguments,
    checks,
    excludes,
    nonzero,
    option,
    part,
)
from lightrft.config.parts.data import LengthOptions, PromptOptions
from lightrft.config.parts.machine import EngineChoiceOptions, EngineOptions
from lightrft.config.parts.run_control import FolderOptions
from lightrft.config.parts.scores import ModelOptions, RewardOptions, ServiceOptions
from lightrft.config.parts.training import ComputeOptions
from lightrft.config.registry import (
    ADVANTAGE_ESTIMATORS,
    KL_ESTIMATORS,
    split_kind,
)
from lightrft.engines.factory import engine_facts
from lightrft.engines.types import MIN_TEMPERATURE, MOST_KEPT_IDS


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

    rules = checks(
        lambda c: "" in c.stop and "stop: got an empty text, which would end every response",
    )


NO_MIN_P = (
    "min_p: the {engine} engine cannot draw by a seed with it: use top_p or top_k, or another "
    "engine_type"
)
MAX_SAMPLES = 10**7


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

    rules = checks(
        nonzero("top_k"),
        lambda c: (
            c.min_p > 0
            and not engine_facts(c.engine_type).draws_min_p
            and NO_MIN_P.format(engine=c.engine_type)
        ),
    )

    @property
    def truncates(self) -> bool:
        """Return whether some tokens cannot be drawn."""
        return self.top_p < 1 or self.top_k != -1 or self.min_p > 0


@part("rollout")
class GroupOptions:
    """Samples of a prompt, and samples that are scored at once."""

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


@part("rollout")
class SamplingOptions(TruncationOptions, LengthOptions, GroupOptions, ComputeOptions):
    """Prompts of a step, and how tokens are drawn."""

    rollout_batch_size: int = option(
        512,
        "Prompts per step, over all ranks.",
        at_least=1,
        common=True,
    )
    routing_replay: str = option(
        "auto",
        "Experts of a mixture-of-experts model in training: auto takes those that the engine "
        "recorded, where it can; off lets the trainer choose again.",
        choices=("auto", "off"),
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

    rules = checks(
        lambda c: (
            c.rollout_batch_size * c.n_samples_per_prompt > MAX_SAMPLES
            and (
                "rollout_batch_size * n_samples_per_prompt: got "
                f"{c.rollout_batch_size} * {c.n_samples_per_prompt}, expected at most "
                f"{MAX_SAMPLES} responses of a step: every process holds all of them"
            )
        ),
        *excludes(
            "use_fire",
            {"environment or tools or agent or agent_command": "episodes have many first tokens"},
        ),
    )


@part("rollout")
class StreamingOptions:
    """Overlap of sampling and training."""

    overlap: str = option(
        "off",
        "What is sampled while a step is trained. stream: answers that are not complete go on in "
        "the next steps, max_staleness of them at most; split: half of the processes sample the "
        "next step. It chooses stream_chunk, or rollout_lag and rollout_ranks, where these are not "
        "given.",
        choices=("off", "stream", "split"),
        common=True,
        may_change=True,
    )
    rollout_lag: int = option(
        0,
        "How many updates old the weights that sample a step are: with 1 the next step is sampled "
        "before this one is trained on.",
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
        acts_with="stream_chunk and environment or tools",
        acts_when=lambda c: c.stream_chunk is not None and bool(c.environment or c.tools),
    )
    use_rollout_logprobs: bool = option(
        False,
        "Take the old logprobs from the engine instead of a forward pass of the actor.",
    )

    rules = checks(
        lambda c: (
            c.tool_lag > c.max_staleness
            and (
                "tool_lag must be at most max_staleness, or all episodes would be waited for: got "
                f"{c.tool_lag} and {c.max_staleness}"
            )
        ),
        lambda c: (
            c.stream_prompts is not None
            and not 1 <= c.stream_prompts / c.rollout_batch_size <= c.max_staleness + 1
            and (
                "stream_prompts must lie between rollout_batch_size and max_staleness + 1 times "
                "that, or old responses could not all be trained on in time: got "
                f"{c.stream_prompts} for {c.rollout_batch_size} and max_staleness {c.max_staleness}"
            )
        ),
        lambda c: (
            c.rollout_ranks > 0
            and c.rollout_lag == 0
            and ("rollout_lag" in c.explicit or c.overlap != "split")
            and "rollout_ranks samples the steps to come while one is trained: add rollout_lag 1"
        ),
        lambda c: c.rollout_ranks > 0 and not c.fsdp and "rollout_ranks needs FSDP2: add fsdp",
        *excludes(
            "stream_chunk",
            {
                "stop": "a text may begin in one chunk and end in the next",
                "agent or agent_command": "its programs cannot be brought back in the middle",
                "late_join": "rounds decide when an open episode goes on, and no time: use "
                "tool_lag",
            },
        ),
        lambda c: (
            c.stream_chunk is not None
            and split_kind(c.environment or "")[0] == "openenv"
            and (
                "stream_chunk excludes environment openenv: the server's sessions do not outlive "
                "the run's process; leave one of them out"
            )
        ),
        lambda c: (
            c.stream_chunk is not None
            and c.judges_by_policy
            and (
                "stream_chunk excludes judge_model policy: the engine is asked where it has no "
                "open responses; leave one of them out"
            )
        ),
        *excludes(
            "rollout_ranks",
            {
                "reward_pretrain": "the ranks that generate hold no reward model",
                "teacher or teachers or teacher_prompt_column": "they hold no teacher",
                "audit_every": "the samples are on other ranks",
            },
        ),
        lambda c: (
            c.use_rollout_logprobs
            and c.truncates
            and (c.truncated_logprobs == "all" or not 0 < c.top_k <= MOST_KEPT_IDS)
            and (
                "use_rollout_logprobs with top_p, top_k or min_p needs the kept tokens of every "
                "place: leave truncated_logprobs at kept, and set top_k between 1 and "
                f"{MOST_KEPT_IDS}; or leave one of them out"
            )
        ),
        lambda c: (
            c.use_rollout_logprobs
            and c.correction
            and (
                "use_rollout_logprobs excludes off_policy_correction: all its weights would be 1; "
                "leave one of them out"
            )
        ),
        *excludes(
            "use_rollout_logprobs",
            {
                "use_fire": "its first tokens are drawn at another temperature",
                "high_entropy_token_ratio": "it needs a forward pass",
            },
        ),
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


def _command_problem(command: str) -> str | None:
    expected = "expected 'PROGRAM {base_url} {row}', where {row} is the file of the episode's row"
    try:
        words = shlex.split(command)
    except ValueError as error:
        return f"agent_command: got {command!r}, whose words cannot be told apart: {error}"
    if not any("{row}" in word for word in words[1:]):
        return f"agent_command: got {command!r}, {expected}"
    return None


@part("rollout")
class EpisodeOptions(EnvironmentOptions):
    """Environments and agents."""

    late_join: bool = option(
        False,
        "Do not wait for slow tools: start a round when half of the episodes are ready, or all "
        "that took no part in the last one; off, a round waits for all, and timing changes no "
        "bit.",
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
            *("llama", "pythonic", "kimi", "invoke"),
        ),
    )
    max_observation_tokens: int = option(
        1024,
        "Longest answer of a call, in tokens; the rest is cut.",
        acts_with="environment or tools or agent or agent_command",
        at_least=16,
    )

    rules = checks(
        lambda c: (
            c.has_episodes
            and not c.apply_chat_template
            and "environment, tools and agent need turns: add apply_chat_template"
        ),
        lambda c: c.agent_command is not None and _command_problem(c.agent_command),
        *excludes("agent", {"agent_command": "an episode has one agent"}),
        *excludes(
            "agent or agent_command",
            {
                "environment or tools": "the agent has tools of its own",
                "dynamic_sampling": "which rows to keep is decided by row, and episodes have "
                "several",
                "audit_every": "the audit counts rows, and episodes have several",
                "teachers or teacher_prompt_column": "it looks up the prompt that a row begins "
                "with",
            },
        ),
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
class ShapingOptions(GroupOptions):
    """Rewards of samples, shaped to advantages."""

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
        acts_with="init_kl_coef, k1 also with the KL in the reward: as a loss it has no "
        "expected gradient",
        acts_when=lambda c: bool(c.init_kl_coef) and not (c.use_kl_loss and c.kl_estimator == "k1"),
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

    rules = checks(
        lambda c: (
            c.use_kl_loss
            and c.init_kl_coef == 0
            and "use_kl_loss needs init_kl_coef > 0, say 0.01: got 0, which loads no reference "
            "model"
        ),
        lambda c: (
            c.dynamic_sampling
            and c.n_samples_per_prompt < 2
            and (
                "dynamic_sampling compares the samples of one prompt: "
                f"it needs n_samples_per_prompt >= 2, got {c.n_samples_per_prompt}"
            )
        ),
        lambda c: (
            c.overlong_buffer
            and c.overlong_buffer_len > c.generate_max_len
            and (
                "overlong_buffer_len must be at most generate_max_len: got "
                f"{c.overlong_buffer_len} and {c.generate_max_len}"
            )
        ),
        *excludes(
            "dynamic_sampling", {"advantage_estimator zero": "it looks for groups by their rewards"}
        ),
    )

    @property
    def kl_estimator_name(self) -> str:
        """The KL estimator, by default the one with the right gradient in its place."""
        return self.kl_estimator or ("k3+" if self.use_kl_loss else "k1")


class ScoringOptions(
    FolderOptions,
    RewardOptions,
    EpisodeOptions,
    PromptOptions,
    LengthOptions,
    ServiceOptions,
    ModelOptions,
    ComputeOptions,
):
    """Scorers of responses, their inputs, and the place of their answers."""

    @property
    def has_rewards(self) -> bool:
        """Return whether the options name something that scores responses."""
        scored = (self.reward_fn, self.remote_rm_url, self.reward_pretrain)
        named = (*scored, self.environment, self.has_agent)
        return any(map(bool, named))


class RolloutOptions(
    ScoringOptions,
    RewardOptions,
    EpisodeOptions,
    StreamingOptions,
    SamplingOptions,
    PromptOptions,
    LengthOptions,
    GroupOptions,
    ServiceOptions,
    ModelOptions,
    EngineOptions,
    EngineChoiceOptions,
    ComputeOptions,
):
    """Rollouts from prompt to score."""

    @property
    def num_prompts_in_flight(self) -> int:
        """Prompts that streaming rollouts keep open over all ranks."""
        waiting = self.tool_lag * (self.max_turns - 1) if self.has_episodes else 0
        most = (self.max_staleness + 1) * self.rollout_batch_size
        usual = -(-3 * self.rollout_batch_size // 2) + waiting * self.rollout_batch_size
        return self.stream_prompts or min(most, usual)

    @property
    def max_episode_tokens(self) -> int:
        """Longest prompt and response, observations included."""
        if not self.has_episodes:
            return self.prompt_max_len + self.generate_max_len
        between = (self.max_turns - 1) * self.max_observation_tokens
        longest = self.prompt_max_len + self.max_turns * self.generate_max_len + between
        return longest if self.max_len is None else min(longest, self.max_len)

    @property
    def max_response_tokens(self) -> int:
        """Most tokens that are sampled for one response."""
        return self.generate_max_len * (self.max_turns if self.has_episodes else 1)
