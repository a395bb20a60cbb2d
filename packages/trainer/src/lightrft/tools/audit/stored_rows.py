"""Checks of steps on rows of the data: trained rows, items and micro batches."""

from __future__ import annotations

import numpy as np
import torch

from lightrft.config import TrainConfig
from lightrft.tools.audit.decisions import check_tokens
from lightrft.tools.audit.record import PLACE, Integers
from lightrft.tools.audit.replay import ReplayedStep


def in_items(config: TrainConfig) -> TrainConfig:
    """Return rollout options that describe a step on data: one optimizer step on its items."""
    size = config.train_batch_size
    return config.replaced({"rollout_batch_size": size, "n_samples_per_prompt": 1, "max_epochs": 1})


def check_stored(step: ReplayedStep) -> None:
    """Compare the items, rows and micro batches of an optimizer step."""
    findings, facts, items = step.results, step.record.facts, items_of(step)
    findings.number("items of the step", len(set(items)), step.config.train_batch_size)
    if facts.stage in ("sft", "divergence"):
        findings.number("rows of the step", len(items), step.config.train_batch_size)
    findings.number("updates of the actor", len(facts.updates), 1)
    trained = [i for update in facts.updates for micro in update.micro_batches for i in micro]
    wanted = np.sort(step.record.samples.sample_ids)
    findings.exact("rows that train the actor", np.sort(np.array(trained, dtype=np.int64)), wanted)
    _check_micro_batches(step)


def check_places(step: ReplayedStep) -> None:
    """Compare the trained items with the items that the options select.

    Each pass shuffles the items with seed + pass. A step takes the next `train_batch_size` items,
    for any number of ranks. Items that fill no step are dropped.
    """
    findings, config, facts, name = step.results, step.config, step.record.facts, "rows of the data"
    samples, size = step.record.samples, config.train_batch_size
    if config.allow_changes or facts.num_items < size or PLACE not in samples.facts:
        findings.skip(name, "the run may have been continued with other data or options")
        return
    number, place = divmod(facts.step - 1, facts.num_items // size)
    generator = torch.Generator().manual_seed(config.seed + number)
    order = torch.randperm(facts.num_items, generator=generator).numpy()
    _, first = np.unique(samples.group_ids, return_index=True)
    trained = np.sort(samples.facts[PLACE][first])
    findings.exact(name, trained, np.sort(order[place * size : (place + 1) * size]))


def items_of(step: ReplayedStep) -> list[int]:
    """Return the pair, ranking or answer of each row: [rows]."""
    items: list[int] = step.record.samples.group_ids.tolist()
    return items


def _check_micro_batches(step: ReplayedStep) -> None:
    """Check that micro batches have whole items, within their number or tokens."""
    findings, config, items = step.results, step.config, items_of(step)
    index = {int(i): row for row, i in enumerate(step.record.samples.sample_ids)}
    micros = [
        [index[i] for i in micro]
        for update in step.record.facts.updates
        for micro in update.micro_batches
    ]
    sizes = {item: items.count(item) for item in set(items)}
    items_by_micro = [{items[row] for row in micro} for micro in micros]
    whole = [sum(sizes[item] for item in members) for members in items_by_micro]
    findings.exact("items in one micro batch", np.array(list(map(len, micros))), np.array(whole))
    if config.micro_batch_tokens is None and not config.packing_samples:
        counts = np.array(list(map(len, items_by_micro)), dtype=np.int64)
        wanted = np.full(len(micros), config.micro_train_batch_size)
        findings.exact("items of micro batches", counts, wanted)
        return
    several = [
        step.rows.lengths[micro]
        for micro, members in zip(micros, items_by_micro, strict=True)
        if len(members) > 1
    ]
    _check_tokens(step, several, set(sizes.values()))


def _check_tokens(step: ReplayedStep, micros: list[Integers], sizes: set[int]) -> None:
    """Check that micro batches of several items stay within the limit of tokens."""
    config, bound = step.config, step.config.micro_batch_tokens
    if bound is None and len(sizes) > 1:
        step.results.skip("tokens of micro batches", "the longest ranking of the data bounds them")
        return
    if bound is None:
        bound = config.micro_train_batch_size * config.max_row_tokens * max(sizes)
    check_tokens(step.results, micros, config.packing_samples, bound)
