"""Recorder of a training step for an audit."""

from __future__ import annotations

import copy
import pickle
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightrft.config.files import make_folder
from lightrft.models import Actor, SequenceModel
from lightrft.models.lora import LoraModel
from lightrft.records.columns import COLUMNS
from lightrft.records.table import RowTable, SampleTable, join_tables, tabulate
from lightrft.stages.observer import ObservedRows, ObservedStep, Observer
from lightrft.strategy.backend import PreparedModel, inner_module
from lightrft.strategy.optimizers import PlannedLR
from lightrft.tools.audit.record import (
    COMPONENT,
    CONFIG,
    CUT,
    PLACE,
    PLACES,
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
    from lightrft.records.batch import ExperienceBatch
    from lightrft.strategy.optimizers import OptimizerStepResult

Number = TypeVar("Number", bound=np.generic)
# Rows by sample id, without padding.
Flat = NDArray[np.float32] | NDArray[np.int32] | NDArray[np.bool_]
ByRow = dict[str, dict[int, Flat]]
# Numbers that differ between updates.
OF_UPDATE = ("new", "weights")


@dataclass(slots=True)
class RecordedUpdate:
    """One optimizer step on this rank; per-token arrays by name and sample id."""

    facts: UpdateFacts
    values: ByRow = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part of the record of a step; `samples` exist only on this rank."""

    samples: SampleTable | None
    values: ByRow
    updates: list[RecordedUpdate]


class Recorder(Observer):
    """Observer (`lightrft.stages.observer`) that writes `OUTPUT_DIR/audit/step_N`.

    `lightrft.tools.audit.record` documents the files. Build it on every rank, since the constructor
    gathers and writes the states before the first update.

    Args:
        step: Step before its update.
    """

    def __init__(self, step: ObservedStep) -> None:
        self._step, self._backend = step, step.backend
        self._models = {each.name: each.prepared for each in step.models.trained}
        self.updates: list[RecordedUpdate] = []
        self._values: ByRow = {}
        self._folder = step_folder(Path(step.config.output_dir), step.number)
        self._partial = self._folder.with_name(f".{self._folder.name}.partial")
        context = step.backend.context
        if context.is_rank_0():
            shutil.rmtree(self._partial, ignore_errors=True)
            make_folder(self._partial)
        self._optimizers = {name: self._facts_of(model) for name, model in self._models.items()}
        self._write_states("before")
        for name, model in self._models.items() if context.is_rank_0() else ():
            module = inner_module(model)
            if isinstance(module, SequenceModel):
                config = copy.deepcopy(module.pretrained.config)
                if isinstance(module, Actor) and module.vocabulary.num_tokens is not None:
                    config.num_tokens = module.vocabulary.num_tokens
                config.save_pretrained(self._partial / "before" / name)

    def _facts_of(self, found: PreparedModel) -> OptimizerFacts:
        scheduler = found.scheduler
        facts = OptimizerFacts(
            type(found.optimizer).__name__, self._backend.optimizer_groups(found)
        )
        if scheduler is not None:
            facts = replace(facts, schedule_position=int(scheduler.last_epoch))
        if not isinstance(scheduler, PlannedLR):
            return facts
        plan = scheduler.plan
        return replace(
            facts,
            schedule_steps=plan.num_training_steps,
            schedule_changed_at=plan.changed_at,
            schedule_gap=plan.gap,
        )

    def _write_states(self, when: str) -> None:
        for name, model in self._models.items():
            states = self._backend.full_states(model)
            folder = self._partial / when / name
            write_states(folder, states, keeps=self._backend.context.is_rank_0())

    def begin_update(self, model: str, normalizer: Tensor) -> None:
        """Start the record of an optimizer step."""
        facts = UpdateFacts(model, [], float(normalizer), {}, 0.0, 0.0, is_skipped=False)
        self.updates.append(RecordedUpdate(facts))

    def micro_batch(
        self,
        ids: Sequence[int] | Tensor,
        attention_mask: Tensor,
        values: Mapping[str, Tensor | None],
        terms: Mapping[str, Tensor],
    ) -> None:
        """Record a micro batch; numbers of rows are stored at their last trained token."""
        update, rows = self.updates[-1], [int(i) for i in ids]
        update.facts.micro_batches.append(rows)
        for name, tensor in values.items():
            if tensor is not None:
                if tensor.dim() == 1:
                    tensor = at_last(tensor, cast("Tensor", values["response_mask"]))
                into = update.values if name in OF_UPDATE else self._values
                into.setdefault(name, {}).update(by_row(tensor, attention_mask, rows))
        for name, share in terms.items():
            update.facts.losses[name] = update.facts.losses.get(name, 0.0) + float(share.detach())

    def end_update(self, result: OptimizerStepResult) -> None:
        """Record the outcome of an optimizer step."""
        update = self.updates[-1]
        update.facts = replace(update.facts, **asdict(result))

    def finish(self) -> None:
        """Write the final states and all recorded numbers; collective."""
        self._write_states("after")
        context, data, table = self._backend.context, self._step.data, None
        if not isinstance(data, ObservedRows):
            table = tabulate(data.samples.scored)
            self._values |= batch_values(data.batch)
        # Ranks that share sequences have the same rows.
        counts = context.rank % context.config.sp_size == 0
        share = Share(table, self._values, self.updates) if counts else Share(table, {}, [])
        # Only the first rank writes.
        parts = [pickle.dumps(share), *([b""] * (context.world_size - 1))]
        gathered = context.exchange_bytes(parts)
        if context.is_rank_0():
            self._write([pickle.loads(data) for data in gathered])
        context.barrier()

    def _write(self, shares: Sequence[Share]) -> None:
        step, data = self._step, self._step.data
        if isinstance(data, ObservedRows):
            raw, rewards = row_samples(data), np.zeros(sum(map(len, data.items)))
        else:
            tables = [share.samples for share in shares if share.samples is not None]
            raw = _raw_samples(join_tables(tables), data.samples.greedy)
            places = {each: place for place, each in enumerate(step.prompt_ids)}
            drawn = np.array([places.get(each, -1) for each in raw.facts[PLACES].tolist()])
            raw = replace(raw, facts={**raw.facts, PLACES: drawn})
            rewards = data.rewards.rewards.double().cpu().numpy()
        updates = [
            _joined([share.updates[i] for share in shares if share.updates])
            for i in range(len(self.updates))
        ]
        moments, engine, context = step.moments, step.engine, self._backend.context
        facts = Facts(
            weights_version=-1 if engine is None else engine.weights_version,
            stage=step.stage,
            step=step.number,
            num_planned=step.num_planned,
            num_items=data.num_items if isinstance(data, ObservedRows) else len(step.prompt_ids),
            world_size=context.world_size,
            data_ranks=context.num_data_ranks,
            strategy=f"{self._backend.name}Strategy",
            engine="" if engine is None else engine.name,
            compute_dtype=str(context.compute_dtype).removeprefix("torch."),
            kl_coef=step.kl_coef,
            reward_moments=[]
            if moments is None
            else [float(moments.count), moments.mean, moments.sum_of_squares],
            lora_scale=self._lora_scale(),
            optimizers=self._optimizers,
            updates=[update.facts for update in updates],
        )
        step.config.save(self._partial / CONFIG)
        write_record(
            self._partial,
            facts,
            raw,
            _run_values(
                rewards, raw.sample_ids.tolist(), _merged([share.values for share in shares])
            ),
            {
                f"{number}/{name}": _flat(rows, update.facts.ids, np.float32)
                for number, update in enumerate(updates)
                for name, rows in update.values.items()
            },
        )
        publish(self._partial, self._folder)

    def _lora_scale(self) -> float:
        actor = inner_module(self._models["actor"])
        return actor.scale if isinstance(actor, LoraModel) else 0.0


def batch_values(batch: ExperienceBatch) -> ByRow:
    """Return the values of this rank's samples before the first update."""
    values: ByRow = {}
    for record in (batch, batch.outputs, batch.rollouts):
        for name in TOKEN_VALUES:
            tensor = getattr(record, name) if name in record.__slots__ else None
            if tensor is not None:
                rollouts = batch.rollouts
                values[name] = by_row(tensor, rollouts.attention_mask, rollouts.sample_ids.tolist())
    return values


def by_row(tensor: Tensor, attention_mask: Tensor, ids: Sequence[int]) -> dict[int, Flat]:
    """Return the rows of a [batch, seq] tensor by id, without padding."""
    lengths, values = attention_mask.sum(dim=1).tolist(), tensor.detach().cpu().numpy()
    return {i: row[: int(n)].copy() for i, row, n in zip(ids, values, lengths, strict=True)}


def at_last(numbers: Tensor, is_trained: Tensor) -> Tensor:
    """Return each row's number at its last trained token, 0 elsewhere: [batch, seq]."""
    counts = is_trained.cumsum(dim=1)
    return numbers[:, None] * (is_trained & (counts == counts[:, -1:]))


def row_samples(data: ObservedRows) -> RawSamples:
    """Return rows of the data in the format of samples."""
    rows, sizes = [row for item in data.items for row in item], [len(item) for item in data.items]
    lengths = np.array([len(row.token_ids) for row in rows], dtype=np.int64)
    zeros, never = np.zeros(len(rows)), np.zeros(len(rows), dtype=np.bool_)
    return RawSamples(
        sample_ids=np.arange(len(rows), dtype=np.int64),
        group_ids=np.repeat(np.arange(len(sizes)), sizes),
        prompt_lengths=np.zeros_like(lengths),
        response_lengths=lengths,
        token_ids=np.concatenate([row.token_ids for row in rows]),
        is_sampled=np.concatenate([row.is_trained for row in rows]),
        rollout_logprobs=np.zeros(int(lengths.sum()), dtype=np.float32),
        rewards=zeros,
        accuracies=zeros,
        is_failed=never,
        is_untruncated=~never,
        greedy_rewards=zeros,
        facts={**data.facts, PLACE: np.repeat(data.places, sizes)},
    )


def _raw_samples(table: SampleTable, greedy: RowTable | None) -> RawSamples:
    """Return the samples of all ranks, in the order of their ids."""
    columns = table.columns
    for column in COLUMNS.values():
        if column.is_padded:
            columns[column.name] = table.per_token(column)
    columns |= {"rewards": columns.pop("unshaped_rewards"), "is_failed": table.is_masked}
    columns["greedy_rewards"] = np.full(len(table), np.nan)
    if greedy is not None:
        rewards = np.where(greedy.is_masked, np.nan, greedy.rewards)
        by_group = dict(zip(greedy.group_ids.tolist(), rewards.tolist(), strict=True))
        columns["greedy_rewards"] = np.array([by_group[i] for i in table.group_ids.tolist()])
    names = {item.name for item in fields(RawSamples)}
    return RawSamples(
        **{name: values for name, values in columns.items() if name in names},  # type: ignore[arg-type]
        facts={name: columns[name] for name in (*table.facts, VERSIONS, CUT) if name in columns}
        | {
            f"{COMPONENT}{name}": table.components[:, column].copy()
            for column, name in enumerate(table.component_names)
        },
    )


def _run_values(rewards: NDArray[np.float64], ids: Sequence[int], values: ByRow) -> RunValues:
    """Return flat columns in the order of the ids; columns without rows are empty."""
    kinds: dict[str, type[np.generic]] = {"token_ids": np.int32, "response_mask": np.bool_}
    columns = {
        name: _flat(values.get(name, {}), ids, kinds.get(name, np.float32)) for name in TOKEN_VALUES
    }
    return RunValues(rewards=rewards, **columns)  # type: ignore[arg-type]


def _flat(rows: Mapping[int, Flat], ids: Sequence[int], dtype: type[Number]) -> NDArray[Number]:
    """Return the values of rows, one after another."""
    parts = [rows[i].astype(dtype) for i in ids if i in rows]
    return np.concatenate([np.zeros(0, dtype), *parts])


def _merged(parts: Sequence[ByRow]) -> ByRow:
    """Merge the values of all ranks."""
    values: ByRow = {}
    for part in parts:
        for name, rows in part.items():
            values.setdefault(name, {}).update(rows)
    return values


def _joined(parts: Sequence[RecordedUpdate]) -> RecordedUpdate:
    """Merge one optimizer step from the shares of all ranks."""
    facts = [part.facts for part in parts]
    joined = replace(
        facts[0],
        micro_batches=[micro for each in facts for micro in each.micro_batches],
        losses={name: sum(each.losses[name] for each in facts) for name in facts[0].losses},
    )
    return RecordedUpdate(joined, _merged([part.values for part in parts]))
