"""The record that a run writes of one rollout step for an audit, and its reader.

    OUTPUT_DIR/audit/step_000004/
        facts.json              sizes, learning rates, losses, norms, the order of the rows
        samples.safetensors     raw completions and rewards (`RawSamples`)
        values.safetensors      what the run computed, token by token (`RunValues`)
        before/actor/           config.json, weights and optimizer states in full, float32
        after/actor/            weights and optimizer states after the last update
        before/critic/ ...      likewise, with a critic

Per-token arrays are flat: the rows in the order of `sample_ids`, each with its prompt and its
response; entry t of a row belongs to token t.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_tensors, save_file as save_tensors
from torch import Tensor

FORMAT = 1
FOLDER = "audit"
FACTS, SAMPLES, VALUES, CONFIG = (
    "facts.json",
    "samples.safetensors",
    "values.safetensors",
    "config.toml",
)
# In names of arrays, before those that the record's classes do not list.
FACT, UPDATE = "fact/", "update/"
# Of one file of states; the writer holds no more of them in memory.
STATE_FILE_BYTES = 2**30

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
Integers = NDArray[np.int64]


class RecordError(ValueError):
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
        greedy_rewards: [rows] float64 of the greedy completion of the row's prompt; NaN without.
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
        rollout_logprobs, old_logprobs, ref_logprobs, values, entropy, log_kept_mass, advantages,
            returns: [tokens] float32, flat.
    """

    rewards: Array
    token_ids: NDArray[np.int32]
    response_mask: Flags
    rollout_logprobs: NDArray[np.float32]
    old_logprobs: NDArray[np.float32]
    ref_logprobs: NDArray[np.float32]
    values: NDArray[np.float32]
    entropy: NDArray[np.float32]
    log_kept_mass: NDArray[np.float32]
    advantages: NDArray[np.float32]
    returns: NDArray[np.float32]


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
        schedule_steps: Optimizer steps of the whole run; 0 is unknown.
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
        world_size, data_ranks: Processes, and those of them that have samples of their own.
        strategy, engine: Names.
        compute_dtype: "float32" or "bfloat16".
        kl_coef: Weight of the KL term before the step; 0 without a reference model.
        reward_moments: Count, mean and squared deviations of all rewards before the step; empty
            without running normalisation.
        lora_scale: Of the adapters; 0 without.
        optimizers: By model.
        updates: In their order.
        format: Of the record.
    """

    step: int
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
        found: dict[str, Tensor] = {}
        for path in sorted(folder.glob("state_*.safetensors")):
            try:
                found |= load_tensors(path)
            except SafetensorError as error:
                raise RecordError(
                    f"{path} is damaged: {error}; audit another step with --step"
                ) from error
        if not found:
            raise RecordError(f"no states in {folder}: the record is not whole; use another --step")
        return found


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
    found = [path.parent.name.partition("_")[2] for path in (run / FOLDER).glob(f"step_*/{FACTS}")]
    return sorted(int(number) for number in found if number.isdigit())


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
        folder.mkdir(parents=True, exist_ok=True)
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
    (folder / FACTS).write_text(json.dumps(asdict(facts), indent=1) + "\n", encoding="utf-8")


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
        facts = _read_facts(json.loads((folder / FACTS).read_text(encoding="utf-8")))
        found, of_facts = _read_arrays(folder / SAMPLES, FACT)
        samples = RawSamples(**found, facts=of_facts)
        found, updates = _read_arrays(folder / VALUES, UPDATE)
        values = RunValues(**found)
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise RecordError(
            f"{folder} is damaged: {type(error).__name__}: {error}; audit another step with --step"
        ) from error
    return StepRecord(folder, facts, samples, values, updates)


def _read_arrays(path: Path, prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays of a file, and those whose names begin with a prefix, by the rest of it."""
    arrays = load_file(path)
    marked = {name for name in arrays if name.startswith(prefix)}
    return (
        {name: array for name, array in arrays.items() if name not in marked},
        {name.removeprefix(prefix): arrays[name] for name in sorted(marked)},
    )


def _read_facts(given: dict[str, object]) -> Facts:
    if given.get("format") != FORMAT:
        raise ValueError(f"its format is {given.get('format')}, expected {FORMAT}")
    optimizers, updates = given.pop("optimizers"), given.pop("updates")
    if not isinstance(optimizers, dict) or not isinstance(updates, list):
        raise ValueError("facts.json lacks optimizers or updates")
    return Facts(
        **given,  # type: ignore[arg-type]
        optimizers={name: OptimizerFacts(**entry) for name, entry in optimizers.items()},
        updates=[UpdateFacts(**entry) for entry in updates],
    )


def rows_of(lengths: Integers) -> Iterator[slice]:
    """Where each row stands in a flat array."""
    stops = np.cumsum(lengths)
    for stop, length in zip(stops, lengths, strict=True):
        yield slice(int(stop - length), int(stop))
