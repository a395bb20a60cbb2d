"""The record that a run writes of one rollout step for an audit, and its reader.

    OUTPUT_DIR/audit/step_000004/
        facts.json              sizes, learning rates, losses, norms, the order of the rows, and a
                                hash of itself and of every other file
        samples.safetensors     raw completions and rewards (`RawSamples`)
        values.safetensors      what the run computed, token by token (`RunValues`)
        before/actor/           config.json, weights and optimizer states in full, float32
        after/actor/            weights and optimizer states after the last update
        before/critic/ ...      likewise, with a critic

Per-token arrays are flat: the rows in the order of `sample_ids`, each with its prompt and its
response; entry t of a row belongs to token t.
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
# In names of arrays, before those that the record's classes do not list.
FACT, UPDATE = "fact/", "update/"
# Begins the names of facts that are components of rewards.
COMPONENT = "component/"
# Of one file of states; the writer holds no more of them in memory.
STATE_FILE_BYTES = 2**30

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
Integers = NDArray[np.int64]


RATES = ("lr", "initial_lr")
MODELS, DTYPES = ("actor", "critic"), ("float32", "bfloat16")


class RecordError(FileError):
    """A record is missing or damaged; the message names the file and what to do."""


@dataclass(frozen=True, slots=True)
class RawSamples:
    """Samples and rewards before anything was computed from them.

    Args:
        sample_ids, group_ids: [rows].
        prompt_lengths, response_lengths: [rows], in tokens.
        token_ids: [tokens] int32, flat.
        is_sampled: [tokens] bool, flat; False on prompts and on observations within a response.
        rollout_logprobs: [tokens] float32 of the engine, flat; 0 on prompts.
        rewards: [rows] float64, before any shaping; 0 where the reward failed.
        accuracies: [rows] float64, what dynamic sampling compares.
        is_failed: [rows] bool, the reward failed.
        is_untruncated: [rows] bool, no token was excluded from what `rollout_logprobs` measure.
        greedy_rewards: [rows] float64 of the greedy completion of the row's prompt, its overlong
            penalty included; NaN without one, or where it has no reward.
        facts: Further columns, by name: [rows], or [tokens] flat.
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
        rewards: [rows] float64, as the estimator saw them.
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


VERSIONS = "token_versions"  # among the further columns of samples: -1 where nobody sampled
TURN_REWARDS = "turn_rewards"  # likewise: paid where a turn ends, a part of the row's reward
PLACE = "place"  # likewise: in the data, of the row's item
CUT = "is_truncated"  # likewise: rows that the token budget ended
RAW_TOKENS = ("token_ids", "is_sampled", "rollout_logprobs")
TOKEN_VALUES = tuple(item.name for item in fields(RunValues) if item.name != "rewards")


@dataclass(frozen=True, slots=True)
class UpdateFacts:
    """One optimizer step of one model.

    Args:
        model: "actor" or "critic".
        micro_batches: Sample ids of each micro batch of every rank, in their order.
        normalizer: Z.
        losses: Value of each term by name, over all ranks: policy, kl, entropy, value.
        grad_norm: Before clipping.
        learning_rate: Of the first group.
        is_skipped: Gradients were not finite.
    """

    model: str
    micro_batches: list[list[int]]
    normalizer: float
    losses: dict[str, float]
    grad_norm: float
    learning_rate: float
    is_skipped: bool


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """Optimizer and schedule of one model.

    Args:
        kind: Class of the optimizer.
        groups: Names of the parameters, and numbers, of each group.
        schedule_position: Steps that the learning rate schedule had taken before.
        schedule_steps: Optimizer steps that the schedule was made for; 0 without one.
        schedule_changed_at, schedule_gap: At which step the run was given another length, and how
            much the factor of the learning rate was above the new plan's there; -1 without.
    """

    kind: str
    groups: list[dict[str, Any]]
    schedule_position: int
    schedule_steps: int
    schedule_changed_at: int = -1
    schedule_gap: float = 0.0


@dataclass(frozen=True, slots=True)
class Facts:
    """Scalars of a step.

    Args:
        step: Rollout step, counted from 1.
        num_planned: Rollout steps of the whole run; 0 is unknown.
        world_size, data_ranks: Processes, and those of them that have samples of their own.
        strategy, engine: Names.
        compute_dtype: "float32" or "bfloat16".
        kl_coef: Weight of the KL term before the step; 0 without a reference model.
        reward_moments: Count, mean and squared deviations of all rewards before the step; empty
            without running normalisation.
        lora_scale: Of the adapters; 0 without.
        optimizers: By model.
        updates: In their order.
        stage: Of the run.
        weights_version: Of the engine's weights before the step; -1 without an engine.
        num_items: Items of the data of a stage on given rows; 0 of others.
        format: Of the record.
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
        folder: Where it is.
        facts, samples, values: See there.
        update_values: Per-token results of each update, flat in the order of its micro batches:
            "3/new" are the logprobs (a critic's values) of the fourth update, "3/weights" the
            weights of the tokens.
    """

    folder: Path
    facts: Facts
    samples: RawSamples
    values: RunValues
    update_values: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)

    def state(self, when: str, model: str) -> dict[str, Tensor]:
        """Weights as `weight/NAME` and optimizer states as `KEY/NAME`, in full.

        Raises:
            RecordError: They are missing or damaged.
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
    """The entries `KIND/NAME` of a state by name; a later kind comes before an earlier one."""
    return {
        name.removeprefix(f"{kind}/"): value
        for kind in kinds
        for name, value in state.items()
        if name.startswith(f"{kind}/")
    }


def step_folder(run: Path, step: int) -> Path:
    """Where the record of a step is."""
    return run / FOLDER / f"step_{step:06d}"


def recorded_steps(run: Path) -> list[int]:
    """Steps with a complete record, ascending."""
    folders = [path.parent.name for path in (run / FOLDER).glob(f"step_*/{FACTS}")]
    return sorted(int(name[5:]) for name in folders if re.fullmatch(r"step_[0-9]{6,18}", name))


def write_states(folder: Path, states: Iterable[tuple[str, Tensor]], *, keeps: bool) -> None:
    """Write tensors one after another, in files of bounded size.

    Args:
        folder: Created.
        states: Name and full tensor; every rank must take them all.
        keeps: Whether this process writes.
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
    """Write everything but the states; facts.json comes last and makes the record complete."""
    of_facts = {f"{FACT}{name}": array for name, array in samples.facts.items()}
    save_file({**_columns(samples), **of_facts}, folder / SAMPLES)
    of_updates = {f"{UPDATE}{name}": array for name, array in update_values.items()}
    save_file({**_columns(values), **of_updates}, folder / VALUES)
    seal(folder, asdict(facts))


def seal(folder: Path, facts: Mapping[str, object]) -> None:
    """Writes the facts, with the hashes of all other files as they are now."""
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    files = [asdict(FileEntry.of(folder, name)) for name in sorted(names) if name != FACTS]
    (folder / FACTS).write_text(sealed({**facts, "files": files}) + "\n", encoding="utf-8")


def publish(partial: Path, folder: Path) -> None:
    """Put a complete record in its place, instead of one of the same step."""
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def _columns(record: RawSamples | RunValues) -> dict[str, NDArray[np.generic]]:
    columns = {i.name: getattr(record, i.name) for i in fields(record) if i.name != "facts"}
    return {name: np.ascontiguousarray(values) for name, values in columns.items()}


def read_record(run: Path, step: int | None = None) -> StepRecord:
    """The record of a step; None takes the newest.

    Raises:
        RecordError: There is none, or it is damaged.
    """
    steps = recorded_steps(run)
    if not steps:
        raise RecordError(
            f"{run} holds no record of a step: train with --audit_every 1 (every step) or more"
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
    """The arrays of a file, and those whose names begin with a prefix, by the rest of it."""
    arrays = load_file(regular_file(path))
    marked = {name for name in arrays if name.startswith(prefix)}
    return (
        {name: array for name, array in arrays.items() if name not in marked},
        {name.removeprefix(prefix): arrays[name] for name in sorted(marked)},
    )


def _read_facts(folder: Path) -> Facts:
    """The facts of a record of which every file is as it was written."""
    values = unsealed(read_object(folder / FACTS), FACTS)
    if values.get("format") != FORMAT:
        raise ValueError(f"its format is {values.get('format')}, expected {FORMAT}")
    for entry in typed(list[FileEntry], values.pop("files", None), f"{FACTS}: files"):
        problem = entry.damage(folder)
        if problem is not None:
            raise ValueError(problem)
    return typed(Facts, values, FACTS)


def _problems(record: StepRecord) -> Iterator[str]:
    """Contents that fit no step of any run, though each has its type."""
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
    """Groups of an optimizer without the numbers of a step."""
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
    """Arrays of a wrong type or size."""
    rows, tokens = record.samples.sample_ids.size, record.samples.token_ids.size
    for owner, others in ((record.samples, RAW_TOKENS), (record.values, TOKEN_VALUES)):
        hints = get_type_hints(type(owner))
        for name, array in _columns(owner).items():
            sizes = [tokens if name in others else rows, *([0] if owner is record.values else [])]
            dtype = get_args(get_args(hints[name])[1])[0]
            if array.ndim != 1 or array.size not in sizes or array.dtype != dtype:
                yield f"{name} has shape {list(array.shape)} and type {array.dtype}"
    for name, array in record.samples.facts.items():
        if array.shape not in ((rows,), (tokens,)):
            yield f"{FACT}{name} has shape {list(array.shape)}"


def _size_problems(samples: RawSamples) -> Iterator[str]:
    """Repeated rows, negative ids, and lengths that do not fit."""
    lengths = np.concatenate([samples.prompt_lengths, samples.response_lengths])
    rows, tokens = samples.sample_ids.size, samples.token_ids.size
    if lengths.min(initial=0) < 0 or sum(lengths.tolist()) != tokens or not rows:
        yield f"the lengths of its {rows} rows are not those of {tokens} tokens"
    if len(set(samples.sample_ids.tolist())) != rows or samples.token_ids.min(initial=0) < 0:
        yield "it holds a row twice, or a negative token id"


def _update_problems(record: StepRecord) -> Iterator[str]:
    """Updates of rows or models that are not there, and values that are not one a token."""
    lengths = record.samples.prompt_lengths + record.samples.response_lengths
    sizes = dict(zip(record.samples.sample_ids.tolist(), lengths.tolist(), strict=True))
    for number, update in enumerate(record.facts.updates):
        ids = [i for micro in update.micro_batches for i in micro]
        if update.model not in record.facts.optimizers or not sizes.keys() >= set(ids):
            yield f"update {number + 1} of {update.model} is of rows or a model that it lacks"
            return
        for name in ("new", "weights"):
            values = record.update_values.get(f"{number}/{name}")
            if values is not None and values.shape != (sum(sizes[i] for i in ids),):
                yield f"{UPDATE}{number}/{name} does not have a number for each token of its rows"


def rows_of(lengths: Integers) -> Iterator[slice]:
    """Where each row stands in a flat array."""
    stops = np.cumsum(lengths)
    for stop, length in zip(stops, lengths, strict=True):
        yield slice(int(stop - length), int(stop))
