"""Record of one rollout step for an audit: writer and reader.

    OUTPUT_DIR/audit/step_000004/
        facts.json              sizes, learning rates, losses, norms, the order of the rows, and a
                                hash of itself and of every other file
        samples.safetensors     raw completions and rewards (`RawSamples`)
        values.safetensors      what the run computed, token by token (`RunValues`)
        before/actor/           config.json, weights and optimizer states in full, float32
        after/actor/            weights and optimizer states after the last update
        before/critic/ ...      the same for a critic

Per-token arrays are flat: rows in the order of `sample_ids`, each with prompt and response. Entry t
of a row belongs to token t.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_tensors, save_file as save_tensors
from torch import Tensor

from lightrft.config.files import (
    FileEntry,
    FileError,
    make_folder,
    read_object,
    regular_file,
    sealed,
    typed,
    unsealed,
)
from lightrft.config.options import short

FORMAT = 3
FOLDER = "audit"
FACTS, SAMPLES, VALUES, CONFIG = (
    "facts.json",
    "samples.safetensors",
    "values.safetensors",
    "config.toml",
)
# Prefixes of arrays that are not fields of the record's classes.
FACT, UPDATE = "fact/", "update/"
# Prefix of facts that are components of rewards.
COMPONENT = "component/"
# Size of one file of states, and so the writer's largest buffer.
STATE_FILE_BYTES = 2**30

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
Integers = NDArray[np.int64]


RATES = ("lr", "initial_lr")
MODELS, DTYPES = ("actor", "critic"), ("float32", "bfloat16")


class RecordError(FileError):
    """A missing or damaged record; the message names the file and what to do."""


@dataclass(frozen=True, slots=True)
class RawSamples:
    """Raw samples and rewards.

    Args:
        sample_ids, group_ids: [rows].
        prompt_lengths, response_lengths: Lengths in tokens: [rows].
        token_ids: [tokens] int32, flat.
        is_sampled: [tokens] bool, flat; False on prompts and on observations within a response.
        rollout_logprobs: Logprobs of the engine: [tokens] float32, flat; 0 on prompts.
        rewards: Rewards before any shaping: [rows] float64; 0 where the reward failed.
        accuracies: Accuracies that dynamic sampling compares: [rows] float64.
        is_failed: Rows whose reward failed: [rows] bool.
        is_untruncated: Rows whose `rollout_logprobs` cover the whole vocabulary: [rows] bool.
        greedy_rewards: Rewards of the greedy completion of each row's prompt, including the
            overlong penalty: [rows] float64; NaN without a completion or reward.
        facts: Further columns by name: [rows], or [tokens] flat.
    """

    sample_ids: Integers
    group_ids: Integers
    prompt_lengths: Integers
    response_lengths: Integers
    token_ids: NDArray[np.int32]
    is_sampled: Flags
    rollout_logprobs: NDArray[np.float32]
    rewards: Array
    accuracies: Array
    is_failed: Flags
    is_untruncated: Flags
    greedy_rewards: Array
    facts: Mapping[str, NDArray[np.generic]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunValues:
    """Values that the run computed before its first update; an empty array is "not computed".

    Args:
        rewards: Inputs of the estimator: [rows] float64.
        token_ids: [tokens] int32, flat.
        response_mask: [tokens] bool, flat.
        rollout_logprobs, old_logprobs, ref_logprobs, teacher_logprobs, values, entropy,
            log_kept_mass, advantages, returns: [tokens] float32, flat.
    """

    rewards: Array
    token_ids: NDArray[np.int32]
    response_mask: Flags
    rollout_logprobs: NDArray[np.float32]
    old_logprobs: NDArray[np.float32]
    ref_logprobs: NDArray[np.float32]
    teacher_logprobs: NDArray[np.float32]
    values: NDArray[np.float32]
    entropy: NDArray[np.float32]
    log_kept_mass: NDArray[np.float32]
    advantages: NDArray[np.float32]
    returns: NDArray[np.float32]


# Names of further columns of samples.
VERSIONS = "token_versions"  # -1 for tokens that no engine sampled
TURN_REWARDS = "turn_rewards"  # parts of the row's reward, paid at the end of a turn
PLACE = "place"  # of the row's item in the data
PLACES = "prompt_places"  # among the prompts of the run
WEIGHTS = "draw_weights"  # importance weights of the draws
CUT = "is_truncated"  # rows that the token budget ended
KEPT = "kept_ids"  # numbers of kept ids of a row's response tokens, then these ids
ROUTES = "routes"  # bytes of the experts of each position of a row but the last
# Columns with as many values of each row as another column says.
RAGGED = {KEPT: "num_kept", ROUTES: "num_route_bytes"}
RAW_TOKENS = ("token_ids", "is_sampled", "rollout_logprobs")
TOKEN_VALUES = tuple(item.name for item in fields(RunValues) if item.name != "rewards")


@dataclass(frozen=True, slots=True)
class UpdateFacts:
    """One optimizer step of one model.

    Args:
        model: "actor" or "critic".
        micro_batches: Sample ids of each micro batch of every rank, in order.
        normalizer: Z.
        losses: Value of each term by name, over all ranks: policy, kl, entropy, value.
        grad_norm: Gradient norm before clipping.
        learning_rate: Learning rate of the first group.
        is_skipped: True if gradients were not finite.
    """

    model: str
    micro_batches: list[list[int]]
    normalizer: float
    losses: dict[str, float]
    grad_norm: float
    learning_rate: float
    is_skipped: bool

    @property
    def ids(self) -> list[int]:
        """Sample ids of all micro batches."""
        return [i for micro in self.micro_batches for i in micro]


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """Optimizer and schedule of one model.

    Args:
        kind: Class of the optimizer.
        groups: Parameter names and hyper-parameters of each group.
        schedule_position: Earlier steps of the learning rate schedule.
        schedule_steps: Planned optimizer steps of the schedule; 0 without one.
        schedule_changed_at, schedule_gap: Optimizer step of the last change of the run's length (-1
            without), and the learning rate factor there minus the new plan's.
    """

    kind: str
    groups: list[dict[str, Any]]
    schedule_position: int = 0
    schedule_steps: int = 0
    schedule_changed_at: int = -1
    schedule_gap: float = 0.0


@dataclass(frozen=True, slots=True)
class Facts:
    """Scalars of a step.

    Args:
        step: Rollout step, counted from 1.
        num_planned: Rollout steps of the whole run; 0 if unknown.
        world_size, data_ranks: Number of processes, and of processes with separate samples.
        strategy, engine: Names of strategy and engine.
        compute_dtype: "float32" or "bfloat16".
        kl_coef: Weight of the KL term before the step; 0 without a reference model.
        reward_moments: Count, mean and squared deviations of all rewards before the step; empty
            without running normalisation.
        lora_scale: Scale of the adapters; 0 without.
        optimizers: Optimizers by model.
        updates: Updates in order.
        stage: Stage of the run.
        weights_version: Version of the engine's weights before the step; -1 without an engine.
        num_items: Items or prompts of the data; 0 is not known.
        format: Format version of the record.
    """

    step: int
    num_planned: int
    world_size: int
    data_ranks: int
    strategy: str
    engine: str
    compute_dtype: str
    kl_coef: float
    reward_moments: list[float]
    lora_scale: float
    optimizers: dict[str, OptimizerFacts]
    updates: list[UpdateFacts]
    stage: str = "policy"
    weights_version: int = -1
    num_items: int = 0
    format: int = FORMAT


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One recorded step.

    Args:
        folder: Folder of the record.
        facts, samples, values: Scalars, samples and values of the step.
        update_values: Per-token results of each update, flat in the order of its micro batches:
            "3/new" holds logprobs (a critic's values) of the fourth update, "3/weights" its token
            weights.
    """

    folder: Path
    facts: Facts
    samples: RawSamples
    values: RunValues
    update_values: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)

    def state(self, when: str, model: str) -> dict[str, Tensor]:
        """Read full weights as `weight/NAME` and optimizer states as `KEY/NAME`.

        Raises:
            RecordError: Files are missing or damaged.
        """
        folder = self.folder / when / model
        state: dict[str, Tensor] = {}
        for path in sorted(folder.glob("state_*.safetensors")):
            try:
                state |= load_tensors(path)
            except (SafetensorError, OSError) as error:
                raise _damaged(path, str(error)) from error
        weights = named(state, "weight", "master")
        for name, value in state.items():
            weight = weights.get(name.partition("/")[2])
            if weight is None or value.shape not in ((), weight.shape):
                raise _damaged(folder, f"{name} of shape {list(value.shape)} is that of no weight")
        groups = [] if model not in self.facts.optimizers else self.facts.optimizers[model].groups
        unknown = [n for group in groups for n in group["names"] if n not in weights]
        if unknown or not state:
            raise _damaged(folder, f"no states of {short(unknown[:3]) if unknown else 'the model'}")
        return state


def named(state: Mapping[str, Tensor], *kinds: str) -> dict[str, Tensor]:
    """Return the entries `KIND/NAME` of a state by name; later kinds take precedence."""
    return {
        name.removeprefix(f"{kind}/"): value
        for kind in kinds
        for name, value in state.items()
        if name.startswith(f"{kind}/")
    }


def step_folder(run: Path, step: int) -> Path:
    """Return the folder of a step's record."""
    return run / FOLDER / f"step_{step:06d}"


def recorded_steps(run: Path) -> list[int]:
    """Return the steps with a complete record, in ascending order."""
    folders = [path.parent.name for path in (run / FOLDER).glob(f"step_*/{FACTS}")]
    return sorted(int(name[5:]) for name in folders if re.fullmatch(r"step_[0-9]{6,18}", name))


def write_states(folder: Path, states: Iterable[tuple[str, Tensor]], *, keeps: bool) -> None:
    """Write tensors one after another, in files of bounded size.

    Args:
        folder: Folder to create.
        states: Names and full tensors; every rank must consume all of them.
        keeps: True on the process that writes.
    """
    held: dict[str, Tensor] = {}
    num_bytes = num_files = 0
    if keeps:
        make_folder(folder)
    for name, value in states:
        if not keeps:
            continue
        held[name] = value.detach().to("cpu", copy=True).contiguous()
        num_bytes += held[name].nbytes
        if num_bytes > STATE_FILE_BYTES:
            save_tensors(held, folder / f"state_{num_files:05d}.safetensors")
            held, num_bytes, num_files = {}, 0, num_files + 1
    if held:
        save_tensors(held, folder / f"state_{num_files:05d}.safetensors")


def write_record(
    folder: Path,
    facts: Facts,
    samples: RawSamples,
    values: RunValues,
    update_values: Mapping[str, NDArray[np.float32]],
) -> None:
    """Write everything but the states; facts.json comes last and completes the record."""
    of_facts = {f"{FACT}{name}": array for name, array in samples.facts.items()}
    save_file({**_columns(samples), **of_facts}, folder / SAMPLES)
    of_updates = {f"{UPDATE}{name}": array for name, array in update_values.items()}
    save_file({**_columns(values), **of_updates}, folder / VALUES)
    seal(folder, asdict(facts))


def seal(folder: Path, facts: Mapping[str, object]) -> None:
    """Write the facts, with the current hashes of all other files."""
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    files = [asdict(FileEntry.of(folder, name)) for name in sorted(names) if name != FACTS]
    (folder / FACTS).write_text(sealed({**facts, "files": files}) + "\n", encoding="utf-8")


def publish(partial: Path, folder: Path) -> None:
    """Move a complete record to its folder, replacing one of the same step."""
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def _columns(record: RawSamples | RunValues) -> dict[str, NDArray[np.generic]]:
    columns = {i.name: getattr(record, i.name) for i in fields(record) if i.name != "facts"}
    return {name: np.ascontiguousarray(values) for name, values in columns.items()}


def read_record(run: Path, step: int | None = None) -> StepRecord:
    """Read the record of a step; None reads the newest.

    Raises:
        RecordError: The record is missing or damaged.
    """
    steps = recorded_steps(run)
    if not steps:
        raise RecordError(
            f"{run} holds no record of a step: expected the folder of a run with --audit_every"
        )
    if step is not None and step not in steps:
        known = ", ".join(map(str, steps))
        raise RecordError(f"--step: {run} holds no record of step {step}: expected one of {known}")
    folder = step_folder(run, steps[-1] if step is None else step)
    try:
        facts = _read_facts(folder)
        columns, of_facts = _read_arrays(folder / SAMPLES, FACT)
        samples = RawSamples(**columns, facts=of_facts)
        columns, updates = _read_arrays(folder / VALUES, UPDATE)
        record = StepRecord(folder, facts, samples, RunValues(**columns), updates)
        problem = next(_problems(record), None)
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise _damaged(folder, str(error)) from error
    if problem is not None:
        raise _damaged(folder, problem)
    return record


def _damaged(path: Path, what: str) -> RecordError:
    return RecordError(f"{path} is damaged: {what}; audit another step with --step")


def _read_arrays(path: Path, prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the arrays of a file, and separately those with a prefix, without the prefix."""
    arrays = load_file(regular_file(path))
    marked = {name for name in arrays if name.startswith(prefix)}
    return (
        {name: array for name, array in arrays.items() if name not in marked},
        {name.removeprefix(prefix): arrays[name] for name in sorted(marked)},
    )


def _read_facts(folder: Path) -> Facts:
    """Read the facts of a record, and check that no file has changed."""
    values = unsealed(read_object(folder / FACTS), FACTS)
    if values.get("format") != FORMAT:
        raise ValueError(f"its format is {values.get('format')}, expected {FORMAT}")
    for entry in typed(list[FileEntry], values.pop("files", None), f"{FACTS}: files"):
        problem = entry.damage(folder)
        if problem is not None:
            raise ValueError(problem)
    return typed(Facts, values, FACTS)


def _problems(record: StepRecord) -> Iterator[str]:
    """Yield contents that have the right types but are impossible in a step."""
    facts = record.facts
    if step_folder(record.folder.parent.parent, facts.step) != record.folder:
        yield f"it holds step {facts.step}"
    if min(facts.world_size, facts.data_ranks) < 1 or facts.compute_dtype not in DTYPES:
        yield f"its facts are of {facts.world_size} ranks with {facts.compute_dtype} numbers"
    numbers = (facts.kl_coef, facts.lora_scale, *facts.reward_moments)
    if len(facts.reward_moments) not in (0, 3) or not all(map(math.isfinite, numbers)):
        yield "its KL weight, adapters' scale or moments of rewards are no numbers"
    if MODELS[0] not in facts.optimizers or set(facts.optimizers) - set(MODELS):
        yield f"it has optimizers of {list(facts.optimizers)}, expected {' and '.join(MODELS)}"
    yield from _group_problems(facts)
    yield from _array_problems(record)
    yield from _size_problems(record.samples)
    yield from _update_problems(record)


def _group_problems(facts: Facts) -> Iterator[str]:
    """Yield optimizer groups without betas or a rate."""
    for group in (group for each in facts.optimizers.values() for group in each.groups):
        typed(list[str], group.get("names"), "names of an optimizer's group")
        numbers = typed(dict[str, bool | float | list[float]], group.get("numbers"), "its numbers")
        for name, value in numbers.items():
            if isinstance(value, list):
                typed(list[float], value, f"its {short(name)}")
        betas = numbers.get("betas", [0.0, 0.0])
        if not isinstance(betas, list) or len(betas) != 2 or numbers.keys().isdisjoint(RATES):
            yield "its betas are not two numbers, or it has no rate"


def _array_problems(record: StepRecord) -> Iterator[str]:
    """Yield arrays of a wrong type or size."""
    rows, tokens = record.samples.sample_ids.size, record.samples.token_ids.size
    for owner, others in ((record.samples, RAW_TOKENS), (record.values, TOKEN_VALUES)):
        hints = get_type_hints(type(owner))
        for name, array in _columns(owner).items():
            sizes = [tokens if name in others else rows, *([0] if owner is record.values else [])]
            dtype = get_args(get_args(hints[name])[1])[0]
            if array.ndim != 1 or array.size not in sizes or array.dtype != dtype:
                yield f"{name} has shape {list(array.shape)} and type {array.dtype}"
    facts = record.samples.facts
    for name, array in facts.items():
        ragged = int(facts.get(RAGGED.get(name, ""), np.zeros(1)).sum())
        if array.shape not in ((rows,), (tokens,), *([(ragged,)] if name in RAGGED else [])):
            yield f"{FACT}{name} has shape {list(array.shape)}"


def _size_problems(samples: RawSamples) -> Iterator[str]:
    """Yield repeated rows, negative ids, and inconsistent lengths."""
    lengths = np.concatenate([samples.prompt_lengths, samples.response_lengths])
    rows, tokens = samples.sample_ids.size, samples.token_ids.size
    if lengths.min(initial=0) < 0 or sum(lengths.tolist()) != tokens or not rows:
        yield f"the lengths of its {rows} rows are not those of {tokens} tokens"
    if len(set(samples.sample_ids.tolist())) != rows or samples.token_ids.min(initial=0) < 0:
        yield "it holds a row twice, or a negative token id"


def _update_problems(record: StepRecord) -> Iterator[str]:
    """Yield updates of missing rows or models, and values that are not one per token."""
    lengths = record.samples.prompt_lengths + record.samples.response_lengths
    sizes = dict(zip(record.samples.sample_ids.tolist(), lengths.tolist(), strict=True))
    for number, update in enumerate(record.facts.updates):
        ids = update.ids
        if update.model not in record.facts.optimizers or not sizes.keys() >= set(ids):
            yield f"update {number + 1} of {update.model} is of rows or a model that it lacks"
            return
        for name in ("new", "weights"):
            values = record.update_values.get(f"{number}/{name}")
            if values is not None and values.shape != (sum(sizes[i] for i in ids),):
                yield f"{UPDATE}{number}/{name} does not have a number for each token of its rows"
