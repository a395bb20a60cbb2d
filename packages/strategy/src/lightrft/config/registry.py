"""Choices by name: tables of import strings, and user-defined choices. Standard library only.

Installed packages add to some tables by entry points of the table's group; names of a table stay
what they are. Installed packages are searched only for a name that the table lacks.

An entry's hyper-parameters are the keyword-only arguments of its function. A choice may also be
spelled `FILE.py:NAME` or `package.module:NAME`, or be added from Python:

    @register("policy_loss", "mine")
    def my_loss(logprobs, old_logprobs, advantages, response_mask, *, strength: float = 1.0): ...
"""

import hashlib
import importlib
import importlib.util
import inspect
import math
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from lightrft.config.files import regular_file
from lightrft.config.options import (
    ALGORITHMS,
    ConfigError,
    accepts,
    coerce,
    comma_hint,
    did_you_mean,
)

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Object = TypeVar("Object")


class Registry(Collection[str]):
    """Names of one kind of choice.

    Args:
        kind: What a choice is, for messages.
        entries: Import string (`module:name`) of each built-in choice.
        takes_own: Other import strings and `FILE.py:NAME` are choices, too.
        group: Entry points of installed packages in this group are choices, too.
    """

    def __init__(
        self,
        kind: str,
        entries: Mapping[str, str],
        *,
        takes_own: bool = True,
        group: str | None = None,
    ) -> None:
        self.kind = kind
        self.takes_own = takes_own
        self.group = group
        self._built_in = frozenset(entries)
        self.entries: dict[str, object] = dict(entries)

    def __contains__(self, name: object) -> bool:
        if name in self.entries:
            return True
        if not isinstance(name, str):
            return False
        return (self.takes_own and split_reference(name) is not None) or name in self.installed

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @cached_property
    def installed(self) -> Mapping[str, "EntryPoint"]:
        """Entry points of installed packages beside the table's names, searched for once.

        Raises:
            ConfigError: Two packages bring one name.
        """
        if self.group is None:
            return {}
        from importlib.metadata import entry_points

        points: dict[str, EntryPoint] = {}
        for point in entry_points(group=self.group):
            if point.name in points:
                raise ConfigError(
                    f"{self.kind} {point.name!r} is brought by two packages, "
                    f"{package_of(points[point.name])} and {package_of(point)}: uninstall one"
                )
            if point.name not in self.entries:
                points[point.name] = point
        return points

    def is_built_in(self, name: str) -> bool:
        """Return whether the choice is the table's, not user-defined."""
        return name in self._built_in

    def is_packaged(self, name: str) -> bool:
        """Return whether the choice is the table's or a package's, not of this process."""
        is_local = name in self.entries or (self.takes_own and split_reference(name) is not None)
        return self.is_built_in(name) or (not is_local and name in self.installed)

    def load(self, name: str) -> object:
        """Return the object that `name` names.

        Raises:
            ConfigError: There is no such choice, file, module or name in it; or it cannot be
                imported.
        """
        if name not in self:
            references = ", FILE.py:NAME or package.module:NAME" if self.takes_own else ""
            known = [*self, *self.installed]
            raise ConfigError(
                f"unknown {self.kind} {name!r}: expected one of {', '.join(known)}{references}"
                f"{did_you_mean(name, known).partition('; known')[0]}{comma_hint(name)}"
            )
        entry = self.entries.get(name, name)
        if name not in self.entries and name in self.installed:
            return _load_entry_point(self.installed[name], kind=self.kind)
        return load_reference(entry, kind=self.kind) if isinstance(entry, str) else entry

    @contextmanager
    def lent(self, entries: Mapping[str, object]) -> Iterator[None]:
        """Add choices while the body runs."""
        self.entries.update(entries)
        try:
            yield
        finally:
            for name in entries:
                del self.entries[name]


def package_of(point: "EntryPoint") -> str:
    """Return the name of the distribution that brings an entry point."""
    return point.dist.name if point.dist is not None else "an installed package"


# Packages by the names that modules and transformers have for them.
_PACKAGES = {"pil": "pillow", "pyav": "av"}


def missing_module(error: BaseException | None) -> str | None:
    """Return the module that an import lacks, from Python's or transformers' message, or None."""
    if isinstance(error, ModuleNotFoundError):
        return error.name
    # Transformers may name several in any order: always take the same one.
    lacking = re.findall(r"requires the (\S+) library", str(error))
    return min(lacking, default=None) if isinstance(error, ImportError) else None


def installation_of(module: str) -> str:
    """Return the command that installs the package of a missing module."""
    from importlib.metadata import PackageNotFoundError, requires

    package = module.partition(".")[0].replace("_", "-").lower()
    package = _PACKAGES.get(package, package)
    try:
        lines = requires("lightrft-trainer") or ()
    except PackageNotFoundError:  # run from its sources
        lines = ()
    for line in lines:
        requirement, _, extra = line.partition("; extra == ")
        if re.split(r"[^\w-]", requirement)[0] == package and extra:
            return f"pip install 'lightrft[{extra.strip(chr(34) + chr(39))}]'"
    return f"pip install {package}"


def _load_entry_point(point: "EntryPoint", *, kind: str) -> object:
    place = f"{kind} {point.name!r} of the package {package_of(point)}: {point.value}"
    with _explained(f"{place} cannot be loaded"):
        loaded: object = point.load()
    return loaded


@contextmanager
def _explained(problem: str) -> Iterator[None]:
    """Turn any error of a user's file or a package, as it is loaded, into one line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{problem}: {type(error).__name__}: {reason}") from error


def split_reference(text: str) -> tuple[str, str] | None:
    """Return (file or module, name) of an import string; None if the text is none."""
    place, _, name = text.rpartition(":")
    is_module = all(part.isidentifier() for part in place.split("."))
    return (place, name) if name.isidentifier() and (place.endswith(".py") or is_module) else None


def split_kind(text: str, kinds: Registry | None = None) -> tuple[str | None, str]:
    """Return (kind, the rest) of `KIND:REST`; the kind is None if it is none of these.

    Args:
        text: Text that may begin with a kind.
        kinds: Known kinds; None takes those of environments.
    """
    kind, _, rest = text.partition(":")
    return (kind, rest) if kind in (ENVIRONMENT_KINDS if kinds is None else kinds) else (None, text)


def load_reference(text: str, *, kind: str) -> object:
    """Return the object that `FILE.py:NAME` or `package.module:NAME` names.

    Raises:
        ConfigError: It cannot be imported; the message says why.
    """
    place, name = split_reference(text) or ("", "")
    with _explained(f"{kind} {text}: {place} cannot be imported"):
        module = (
            _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        )
    if not hasattr(module, name):
        raise ConfigError(f"{kind} {text}: {place} has no {name!r}")
    loaded: object = getattr(module, name)
    return loaded


def _load_file(path: Path) -> ModuleType:
    file = path.resolve()
    if not file.is_file():
        raise FileNotFoundError(f"no file {path}{comma_hint(str(path))}")
    # One module for each content, so that a file's definitions exist once in a process.
    digest = hashlib.sha256(bytes(file) + regular_file(file).read_bytes()).hexdigest()[:16]
    name = f"lightrft_plugin_{digest}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise ImportError(f"no Python module: {file}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        # Imports from beside a file work, also later ones. The folder is last in the path, so that
        # none of them replaces a package that this program imports.
        sys.path.append(str(file.parent))
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            sys.path.remove(str(file.parent))
            raise
    return sys.modules[name]


def keyword_options(function: Callable[..., object]) -> dict[str, inspect.Parameter]:
    """Return the hyper-parameters of a function: its keyword-only arguments."""
    parameters = inspect.signature(function).parameters.values()
    return {item.name: item for item in parameters if item.kind is item.KEYWORD_ONLY}


def bind(
    function: Callable[..., Object], given: Mapping[str, object], *, owner: str
) -> Callable[..., Object]:
    """Return the function with its hyper-parameters set.

    Args:
        function: Function whose keyword-only arguments are its hyper-parameters.
        given: Values by name; the others keep their defaults.
        owner: Name of the function, for messages.

    Raises:
        ConfigError: It has no such hyper-parameter, a value has the wrong type, or one that has no
            default is missing.
    """
    known = keyword_options(function)
    values: dict[str, object] = {}
    problems = []
    for name, value in given.items():
        if name not in known:
            hint = did_you_mean(name, known) if known else "; it has none"
            problems.append(f"{owner} has no option {name!r}{hint}")
            continue
        annotation = _annotation(function, known[name])
        values[name] = coerce(value, annotation)
        is_finite = not isinstance(value, float) or math.isfinite(value)
        if not is_finite or not accepts(values[name], annotation):
            problems.append(f"{owner}: {name}: got {value!r}, expected {known[name].annotation}")
    missing = [
        name for name, item in known.items() if item.default is item.empty and name not in values
    ]
    problems += [f"{owner} needs the option {name!r}, which has no default" for name in missing]
    if problems:
        raise ConfigError("\n".join(problems))
    return partial(function, **values) if values else function


def _annotation(function: Callable[..., object], parameter: inspect.Parameter) -> object:
    """Return the resolved type of a parameter; `object` if it has none or cannot be resolved."""
    annotation = parameter.annotation
    if annotation is parameter.empty:
        return object
    if isinstance(annotation, str):
        scope = getattr(inspect.unwrap(function), "__globals__", {})
        try:
            return eval(annotation, dict(scope))
        except Exception:  # noqa: BLE001 - a name of a type checker only, or no expression at all
            return object
    return annotation


_POLICY = "lightrft.algorithms.policy"
_ROWS, _TOKENS = (f"lightrft.algorithms.advantages.{level}_level" for level in ("row", "token"))

POLICY_LOSSES = Registry(
    "policy loss",
    {
        "ppo": f"{_POLICY}.clipped:clipped_policy_loss",
        "clipped": f"{_POLICY}.clipped:clipped_policy_loss",
        "dapo": f"{_POLICY}.clipped:dapo_policy_loss",
        "dr_grpo": f"{_POLICY}.clipped:dr_grpo_policy_loss",
        "gspo": f"{_POLICY}.sequence_level:gspo_policy_loss",
        "gspo-token": f"{_POLICY}.sequence_level:gspo_token_policy_loss",
        "gmpo": f"{_POLICY}.sequence_level:gmpo_policy_loss",
        "cpgd": f"{_POLICY}.cpgd:cpgd_policy_loss",
        "cispo": f"{_POLICY}.token_level:cispo_policy_loss",
        "sapo": f"{_POLICY}.token_level:sapo_policy_loss",
        "clip_cov": f"{_POLICY}.covariance:clip_cov_policy_loss",
        "kl_cov": f"{_POLICY}.covariance:kl_cov_policy_loss",
        "reinforce": f"{_POLICY}.token_level:reinforce_policy_loss",
        "dro": f"{_POLICY}.token_level:dro_policy_loss",
        "ppo-sequence": f"{_POLICY}.sequence_level:sequence_ppo_policy_loss",
        "sapo-sequence": f"{_POLICY}.sequence_level:sequence_sapo_policy_loss",
    },
)
_PREFERENCES = "lightrft.algorithms.preference_losses"
# With the names of TRL.
PREFERENCE_LOSSES = Registry(
    "preference loss",
    {
        "dpo": f"{_PREFERENCES}:dpo_loss",
        "sigmoid": f"{_PREFERENCES}:dpo_loss",
        "cdpo": f"{_PREFERENCES}:cdpo_loss",
        "robust": f"{_PREFERENCES}:robust_loss",
        "hinge": f"{_PREFERENCES}:hinge_loss",
        "ipo": f"{_PREFERENCES}:ipo_loss",
        "dpo_norm": f"{_PREFERENCES}:dpo_norm_loss",
        "sigmoid_norm": f"{_PREFERENCES}:dpo_norm_loss",
        "exo": f"{_PREFERENCES}:exo_loss",
        "exo_pair": f"{_PREFERENCES}:exo_loss",
        "nca": f"{_PREFERENCES}:nca_loss",
        "nca_pair": f"{_PREFERENCES}:nca_loss",
        "sppo": f"{_PREFERENCES}:sppo_loss",
        "sppo_hard": f"{_PREFERENCES}:sppo_loss",
        "apo_zero": f"{_PREFERENCES}:apo_zero_loss",
        "apo_zero_unpaired": f"{_PREFERENCES}:apo_zero_unpaired_loss",
        "apo_down": f"{_PREFERENCES}:apo_down_loss",
        "bco": f"{_PREFERENCES}:bco_loss",
        "bco_pair": f"{_PREFERENCES}:bco_loss",
        "discopop": f"{_PREFERENCES}:discopop_loss",
        "aot": f"{_PREFERENCES}:aot_loss",
        "aot_unpaired": f"{_PREFERENCES}:aot_unpaired_loss",
        "kto": f"{_PREFERENCES}:kto_loss",
        "simpo": f"{_PREFERENCES}:simpo_loss",
        "cpo": f"{_PREFERENCES}:cpo_loss",
        "orpo": f"{_PREFERENCES}:orpo_loss",
        "sft": f"{_PREFERENCES}:sft_loss",
    },
)
ADVANTAGE_ESTIMATORS = Registry(
    "advantage estimator",
    {
        "gae": f"{_TOKENS}:gae_advantages",
        "reinforce": f"{_TOKENS}:reinforce_advantages",
        "reinforce++": f"{_TOKENS}:reinforce_plus_plus_advantages",
        "reinforce_baseline": f"{_ROWS}:reinforce_baseline_advantages",
        "rloo": f"{_ROWS}:rloo_advantages",
        "group_norm": f"{_ROWS}:group_norm_advantages",
        "grpo": f"{_ROWS}:group_norm_advantages",
        "group_mean_batch_std": f"{_ROWS}:group_mean_batch_std_advantages",
        "dr_grpo": f"{_ROWS}:group_centred_advantages",
        "cpgd": f"{_ROWS}:cpgd_advantages",
        "opo": f"{_ROWS}:opo_advantages",
        "batch_mean_group_std": f"{_ROWS}:batch_mean_group_std_advantages",
        "maxrl": f"{_ROWS}:maxrl_advantages",
        "gpg": f"{_ROWS}:gpg_advantages",
        "gdpo": f"{_ROWS}:gdpo_advantages",
        "pass_at_k": f"{_ROWS}:pass_at_k_advantages",
        "raft": f"{_ROWS}:raft_advantages",
        "remax": f"{_ROWS}:remax_advantages",
        "zero": f"{_ROWS}:zero_advantages",
    },
)
_REWARDS = "lightrft.tools.rewards"
# A reward of a package is a function of (config, name) that makes a `RewardFunction`.
REWARDS = Registry(
    "reward function",
    {
        "boxed_math": f"{_REWARDS}.math_rules:boxed_math",
        "gsm8k": f"{_REWARDS}.math_rules:gsm8k",
        "unit_tests": f"{_REWARDS}.unit_tests:UnitTestsReward",
        "judge": f"{_REWARDS}.judge:JudgeReward",
        "verdict": f"{_REWARDS}.verdicts:VerdictReward",
    },
    group="lightrft.rewards",
)
# Rewards and data that are spelled `KIND:WHAT`, and reward services by the scheme of their address.
REWARD_KINDS = Registry(
    "kind of reward", {"reasoning_gym": f"{_REWARDS}.gym:GymReward"}, takes_own=False
)
REWARD_SERVICES = Registry(
    "kind of reward service", {"http": f"{_REWARDS}.remote:reward_service"}, takes_own=False
)
_AGENTS = "lightrft.tools.agents"
DATA_SOURCES = Registry(
    "kind of data source",
    {
        "verifiers": f"{_AGENTS}.verifiers_tasks:task_rows",
        "reasoning_gym": f"{_REWARDS}.gym_data:gym_rows",
        "both_orders": f"{_REWARDS}.verdicts:both_orders",
    },
    takes_own=False,
)
_TRACKERS = "lightrft.reporting.trackers"
LOGGERS = Registry(
    "logger",
    {
        "trackio": f"{_TRACKERS}.trackio:open_trackio",
        "mlflow": f"{_TRACKERS}.mlflow:open_mlflow",
        "swanlab": f"{_TRACKERS}.swanlab:open_swanlab",
    },
)
# Environments of other makes: `KIND:WHAT`, where the adapter makes a class of WHAT.
ENVIRONMENT_KINDS = Registry(
    "kind of environment",
    {
        "openenv": "lightrft.tools.environments.openenv:connect",
        "skyrl_gym": "lightrft.tools.environments.skyrl_gym:converse",
    },
    takes_own=False,
)
# Agents of other makes: `KIND:WHAT`, functions of (what, sandbox) that make an agent's function.
AGENT_KINDS = Registry(
    "kind of agent", {"verifiers": f"{_AGENTS}.verifiers_agent:host"}, takes_own=False
)
# Ways to draw responses of one turn: subclasses of
# `lightrft.rollout.single_turn.SingleTurnSource`.
TURN_SOURCES = Registry(
    "way to draw responses",
    {
        "plain": "lightrft.rollout.single_turn:SingleTurnSource",
        "fire": "lightrft.rollout.fire:FireSource",
    },
    takes_own=False,
)
# Servers of teachers by the scheme of their address: functions of (address, config) that make a
# `lightrft.experience.teachers.LogprobServer`.
TEACHER_SERVERS = Registry(
    "kind of teacher's server",
    {"http": "lightrft.tools.teachers.openai_server:OpenAIServer"},
    takes_own=False,
)
# What a run trains: functions of the options that give a `lightrft.stages.stage.StageInputs`.
STAGES = Registry(
    "stage",
    {
        "policy": "lightrft.stages.policy.inputs:read_inputs",
        "sft": "lightrft.stages.supervised.supervised_inputs:read_inputs",
        "reward": "lightrft.stages.reward.reward_inputs:read_inputs",
        "prefer": "lightrft.stages.preference.preference_inputs:read_inputs",
        "divergence": "lightrft.stages.distillation.divergence_inputs:read_inputs",
    },
)
# Functions of (config, strategy) that run before models are built and return the options to run
# with; collective. Keyword-only arguments `stage` and `inputs` are its name and its `StageInputs`,
# and `resumes` says whether the run continues from a checkpoint.
START_HOOKS = Registry(
    "start hook",
    {
        "memory_budget": "lightrft.tools.plan.start_check:check_budget",
        "compile_verdict": "lightrft.tools.invariance.verdict:say_verdict",
    },
    takes_own=False,
    group="lightrft.start_hooks",
)
# Receivers of the numbers of an update, made of a `lightrft.stages.observer.ObservedStep`.
STEP_OBSERVERS = Registry(
    "observer of a step",
    {"audit": "lightrft.tools.audit_recorder:Recorder"},
    takes_own=False,
)
# Choices that are the branches of one function.
KL_ESTIMATORS = (
    "k1",
    "abs",
    "k2",
    "k3",
    "k3_unclamped",
    "k1+",
    "k3+",
    "k1_is",
    "k2_is",
    "k3_is",
)
AGGREGATIONS = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
# Losses of supervised training.
SFT_LOSSES = ("token-mean", "seq-mean-token-mean", "dft")
_REWARD_LOSSES = "lightrft.algorithms.reward_losses"
REWARD_LOSSES = Registry(
    "reward loss",
    {
        "bradley_terry": f"{_REWARD_LOSSES}:bradley_terry",
        "sigmoid": f"{_REWARD_LOSSES}:bradley_terry",
        "logexp": f"{_REWARD_LOSSES}:bradley_terry",
        "hps": f"{_REWARD_LOSSES}:scaled_bradley_terry",
        "rao_kupper": f"{_REWARD_LOSSES}:rao_kupper",
        "mse": f"{_REWARD_LOSSES}:squared_error",
        "bce": f"{_REWARD_LOSSES}:binary_cross_entropy",
    },
)
# Losses of labels instead of pairs.
LABEL_LOSSES = ("mse", "bce")
SCORE_POOLINGS = Registry(
    "pooling of a reward model",
    {
        "last": "lightrft.models.score_heads:last_token",
        "attention": "lightrft.models.score_heads:AttentionHead",
    },
    takes_own=False,
)
# Orders of rows: classes like `lightrft.datasets.prompt_sampler.PromptSampler`.
_SAMPLERS = "lightrft.datasets.samplers"
PROMPT_SAMPLERS = Registry(
    "prompt sampler",
    {
        "shuffle": "lightrft.datasets.prompt_sampler:Shuffle",
        "in_order": "lightrft.datasets.prompt_sampler:InOrder",
        "weighted": f"{_SAMPLERS}.weighted:Weighted",
        "pools": f"{_SAMPLERS}.pools:Pools",
    },
)
# Tokens of a supervised row that count.
TRAIN_ON = ("all", "completion", "assistant", "last_assistant")

# Registries that accept user-defined choices, by the option that chooses.
REGISTRIES = {
    "policy_loss": POLICY_LOSSES,
    "preference_loss": PREFERENCE_LOSSES,
    "advantage_estimator": ADVANTAGE_ESTIMATORS,
    "reward_fn": REWARDS,
    "reward_loss": REWARD_LOSSES,
    "loggers": LOGGERS,
    "prompt_sampler": PROMPT_SAMPLERS,
}
for _command, _registries in (
    ("train", (POLICY_LOSSES, ADVANTAGE_ESTIMATORS)),
    ("prefer", (PREFERENCE_LOSSES,)),
    ("reward", (REWARD_LOSSES,)),
):
    for _registry in _registries:
        for _name in _registry:
            _what = f"a choice of {_registry.kind} of lightrft {_command}"
            ALGORITHMS.setdefault(_name.replace("-", "_"), _what)


def register(option_name: str, name: str) -> Callable[[Object], Object]:
    """Return a decorator that adds a choice `name` to the option `option_name` in this process.

    Raises:
        ConfigError: No such registry, or the name is taken.
    """
    if option_name not in REGISTRIES:
        raise ConfigError(f"no registry {option_name!r}{did_you_mean(option_name, REGISTRIES)}")
    registry = REGISTRIES[option_name]

    def add(entry: Object) -> Object:
        if name in registry.entries:
            raise ConfigError(f"there is a {registry.kind} {name!r} already: choose another name")
        registry.entries[name] = entry
        return entry

    return add
