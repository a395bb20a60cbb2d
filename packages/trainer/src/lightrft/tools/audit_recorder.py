"""The audit's record of a step while it is computed."""

from __future__ import annotations

import copy
import pickle
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightrft.config.files import make_folder
from lightrft.models import Actor, SequenceModel
from lightrft.models.lora import LoraModel
from lightrft.records.columns import COLUMNS
from lightrft.records.table import RowTable, SampleTable, join_tables, tabulate
from lightrft.strategy.backend import PreparedModel
from lightrft.strategy.optimizers import PlannedLR
from lightrft.tools.audit.record import (
    COMPONENT,
    CONFIG,
    CUT,
    TOKEN_VALUES,
    VERSIONS,
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
    from lightrft.algorithms.moments import Moments
    from lightrft.records.batch import ExperienceBatch
    from lightrft.stages.policy.updates import ObservedStep
    from lightrft.stages.rows.row_observer import ObservedRows
    from lightrft.strategy.optimizers import OptimizerStepResult

Kind = TypeVar("Kind", bound=np.generic)
Raw = TypeVar("Raw")
Flat = NDArray[np.float32] | NDArray[np.int32] | NDArray[np.bool_]


@dataclass(slots=True)
class Update:
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

    def add(self, ids: Sequence[int], values: dict[int, Flat], terms: Mapping[str, Tensor]) -> None:
        """Adds a micro batch: ids and values of its rows, its share of each term of the loss."""
        self.micro_batches.append(list(ids))
        self.new |= values
        for name, share in terms.items():
            self.losses[name] = self.losses.get(name, 0.0) + float(share.detach())


@dataclass(frozen=True, slots=True)
class Share(Generic[Raw]):
    """A rank's part of the record of a step."""

    raw: Raw
    values: dict[str, dict[int, Flat]]
    updates: list[Update]


class Recorder(ABC, Generic[Raw]):
    """Writes `OUTPUT_DIR/audit/step_N`; see `lightrft.tools.audit.record` for what is in it.

    To be made on every rank, since the states before the first update are gathered and written at
    once.

    Args:
        step: Before its update.
        stage: Of `config.registry.STAGES`.
    """

    kl_coef, num_items = 0.0, 0
    moments: Moments | None = None

    def __init__(self, step: ObservedStep | ObservedRows, stage: str) -> None:
        self._strategy, self._config, self._stage = step.strategy, step.config, stage
        self._models = {
            each.name: PreparedModel(each.model, each.optimizer, each.scheduler)
            for each in step.models.trained
        }
        self.updates: list[Update] = []
        self._number, self._num_planned = step.number, step.num_planned
        self._folder = step_folder(Path(self._config.output_dir), self._number)
        self._partial = self._folder.with_name(f".{self._folder.name}.partial")
        strategy = self._strategy
        if strategy.is_rank_0():
            shutil.rmtree(self._partial, ignore_errors=True)
            make_folder(self._partial)
        self._optimizers = {name: self._facts_of(found) for name, found in self._models.items()}
        self._write_states("before")
        for name, found in self._models.items() if strategy.is_rank_0() else ():
            module = strategy.unwrap_model(found)
            if isinstance(module, SequenceModel):
                config = copy.deepcopy(module.pretrained.config)
                if isinstance(module, Actor) and module.vocabulary.num_tokens is not None:
                    config.num_tokens = module.vocabulary.num_tokens
                config.save_pretrained(self._partial / "before" / name)

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
        """Before the micro batches of an optimizer step, with Z over all ranks."""
        self.updates.append(Update(model, float(normalizer)))

    def end_update(self, result: OptimizerStepResult) -> None:
        """After an optimizer step."""
        update = self.updates[-1]
        update.grad_norm, update.learning_rate = result.grad_norm, result.learning_rate
        update.is_skipped = result.is_skipped

    def finish(self) -> None:
        """Writes the states after the last update, and all that was collected; collective."""
        self._write_states("after")
        strategy = self._strategy
        # Ranks that share their sequences saw the same rows.
        counts = strategy.get_rank() % strategy.config.sp_size == 0
        values = self._own_values() if counts else {}
        own = Share(self._own_raw(), values, self.updates if counts else [])
        # Only the first rank writes.
        parts = [pickle.dumps(own), *([b""] * (strategy.world_size - 1))]
        gathered = strategy.context.exchange_bytes(parts)
        if strategy.is_rank_0():
            self._write([pickle.loads(data) for data in gathered])
        strategy.barrier()

    @abstractmethod
    def _own_raw(self) -> Raw:
        """What this rank has before anything was computed."""

    @abstractmethod
    def _own_values(self) -> dict[str, dict[int, Flat]]:
        """Per-token values of this rank's rows, by name and sample id."""

    @abstractmethod
    def _joined_raw(self, shares: Sequence[Raw]) -> tuple[RawSamples, Tensor]:
        """The raw samples of all ranks, and the rewards as the run saw them."""

    def _write(self, shares: Sequence[Share[Raw]]) -> None:
        raw, rewards = self._joined_raw([share.raw for share in shares])
        values: dict[str, dict[int, Flat]] = {}
        for share in shares:
            for name, rows in share.values.items():
                values[name] = {**values.get(name, {}), **rows}
        updates = [
            [share.updates[i] for share in shares if share.updates]
            for i in range(len(self.updates))
        ]
        strategy, moments = self._strategy, self.moments
        engine = strategy.inference_engine
        facts = Facts(
            weights_version=-1 if engine is None else engine.weights_version,
            stage=self._stage,
            step=self._number,
            num_planned=self._num_planned,
            num_items=self.num_items,
            world_size=strategy.world_size,
            data_ranks=strategy.num_data_ranks,
            strategy=type(strategy).__name__,
            engine=strategy.inference_engine_type or "",
            compute_dtype=str(strategy.context.compute_dtype).removeprefix("torch."),
            kl_coef=self.kl_coef,
            reward_moments=[]
            if moments is None
            else [float(moments.count), moments.mean, moments.sum_of_squares],
            lora_scale=self._lora_scale(),
            optimizers=self._optimizers,
            updates=[_joined(parts) for parts in updates],
        )
        self._config.save(self._partial / CONFIG)
        write_record(
            self._partial,
            facts,
            raw,
            _run_values(rewards, raw.sample_ids.tolist(), values),
            _update_values(updates),
        )
        publish(self._partial, self._folder)

    def _lora_scale(self) -> float:
        actor = self._strategy.unwrap_model(self._models["actor"])
        return actor.scale if isinstance(actor, LoraModel) else 0.0


class StepRecorder(Recorder[SampleTable]):
    """The record of a step of reinforcement, an observer (`lightrft.stages.policy.updates`)."""

    def __init__(self, step: ObservedStep) -> None:
        self._step = step.experience
        self._of_first_pass: dict[str, dict[int, Flat]] = {"old_logprobs": {}, "log_kept_mass": {}}
        self.kl_coef, self.moments = step.kl_coef, step.moments
        super().__init__(step, "policy")

    def micro_batch(
        self,
        batch: ExperienceBatch,
        values: Tensor,
        terms: Mapping[str, Tensor],
        old_logprobs: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> None:
        """See `StepObserver`."""
        update, by_row = self.updates[-1], _by_sample(batch, values)
        if weights is not None:
            update.weights |= _by_sample(batch, weights)
        update.add(list(by_row), by_row, terms)
        if self._step.batch.outputs.old_logprobs is None:
            for name in self._of_first_pass:
                tensor = getattr(batch.outputs, name)
                if tensor is not None:
                    self._of_first_pass[name] |= _by_sample(batch, tensor)

    def _own_raw(self) -> SampleTable:
        return tabulate(self._step.samples.scored)

    def _own_values(self) -> dict[str, dict[int, Flat]]:
        batch, found = self._step.batch, dict[str, dict[int, Flat]]()
        for record in (batch, batch.outputs, batch.rollouts):
            for name in TOKEN_VALUES:
                tensor = getattr(record, name) if name in record.__slots__ else None
                if tensor is not None:
                    found[name] = _by_sample(batch, tensor)
        return found | {name: own for name, own in self._of_first_pass.items() if own}

    def _joined_raw(self, shares: Sequence[SampleTable]) -> tuple[RawSamples, Tensor]:
        raw = _raw_samples(join_tables(shares), self._step.samples.greedy)
        return raw, self._step.rewards.rewards


def _by_sample(batch: ExperienceBatch, tensor: Tensor) -> dict[int, Flat]:
    rollouts = batch.rollouts
    return by_row(tensor, rollouts.attention_mask, rollouts.sample_ids.tolist())


def by_row(tensor: Tensor, attention_mask: Tensor, ids: Sequence[int]) -> dict[int, Flat]:
    """A [batch, seq] tensor row by row, without padding, by id."""
    lengths, values = attention_mask.sum(dim=1).tolist(), tensor.detach().cpu().numpy()
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
        facts={name: found[name] for name in (*table.facts, VERSIONS, CUT) if name in found}
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


def _joined(parts: Sequence[Update]) -> UpdateFacts:
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


def _update_values(updates: Sequence[Sequence[Update]]) -> dict[str, NDArray[np.float32]]:
    """Per-token values of every optimizer step, flat in the order of its micro batches."""
    found = {}
    for number, parts in enumerate(updates):
        for what in ("new", "weights"):
            rows = [
                (part.new if what == "new" else part.weights)[i]
                for part in parts
                if (part.new if what == "new" else part.weights)
                for micro in part.micro_batches
                for i in micro
            ]
            if rows:
                found[f"{number}/{what}"] = np.concatenate(rows).astype(np.float32)
    return found
