"""The joined options of a run, and rules between their values that give lines, not errors."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Collection
from dataclasses import dataclass

from lightrft.config.options import option, part
from lightrft.config.parts.data import PROMPT_SLOT, MediaOptions, PromptOptions, SourceOptions
from lightrft.config.parts.learning import (
    SAMPLED,
    AlgorithmOptions,
    SampledTeacherOptions,
    form_problem,
)
from lightrft.config.parts.machine import ENGINE_TYPES, MERGED
from lightrft.config.parts.rollout import EpisodeOptions, SamplingOptions, StreamingOptions
from lightrft.config.parts.rows import (
    PreferenceOptions,
    RewardModelOptions,
    RowLengthOptions,
    SupervisedOptions,
)
from lightrft.config.parts.run_control import AlarmOptions, PolicyRunOptions, RunControlOptions
from lightrft.config.parts.scores import RewardOptions
from lightrft.config.parts.training import WeightOptions
from lightrft.config.registry import AGENT_KINDS, split_kind
from lightrft.config.sources import has_splits, probability_problem, split_sources
from lightrft.config.strategy_config import StrategyConfig
from lightrft.engines.factory import ENGINES, engine_facts

UNKNOWN_ORDER = (
    "off_policy_correction cannot tell which tokens the {engine} engine kept with top_p, top_k and "
    "min_p together: keep one of them, take engine_type hf, or train without a correction: "
    "off_policy_correction none"
)
NO_MIN_P = (
    "min_p: the {engine} engine cannot draw by a seed with it: use top_p or top_k, or another "
    "engine_type"
)
# Of rows that older weights sampled, where nothing is given; and what leaves it out.
STALE_CORRECTION, NO_CORRECTION = "tis", "none"
MAX_SAMPLES = 10**7
# The estimator without an advantage of the rewards.
NO_REWARDS = "zero"


# Of a whole run the engine is chosen; the published default of a strategy is vllm.
@part("engine")
class PolicyOptions(
    AlarmOptions,
    PolicyRunOptions,
    RunControlOptions,
    SampledTeacherOptions,
    AlgorithmOptions,
    RewardOptions,
    EpisodeOptions,
    StreamingOptions,
    SamplingOptions,
    WeightOptions,
    MediaOptions,
    PromptOptions,
    SourceOptions,
    StrategyConfig,
):
    """Options of reinforcement."""

    engine_type: str = option(
        "auto",
        "Rollout engine; auto takes vllm or sglang on a GPU, else hf.",
        choices=ENGINE_TYPES,
        common=True,
    )

    @property
    def correction(self) -> str | tuple[str, ...] | None:
        """Terms of the off-policy correction, by default what the age of rows asks for."""
        terms = self.off_policy_correction
        if terms is None and self.keeps_rows and not self.use_rollout_logprobs:
            return STALE_CORRECTION
        return None if terms in (NO_CORRECTION, (NO_CORRECTION,)) else terms


@dataclass(kw_only=True)
class RunOptions(
    RewardModelOptions, PreferenceOptions, SupervisedOptions, RowLengthOptions, PolicyOptions
):
    """Options of a whole run; rules between them stand below, and methods in `TrainConfig`."""


# A sentence on what is wrong with the values together; a falsy answer is nothing.
Rule = Callable[[RunOptions], object]


def without_adapters(engine: str) -> str:
    """The refusal of adapters that would travel alone to this engine."""
    able = " or ".join(sorted(each for each in ENGINES if engine_facts(each).holds_adapters))
    return (
        f"lora_sync adapter: the {engine} engine holds no adapters beside its weights: give "
        f"engine_type {able}, or lora_sync {MERGED}"
    )


def _teacher_names_problem(c: RunOptions) -> str | None:
    names = [each.partition("=")[0] for each in c.teachers]
    wrong = [each for each in c.teachers if not all(each.partition("="))]
    if wrong:
        return f"teachers: got {wrong[0]!r}, expected NAME=FOLDER or NAME=http://HOST:PORT/v1"
    if len(set(names)) < len(names):
        return f"teachers: got two of one name in {', '.join(names)}: give each its own"
    if c.teacher is not None and c.teachers:
        return "teacher and teachers exclude each other: give the one as NAME=TEACHER, too"
    if len(c.teacher_weights) not in (0, len(names)):
        return (
            f"teacher_weights: got {len(c.teacher_weights)} numbers for {len(names)} teachers: "
            "give one for each"
        )
    if not all(0 < each < math.inf for each in c.teacher_weights):
        return f"teacher_weights: got {list(c.teacher_weights)}, expected numbers > 0"
    return None


def _truncates(c: RunOptions) -> bool:
    return c.top_p < 1 or c.top_k != -1 or c.min_p > 0


def _num_rewards(c: RunOptions) -> int:
    urls = c.remote_rm_url or ()
    return len(c.reward_fn) + (1 if isinstance(urls, str) else len(urls)) + len(c.reward_pretrain)


def _named_losses(c: RunOptions) -> dict[str, str]:
    """The policy loss by each option that names one."""
    named = {
        "use_gspo": "gspo" if c.use_gspo else None,
        "use_cpg_loss": "cpgd" if c.use_cpg_loss else None,
        f"policy_loss {c.policy_loss!r}": c.policy_loss,
    }
    return {option: loss for option, loss in named.items() if loss is not None}


def _nonzero(name: str) -> Rule:
    return lambda c: (
        getattr(c, name) == 0 and f"{name}: got 0, expected -1 (off) or a number of at least 1"
    )


def _excludes(switch: str, cause: str, is_set: Callable[[RunOptions], bool]) -> Rule:
    return lambda c: (
        getattr(c, switch) and is_set(c) and f"{switch} excludes {cause}; leave one of them out"
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


def _regex_problem(name: str, text: str | None) -> str | None:
    try:
        re.compile(text or "")
    except re.error as error:
        return f"{name}: got {text!r}, expected a regular expression of Python: {error}"
    return None


_WITHOUT_AGENTS: tuple[tuple[str, Callable[[RunOptions], bool]], ...] = (
    ("environment: the agent has tools of its own", lambda c: bool(c.environment)),
    ("tools: the agent has its own", lambda c: bool(c.tools)),
    (
        "dynamic_sampling: which rows to keep is decided by row, and episodes have several",
        lambda c: c.dynamic_sampling,
    ),
    (
        "audit_every: the audit counts rows, and episodes have several",
        lambda c: c.audit_every > 0,
    ),
    (
        "teachers and teacher_prompt_column: they look up the prompt that a row begins with",
        lambda c: bool(c.teachers) or c.teacher_prompt_column is not None,
    ),
)

RULES: tuple[Rule, ...] = (
    _nonzero("save_steps"),
    _nonzero("eval_steps"),
    _nonzero("top_k"),
    lambda c: (
        c.input_template is not None
        and not PROMPT_SLOT.search(c.input_template)
        and (
            f"input_template: got {c.input_template!r}, "
            "expected a text with {} where the prompt goes"
        )
    ),
    lambda c: "" in c.stop and "stop: got an empty text, which would end every response",
    lambda c: (
        c.system_prompt is not None
        and not c.apply_chat_template
        and "system_prompt is part of the chat template: add apply_chat_template"
    ),
    lambda c: probability_problem(split_sources(c.prompt_data or ""), c.prompt_data_probs),
    lambda c: (
        c.use_kl_loss
        and c.init_kl_coef == 0
        and "use_kl_loss needs init_kl_coef > 0, say 0.01: got 0, which loads no reference model"
    ),
    lambda c: (
        len(set(_named_losses(c).values())) > 1
        and f"{' and '.join(_named_losses(c))} name different policy losses: give one of them"
    ),
    lambda c: (
        c.min_p > 0
        and not engine_facts(c.engine_type).draws_min_p
        and NO_MIN_P.format(engine=c.engine_type)
    ),
    lambda c: (
        c.correction
        and not engine_facts(c.engine_type).has_known_order(
            top_k=c.top_k, top_p=c.top_p, min_p=c.min_p
        )
        and UNKNOWN_ORDER.format(engine=c.engine_type)
    ),
    lambda c: (
        c.correction
        and c.use_fire
        and _truncates(c)
        and (
            "off_policy_correction cannot tell which first tokens top_p, top_k and min_p left "
            "at first_token_temperature: leave them out, or use_fire, or the correction"
        )
    ),
    lambda c: (
        not c.correction
        and (c.correction_low is not None or c.correction_high is not None)
        and "correction_low and correction_high need off_policy_correction"
    ),
    lambda c: (
        c.correction_low is not None
        and c.correction_high is not None
        and c.correction_low >= c.correction_high
        and (
            f"correction_low must be below correction_high: got {c.correction_low} and "
            f"{c.correction_high}"
        )
    ),
    lambda c: form_problem(c.teacher_form),
    lambda c: (
        c.advantage_estimator == "zero"
        and not c.teacher_places
        and "--teacher is missing: with advantage_estimator zero rewards teach nothing"
    ),
    _excludes(
        "dynamic_sampling",
        "advantage_estimator zero: it looks for groups by their rewards",
        lambda c: c.advantage_estimator == "zero",
    ),
    _teacher_names_problem,
    lambda c: (
        c.teacher_form == SAMPLED
        and c.has_served_teacher
        and c.temperature != 1
        and (
            "temperature: a server's log-probabilities of a prompt are those of temperature 1: got "
            f"{c.temperature:g}; leave it out, or take a teacher from a folder"
        )
    ),
    lambda c: (
        c.teacher_form != SAMPLED
        and c.has_served_teacher
        and c.teacher_top_k is None
        and (
            "teacher_top_k: a server does not give the whole distribution: say of how many tokens "
            "it is to, up to its --max-logprobs (vLLM: 20)"
        )
    ),
    lambda c: (
        c.teacher_top_k is not None
        and c.teacher_places
        and not c.has_served_teacher
        and "teacher_top_k is of served teachers: a folder's gives the whole distribution"
    ),
    lambda c: (
        c.teacher_form == SAMPLED
        and (c.teacher_top_k is not None or c.offpolicy_fraction != 1)
        and (
            "teacher_top_k and offpolicy_fraction are of the divergences reverse, forward and jsd: "
            "add teacher_form, or leave them out"
        )
    ),
    lambda c: (
        c.teacher_form != SAMPLED
        and c.teacher_prompt_column is not None
        and "teacher_prompt_column is of teacher_form sampled: leave it out"
    ),
    lambda c: (
        c.audit_every > 0
        and (bool(c.teachers) or c.teacher_prompt_column is not None)
        and (
            "an audit follows one teacher that reads the student's prompts: leave out one of "
            "audit_every and teachers or teacher_prompt_column"
        )
    ),
    lambda c: (
        c.teacher_places
        and c.teacher_form == SAMPLED
        and (_truncates(c) or c.use_fire)
        and (
            "teacher needs tokens drawn from the whole distribution of the student, or the mean of "
            "its term is no KL divergence: leave out top_p, top_k, min_p and use_fire"
        )
    ),
    lambda c: (
        c.lora_path is not None
        and c.lora_rank == 0
        and "lora_path needs lora_rank: give that of the adapters (r in adapter_config.json)"
    ),
    lambda c: (
        c.lora_sync != MERGED
        and not engine_facts(c.engine_type).holds_adapters
        and without_adapters(c.engine_type)
    ),
    lambda c: (
        c.lora_sync != MERGED
        and c.engine_tp_size > 1
        and (
            f"lora_sync adapter: an engine holds adapters on one rank alone: got "
            f"engine_tp_size {c.engine_tp_size}; leave it out, or give lora_sync {MERGED}"
        )
    ),
    lambda c: c.lora_sync != MERGED and c.lora_rank == 0 and "lora_sync adapter needs lora_rank",
    lambda c: (
        c.lora_sync != MERGED
        and c.rollout_ranks > 0
        and "lora_sync adapter excludes rollout_ranks, whose engines know no adapters: leave one "
        "of them out"
    ),
    lambda c: _regex_problem("train_on_regex", c.train_on_regex),
    lambda c: (
        c.adam_8bit
        and not c.fsdp
        and "adam_8bit: DeepSpeed lays Adam's moments out itself: add fsdp, or leave it out"
    ),
    lambda c: (
        c.adam_8bit
        and c.use_mp_opt
        and "adam_8bit trains float32 weights, use_mp_opt bfloat16: leave out one of them"
    ),
    lambda c: (
        c.adam_8bit
        and c.audit_every > 0
        and "an audit recomputes moments of 32 bits: leave out one of adam_8bit and audit_every"
    ),
    lambda c: (
        c.audit_every > 0
        and bool(c.freeze_prefix)
        and "an audit follows all weights: leave out one of audit_every and freeze_prefix"
    ),
    lambda c: (
        len(c.reward_weights) not in (0, _num_rewards(c))
        and (
            f"reward_weights: got {len(c.reward_weights)} numbers for {_num_rewards(c)} rewards; "
            "give one per --reward_fn, then per --remote_rm_url, then per --reward_pretrain"
        )
    ),
    lambda c: (
        bool(c.reward_weights)
        and c.reward_recipe is not None
        and "reward_recipe gives the weights: leave reward_weights out"
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
    lambda c: (
        c.rollout_batch_size * c.n_samples_per_prompt > MAX_SAMPLES
        and (
            "rollout_batch_size * n_samples_per_prompt: got "
            f"{c.rollout_batch_size} * {c.n_samples_per_prompt}, expected at most {MAX_SAMPLES} "
            "responses of a step: every process holds all of them"
        )
    ),
    lambda c: (
        c.max_pixels is not None
        and c.min_pixels is not None
        and c.min_pixels > c.max_pixels
        and f"min_pixels must be at most max_pixels: got {c.min_pixels} and {c.max_pixels}"
    ),
    lambda c: (
        c.max_len is not None
        and c.max_len < c.prompt_max_len + c.generate_max_len
        and (
            f"max_len must hold prompt_max_len + generate_max_len: got {c.max_len} and "
            f"{c.prompt_max_len} + {c.generate_max_len}; raise it or lower one of the others"
        )
    ),
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
            "stream_prompts must lie between rollout_batch_size and max_staleness + 1 times that, "
            "or old responses could not all be trained on in time: got "
            f"{c.stream_prompts} for {c.rollout_batch_size} and max_staleness {c.max_staleness}"
        )
    ),
    _excludes(
        "stream_chunk",
        "stop: a text may begin in one chunk and end in the next",
        lambda c: bool(c.stop),
    ),
    lambda c: (
        c.has_episodes
        and not c.apply_chat_template
        and "environment, tools and agent need turns: add apply_chat_template"
    ),
    _excludes(
        "stream_chunk",
        "agent and agent_command, whose programs cannot be brought back in the middle",
        lambda c: bool(c.agent or c.agent_command),
    ),
    _excludes(
        "stream_chunk",
        "environment openenv: the server's sessions do not outlive the run's process",
        lambda c: split_kind(c.environment or "")[0] == "openenv",
    ),
    _excludes(
        "stream_chunk",
        "late_join: rounds decide when an open episode goes on, and no time: use tool_lag",
        lambda c: c.late_join,
    ),
    _excludes(
        "stream_chunk",
        "judge_model policy: the engine is asked where it has no open responses",
        lambda c: c.judges_by_policy,
    ),
    lambda c: (
        c.judges_by_policy
        and c.engine_tp_size > 1
        and "judge_model policy: each rank asks an engine of its own: set engine_tp_size 1"
    ),
    lambda c: (
        c.rollout_ranks > 0
        and c.rollout_lag == 0
        and "rollout_ranks samples the steps to come while one is trained: add rollout_lag 1"
    ),
    lambda c: c.rollout_ranks > 0 and not c.fsdp and "rollout_ranks needs FSDP2: add fsdp",
    _excludes(
        "rollout_ranks",
        "reward_pretrain: the ranks that generate hold no reward model",
        lambda c: bool(c.reward_pretrain),
    ),
    _excludes(
        "rollout_ranks",
        "teacher, teachers and teacher_prompt_column",
        lambda c: bool(c.teacher or c.teachers or c.teacher_prompt_column),
    ),
    _excludes(
        "rollout_ranks",
        "audit_every: the samples are on other ranks",
        lambda c: c.audit_every > 0,
    ),
    _excludes("use_fire", "environment, tools and agent", lambda c: c.has_episodes),
    lambda c: c.agent_command is not None and _command_problem(c.agent_command),
    _excludes("agent", "agent_command", lambda c: bool(c.agent_command)),
    *(
        _excludes(switch, cause, is_set)
        for switch in ("agent", "agent_command")
        for cause, is_set in _WITHOUT_AGENTS
    ),
    _excludes(
        "use_rollout_logprobs",
        "top_p, top_k and min_p: the engine's logprobs then follow another distribution",
        _truncates,
    ),
    _excludes(
        "use_rollout_logprobs",
        "use_fire: its first tokens are drawn at another temperature",
        lambda c: c.use_fire,
    ),
    _excludes(
        "use_rollout_logprobs",
        "off_policy_correction: all its weights would be 1",
        lambda c: bool(c.correction),
    ),
    _excludes(
        "use_rollout_logprobs",
        "high_entropy_token_ratio: it needs a forward pass",
        lambda c: c.high_entropy_token_ratio > 0,
    ),
)


class _UnreadableError(Exception):
    pass


class _Readable:
    """A configuration whose wrong fields cannot be read, so that rules about them are left out."""

    def __init__(self, config: RunOptions, wrong: Collection[str]) -> None:
        self._config, self._wrong = config, wrong

    def __getattr__(self, name: str) -> object:
        if name in self._wrong:
            raise _UnreadableError
        member = getattr(type(self._config), name, None)
        # What a property reads can be wrong as well.
        return member.__get__(self) if isinstance(member, property) else getattr(self._config, name)


def broken_rules(config: RunOptions, *, wrong: Collection[str]) -> list[str]:
    """Values that are legal alone but not together, one line each.

    Args:
        config: The values.
        wrong: Fields that are wrong by themselves; rules about them are left out.
    """
    found = []
    for rule in RULES:
        try:
            problem = rule(_Readable(config, wrong))  # type: ignore[arg-type]
        except _UnreadableError:
            continue
        if problem:
            found.append(str(problem))
    return found


def unused_by_rules(c: RunOptions) -> list[str]:
    """Options that were changed and act only with something `acts_with` cannot say."""
    rules = (
        ("prompt_split", "a folder or data set in prompt_data", has_splits(c.prompt_data)),
        ("eval_split", "a folder or data set in eval_data", has_splits(c.eval_data)),
        (
            "sandbox",
            "--reward_fn unit_tests, --agent_command or --agent KIND:NAME",
            "unit_tests" in c.reward_fn
            or c.agent_command is not None
            or split_kind(c.agent or "", AGENT_KINDS)[0] is not None,
        ),
        ("test_timeout_seconds", "--reward_fn unit_tests", "unit_tests" in c.reward_fn),
        ("judge_url", "--reward_fn judge", "judge" in c.reward_fn),
        ("judge_model", "--reward_fn judge", "judge" in c.reward_fn),
        ("turn_credit", "gamma below 1", c.gamma < 1),
        (
            "tool_lag",
            "stream_chunk and environment or tools",
            c.stream_chunk is not None and bool(c.environment or c.tools),
        ),
        (
            "kl_estimator",
            "the KL in the reward: as a loss k1 has no expected gradient",
            not (c.use_kl_loss and c.kl_estimator == "k1"),
        ),
        ("parity_limit", "parity_check_steps >= 0", c.parity_check_steps >= 0),
    )
    return [
        f"{name} acts only with {needed}"
        for name, needed, is_used in rules
        if not is_used and c.__dict__[name] != c.__dataclass_fields__[name].default
    ]


def launch_problems(config: RunOptions, num_processes: int) -> list[str]:
    """The same for all processes of a launch, of which the last ones may only generate."""
    num_training = num_processes - config.rollout_ranks
    if num_training < 1:
        return [
            f"rollout_ranks {config.rollout_ranks} leaves no process to train: got "
            f"{num_processes} in all, expected {config.rollout_ranks + 1} or more"
        ]
    return batch_problems(config, num_training)


def batch_problems(config: RunOptions, world_size: int) -> list[str]:
    """Sizes that do not fit together on `world_size` processes, one line per rule.

    A step samples rollout_batch_size * n_samples_per_prompt responses and updates once per
    train_batch_size of them; each process goes through its share in micro-batches of
    micro_train_batch_size.
    """
    prompts, group_size = config.rollout_batch_size, config.n_samples_per_prompt
    samples, train = prompts * group_size, config.train_batch_size
    if world_size % config.sp_size:
        legal = _divisors(world_size)
        return [
            f"sp_size must divide the number of processes: got {config.sp_size} and {world_size}; "
            f"legal sp_size: {_either(legal)}"
        ]
    # Ranks that share their sequences share their samples.
    num_data_ranks = world_size // config.sp_size
    unit = config.micro_train_batch_size * num_data_ranks
    legal_train = [size for size in _divisors(samples) if size % unit == 0]
    found = []
    size = min(config.fsdp_shard_size, world_size)
    if config.fsdp and size > 0 and world_size % size:
        found.append(
            f"fsdp_shard_size must divide the number of processes: got {size} and {world_size}; "
            f"legal fsdp_shard_size: {_either(_divisors(world_size))}"
        )
    if config.adam_8bit and world_size > 1:
        found.append(
            f"adam_8bit is for one process, blocks of shards have other scales: got {world_size}; "
            "leave it out, each process holds a part of Adam's moments"
        )
    found += _engine_problems(config, config.rollout_ranks or world_size)
    if prompts % world_size:
        found.append(
            f"rollout_batch_size must be a multiple of the {world_size} processes: got {prompts}; "
            f"nearest legal: {_either(_multiples(prompts, world_size))}"
        )
    if train % unit:
        remedies = _micro_remedies(config, samples, num_data_ranks)
        found.append(
            "train_batch_size must be a multiple of micro_train_batch_size * processes: got "
            f"{train} and {config.micro_train_batch_size} * {num_data_ranks} = {unit}"
            f"{'; '.join(['', *remedies])}"
        )
    elif samples % train:
        legal_prompts = _multiples(
            prompts, math.lcm(train // math.gcd(train, group_size), world_size)
        )
        found.append(
            "rollout_batch_size * n_samples_per_prompt must be a multiple of train_batch_size: got "
            f"{prompts} * {group_size} = {samples} samples and train_batch_size {train}; nearest "
            f"legal train_batch_size: {_either(_closest(legal_train, train))}; nearest legal "
            f"rollout_batch_size: {_either(legal_prompts)}"
        )
    return found


def _micro_remedies(config: RunOptions, samples: int, ranks: int) -> list[str]:
    """Return sizes of updates and micro-batches that pass all rules, the nearest ones."""
    train, micro = config.train_batch_size, config.micro_train_batch_size
    trains = [size for size in _divisors(samples) if size % ranks == 0]
    legal = {
        "micro_train_batch_size": _closest(_divisors(train // ranks), micro)
        if train in trains
        else [],
        "train_batch_size": _closest([e for e in trains if e % (micro * ranks) == 0], train),
    }
    remedies = [f"nearest legal {name}: {_either(sizes)}" for name, sizes in legal.items() if sizes]
    if remedies:
        return remedies
    nearest = _closest(trains, train)
    pairs = [f"{size} with {_closest(_divisors(size // ranks), micro)[0]}" for size in nearest]
    return [f"nearest legal pair of them: {' or '.join(pairs)}"] if pairs else []


def _engine_problems(config: RunOptions, generating: int) -> list[str]:
    """Of the ranks that have engines: those that only generate, if there are any."""
    found, prompts = [], config.rollout_batch_size
    if generating % config.engine_tp_size:
        found.append(
            "engine_tp_size must divide the number of processes: got "
            f"{config.engine_tp_size} and {generating}"
        )
    if config.rollout_ranks and prompts % generating:
        found.append(
            f"rollout_batch_size must be a multiple of rollout_ranks: got {prompts} and "
            f"{generating}; nearest legal: {_either(_multiples(prompts, generating))}"
        )
    return found


def _divisors(number: int) -> list[int]:
    """All divisors, ascending; of a number that would take long, only those near its ends."""
    low = [size for size in range(1, min(math.isqrt(number), 10**6) + 1) if number % size == 0]
    return sorted({*low, *(number // size for size in low)})


def _multiples(value: int, unit: int) -> list[int]:
    """The multiples of `unit` on both sides of `value`, without 0."""
    below = value // unit * unit
    return [size for size in (below, below + unit) if size > 0]


def _closest(sizes: list[int], value: int) -> list[int]:
    """The neighbours of `value` in ascending `sizes`."""
    return [size for size in sizes if size <= value][-1:] + [s for s in sizes if s > value][:1]


def _either(sizes: list[int]) -> str:
    return " or ".join(map(str, sizes)) if sizes else "none with the other sizes"
