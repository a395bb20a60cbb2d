"""Places of models and of scores."""

from lightrft.config.options import (
    CRITIC,
    Arguments,
    checks,
    excludes,
    option,
    part,
)
from lightrft.config.parts.training import ADAM_MOVES
from lightrft.config.registry import AGENT_KINDS, split_kind


@part("models")
class ModelOptions:
    """The place of the model."""

    pretrain: str | None = option(
        None,
        "Checkpoint directory of the actor.",
        common=True,
        path="folder",
    )


@part("models")
class PolicyModelOptions(ModelOptions):
    """Models and rows of reinforcement beside the model that is trained."""

    critic_pretrain: str | bool | None = option(
        False,
        "Checkpoint directory of the critic; unset trains no critic.",
        path="folder",
        acts_with=CRITIC,
    )
    pretrain_data: str | None = option(
        None,
        "Rows as those of lightrft sft, whose loss is mixed in: texts, conversations, answers.",
        acts_with="ptx_coef",
        path="file",
    )
    critic_learning_rate: float = option(
        9e-6,
        f"Peak learning rate of the critic. {ADAM_MOVES}",
        at_least=0,
        at_most=1,
        acts_with=CRITIC,
        group="training",
    )
    mixed_mm_data: bool = option(
        False,
        "Ranks may differ in having images; the vision tower stays in FSDP2's root unit.",
        acts_with="fsdp",
        group="distributed",
    )


@part("models")
class ServiceOptions:
    """Services that score responses."""

    remote_rm_url: str | tuple[str, ...] | None = option(
        None,
        "Address of a reward service, in which ${NAME} is an environment variable; local "
        "reward models are then left alone.",
        may_change=True,
    )


# The judge that is the model which is trained.
POLICY = "policy"


@part("reward")
class ScorerOptions(ServiceOptions):
    """Scorers of responses."""

    reward_fn: tuple[str, ...] = option(
        (),
        "Rewards, summed: boxed_math, gsm8k, unit_tests, judge, verdict, reasoning_gym:NAME or "
        "FILE.py:FUNCTION.",
        common=True,
        path="file",
    )
    reward_args: Arguments = option(
        None,
        "Keyword-only arguments of own reward functions.",
    )
    reward_timeout_seconds: float = option(
        120.0,
        "Deadline of one call of a reward function.",
        above=0,
        at_most=1e7,
        may_change=True,
    )
    reward_memory_gb: float | None = option(
        16.0,
        "Memory in GB that the process of an own reward function and its children may hold; "
        "none sets no limit.",
        above=0,
        may_change=True,
    )
    reward_env: tuple[str, ...] = option(
        (),
        "Environment variables with secrets that own reward functions may read; others, such "
        "as WANDB_API_KEY, are kept from them.",
        may_change=True,
    )
    reward_workers: int = option(
        1,
        "Groups of responses that an own reward function (each in a process of its own), "
        "reasoning_gym or a service scores at once, beside the generation.",
        at_least=1,
        at_most=256,
        may_change=True,
    )
    sandbox: str = option(
        "bubblewrap",
        "Where unit_tests and agent_command run programs; unsafe has limits of resources only.",
        choices=("bubblewrap", "unsafe"),
        acts_with="--reward_fn unit_tests, --agent_command or --agent KIND:NAME",
        acts_when=lambda c: (
            "unit_tests" in c.reward_fn
            or c.agent_command is not None
            or split_kind(c.agent or "", AGENT_KINDS)[0] is not None
        ),
    )
    test_timeout_seconds: float = option(
        5.0,
        "Processor time of a process of a program of the reward unit_tests; all of them may take "
        "three times as much, and do nothing for as long.",
        above=0,
        at_most=1e7,
        acts_with="--reward_fn unit_tests",
        acts_when=lambda c: "unit_tests" in c.reward_fn,
    )
    judge_url: str | None = option(
        None,
        "OpenAI-compatible server of the reward judge, http://HOST:PORT/v1; the environment "
        "variable LIGHTRFT_JUDGE_KEY is its key.",
        may_change=True,
        acts_with="--reward_fn judge",
        acts_when=lambda c: "judge" in c.reward_fn,
    )
    judge_model: str | None = option(
        None,
        "Name of the judge's model on judge_url; without that, policy: the one that is trained, "
        "asked through the engine.",
        acts_with="--reward_fn judge",
        acts_when=lambda c: "judge" in c.reward_fn,
    )
    judge_template: str | None = option(
        None,
        "Text file with the question to the judge: {response} between marks with {mark}, "
        "{prompt} and {label}; with a rubric {question}; for rankings {responses} instead.",
        acts_with="judge_model",
        path="file",
    )
    judge_rubric: str | None = option(
        None,
        "TOML file with a table a part, each with question and weight: every response gets a grade "
        "by each of them, and their weighted mean.",
        acts_with="judge_model",
        path="file",
    )
    judge_args: Arguments = option(
        None,
        "Fields of the request to the judge, such as max_tokens=2048.",
        acts_with="judge_model",
    )
    remote_rm_token: str | None = option(
        None,
        "Token of the reward services, sent as Authorization: Bearer; unset takes "
        "LIGHTRFT_REWARD_TOKEN of the environment.",
        secret=True,
        acts_with="remote_rm_url",
        may_change=True,
    )

    rules = checks(
        lambda c: (
            c.judges_by_policy
            and c.engine_tp_size > 1
            and "judge_model policy: each rank asks an engine of its own: set engine_tp_size 1"
        ),
    )

    @property
    def judges_by_policy(self) -> bool:
        """True if the model that is trained also judges rewards."""
        return self.judge_model == POLICY and self.judge_url is None


@part("reward")
class RewardOptions(ScorerOptions):
    """Rewards of training and evaluation."""

    reward_weights: tuple[float, ...] = option(
        (),
        "Factor of each reward_fn, then remote_rm_url, then reward_pretrain; unset is 1 each.",
    )
    reward_pretrain: tuple[str, ...] = option(
        (),
        "Reward models of lightrft reward, or sequence classifiers with one label; their scores "
        "are added.",
    )
    reward_recipe: str | None = option(
        None,
        "TOML file: a table per value of reward_recipe_column with weights of rewards.",
    )
    reward_recipe_column: str = option(
        "task",
        "Column that names the recipe of a row.",
        acts_with="reward_recipe",
    )
    reward_failure: str = option(
        "raise",
        "A failed reward ends the run, or excludes (masks) its sample.",
        choices=("raise", "mask"),
    )
    judge_compare: str = option(
        "none",
        "What the judge compares: none grades each response alone; ranking ranks all responses to "
        "a prompt, in two orders; verdicts asks about every two in both orders, for a judge that "
        "was trained on both_orders:FILE, with the questions of that.",
        choices=("none", "ranking", "verdicts"),
        acts_with="judge_model",
    )

    rules = checks(
        lambda c: (
            len(c.reward_weights) not in (0, c.num_rewards)
            and (
                f"reward_weights: got {len(c.reward_weights)} numbers for {c.num_rewards} rewards; "
                "give one per --reward_fn, then per --remote_rm_url, then per --reward_pretrain"
            )
        ),
        *excludes("reward_weights", {"reward_recipe": "it gives the weights"}),
    )

    @property
    def num_rewards(self) -> int:
        """Number of the rewards that are summed."""
        urls = self.remote_rm_url or ()
        num_urls = 1 if isinstance(urls, str) else len(urls)
        return len(self.reward_fn) + num_urls + len(self.reward_pretrain)
