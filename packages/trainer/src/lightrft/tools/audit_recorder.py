"""The audit's record of a step while it is computed."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightrft.models import LoraActor, SequenceModel
from lightrft.records.columns import COLUMNS
from lightrft.records.table import RowTable, SampleTable, join_tables, tabulate
from lightrft.strategy.backend import PreparedModel
from lightrft.strategy.optimizers import PlannedLR
from lightrft.tools.audit.record import (
    COMPONENT,
    CONFIG,
    TOKEN_VALUES,
    Facts,
    OptimizerFacts,
    RawSamples,
    RunValues,
    UpdateFacts,
    publish,
    step_folder,
    write_record,
    write_states,
)

if TYPE_CHECKING:
    from lightrft.records.batch import ExperienceBatch
    from lightrft.stages.policy.updates import ObservedStep
    from lightrft.strategy.optimizers import OptimizerStepResult

Kind = TypeVar("Kind", bound=np.generic)
Flat = NDArray[np.float32] | NDArray[np.int32] | NDArray[np.bool_]


@dataclass(slots=True)
class _Update:
    """One optimizer step as this rank saw it; per-token arrays by sample id."""

    model: str
    normalizer: float
    weights: dict[int, Flat] = field(default_factory=dict)
    new: dict[int, Flat] = field(default_factory=dict)
    micro_batches: list[list[int]] = field(default_factory=list)
    losses: dict[str, float] = field(default_factory=dict)
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    is_skipped: bool = False


class StepRecorder:
    """Writes `OUTPUT_DIR/audit/step_N`; see `lightrft.tools.audit.record` for what is in it.

    An observer (`lightrft.stages.policy.updates.StepObserver`); to be made on every rank, since
    the states before the first update are gathered and written at once.

    Args:
        step: Before its update.
    """

    def __init__(self, step: ObservedStep) -> None:
        self._strategy, self._config, self._step = step.strategy, step.config, step.experience
        self._models = {
            each.name: PreparedModel(each.model, each.optimizer, each.scheduler)
            for each in step.models.trained
        }
        self._updates: list[_Update] = []
        self._old: dict[int, Flat] = {}
        self._number, self._kl_coef, moments = step.number, step.kl_coef, step.moments
        self._num_planned = step.num_planned
        self._folder = step_folder(Path(self._config.output_dir), self._number)
        self._partial = self._folder.with_name(f".{self._folder.name}.partial")
        strategy = self._strategy
        if strategy.is_rank_0():
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial.mkdir(parents=True)
        self._moments = (
            [] if moments is None else [moments.count, moments.mean, moments.sum_of_squares]
        )
        self._optimizers = {name: self._facts_of(found) for name, found in self._models.items()}
        self._write_states("before")
        for name, found in self._models.items() if strategy.is_rank_0() else ():
            module = strategy.unwrap_model(found)
            if isinstance(module, SequenceModel):
                module.pretrained.config.save_pretrained(self._partial / "before" / name)

    def _facts_of(self, found: PreparedModel) -> OptimizerFacts:
        scheduler = found.scheduler
        plan = scheduler.plan if isinstance(scheduler, PlannedLR) else None
        return OptimizerFacts(
            kind=type(found.optimizer).__name__,
            groups=self._strategy.backend.optimizer_groups(found),
            schedule_position=0 if scheduler is None else int(scheduler.last_epoch),
            schedule_steps=0 if plan is None else plan.num_training_steps,
            schedule_changed_at=-1 if plan is None else plan.changed_at,
            schedule_gap=0.0 if plan is None else plan.gap,
        )

    def _write_states(self, when: str) -> None:
        for name, found in self._models.items():
            states = self._strategy.backend.full_states(found)
            folder = self._partial / when / name
            write_states(folder, states, keeps=self._strategy.is_rank_0())

    def begin_update(self, model: str, normalizer: Tensor) -> None:
        """See `StepObserver`."""
        self._updates.append(_Update(model, float(normalizer)))

    def micro_batch(
        self,
        batch: ExperienceBatch,
        values: Tensor,
        terms: Mapping[str, Tensor],
        old_logprobs: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> None:
        """See `StepObserver`."""
        update, by_row = self._updates[-1], _by_sample(batch, values)
        if weights is not None:
            update.weights |= _by_sample(batch, weights)
        update.micro_batches.append(list(by_row))
        update.new |= by_row
        for name, share in terms.items():
            update.losses[name] = update.losses.get(name, 0.0) + float(share.detach())
        if old_logprobs is not None and batch.outputs.old_logprobs is None:
            self._old |= _by_sample(batch, old_logprobs)

    def end_update(self, result: OptimizerStepResult) -> None:
        """See `StepObserver`."""
        update = self._updates[-1]
        update.grad_norm, update.learning_rate = result.grad_norm, result.learning_rate
        update.is_skipped = result.is_skipped

    def finish(self) -> None:
        """Writes the states after the last update, and all that was collected; collective."""
        self._write_states("after")
        strategy = self._strategy
        # Ranks that share their sequences saw the same rows.
        counts = strategy.get_rank() % strategy.config.sp_size == 0
        own = _Share(
            tabulate(self._step.samples.scored),
            self._own_values() if counts else {},
            self._updates if counts else [],
        )
        # Only the first rank writes.
        parts = [pickle.dumps(own), *([b""] * (strategy.world_size - 1))]
        gathered = strategy.context.exchange_bytes(parts)
        if strategy.is_rank_0():
            self._write([pickle.loads(data) for data in gathered])
        strategy.barrier()

    def _own_values(self) -> dict[str, dict[int, Flat]]:
        """Per-token values of this rank's rows, by name and sample id."""
        batch, found = self._step.batch, dict[str, dict[int, Flat]]()
        for record in (batch, batch.outputs, batch.rollouts):
            for name in TOKEN_VALUES:
                tensor = getattr(record, name) if name in record.__slots__ else None
                if tensor is not None:
                    found[name] = _by_sample(batch, tensor)
        if self._old:
            found["old_logprobs"] = self._old
        return found

    def _write(self, shares: Sequence[_Share]) -> None:
        raw = join_tables([share.raw for share in shares])
        values: dict[str, dict[int, Flat]] = {}
        for share in shares:
            for name, rows in share.values.items():
                values[name] = {**values.get(name, {}), **rows}
        updates = [
            [share.updates[i] for share in shares if share.updates]
            for i in range(len(self._updates))
        ]
        strategy = self._strategy
        facts = Facts(
            step=self._number,
            num_planned=self._num_planned,
            world_size=strategy.world_size,
            data_ranks=strategy.num_data_ranks,
            strategy=type(strategy).__name__,
            engine=strategy.inference_engine_type or "",
            compute_dtype=str(strategy.context.compute_dtype).removeprefix("torch."),
            kl_coef=self._kl_coef,
            reward_moments=[float(number) for number in self._moments],
            lora_scale=self._lora_scale(),
            optimizers=self._optimizers,
            updates=[_joined(parts) for parts in updates],
        )
        self._config.save(self._partial / CONFIG)
        write_record(
            self._partial,
            facts,
            _raw_samples(raw, self._step.samples.greedy),
            _run_values(self._step.rewards.rewards, raw.sample_ids.tolist(), values),
            _update_values(updates),
        )
        publish(self._partial, self._folder)

    def _lora_scale(self) -> float:
        actor = self._strategy.unwrap_model(self._models["actor"])
        return actor.scale if isinstance(actor, LoraActor) else 0.0


@dataclass(frozen=True, slots=True)
class _Share:
    """A rank's part of the record of a step."""

    raw: SampleTable
    values: dict[str, dict[int, Flat]]
    updates: list[_Update]


def _by_sample(batch: ExperienceBatch, tensor: Tensor) -> dict[int, Flat]:
    """A [batch, seq] tensor row by row, without padding, by sample id."""
    lengths = batch.rollouts.attention_mask.sum(dim=1).tolist()
    values, ids = tensor.detach().cpu().numpy(), batch.rollouts.sample_ids.tolist()
    return {int(i): row[: int(n)].copy() for i, row, n in zip(ids, values, lengths, strict=True)}


def _raw_samples(table: SampleTable, greedy: RowTable | None) -> RawSamples:
    """The samples of all ranks, in the order of their ids."""
    found = table.columns
    for column in COLUMNS.values():
        if column.is_padded:
            found[column.name] = table.per_token(column)
    found |= {"rewards": found.pop("unshaped_rewards"), "is_failed": table.is_masked}
    found["greedy_rewards"] = np.full(len(table), np.nan)
    if greedy is not None:
        rewards = np.where(greedy.is_masked, np.nan, greedy.rewards)
        by_group = dict(zip(greedy.group_ids.tolist(), rewards.tolist(), strict=True))
        found["greedy_rewards"] = np.array([by_group[i] for i in table.group_ids.tolist()])
    own = {item.name for item in fields(RawSamples)}
    return RawSamples(
        **{name: values for name, values in found.items() if name in own},  # type: ignore[arg-type]
        facts={name: found[name] for name in table.facts if name in found}
        | {
            f"{COMPONENT}{name}": table.components[:, column].copy()
            for column, name in enumerate(table.component_names)
        },
    )


def _run_values(
    rewards: Tensor, ids: Sequence[int], values: Mapping[str, Mapping[int, Flat]]
) -> RunValues:
    """Flat columns in the order of the ids; what no row has is empty."""
    kinds: dict[str, type[np.generic]] = {"token_ids": np.int32, "response_mask": np.bool_}
    found = {}
    for name in TOKEN_VALUES:
        rows, dtype = values.get(name, {}), kinds.get(name, np.float32)
        parts = [rows[i].astype(dtype) for i in ids if i in rows]
        found[name] = np.concatenate([np.zeros(0, dtype), *parts])
    return RunValues(rewards=rewards.double().cpu().numpy(), **found)


def _joined(parts: Sequence[_Update]) -> UpdateFacts:
    """One optimizer step from the shares of all ranks."""
    first = parts[0]
    return UpdateFacts(
        model=first.model,
        micro_batches=[micro for part in parts for micro in part.micro_batches],
        normalizer=first.normalizer,
        losses={name: sum(part.losses[name] for part in parts) for name in first.losses},
        grad_norm=first.grad_norm,
        learning_rate=first.learning_rate,
        is_skipped=first.is_skipped,
    )


def _update_values(updates: Sequence[Sequence[_Update]]) -> dict[str, NDArray[np.float32]]:
    """Per-token values of every optimizer step, flat in the order of its micro batches."""
    found = {}
    for number, parts in enumerate(updates):
        for what in ("new", "weights"):
            rows = [
                (part.new if what == "new" else part.weights)[i]
                for part in parts
                if what == "new" or part.weights
                for micro in part.micro_batches
                for i in micro
            ]
            if rows:
                found[f"{number}/{what}"] = np.concatenate(rows).astype(np.float32)
    return found
