"""Checks of a step's rows, and of the contents of its optimizer steps and micro batches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import chain, pairwise
from pathlib import Path

import numpy as np

from lightrft.config import TrainConfig
from lightrft.tools.audit.order import Order, UnknownOrderError
from lightrft.tools.audit.pairs import Pair
from lightrft.tools.audit.record import PLACE, PLACES, WEIGHTS, UpdateFacts
from lightrft.tools.audit.replay import ReplayedStep

# Shorter prompts, and those of less than an eighth of a row, are computed for each row.
MIN_SHARED_TOKENS = 16


def check_rows(step: ReplayedStep) -> None:
    """Compare ids, masks, engine logprobs, compute dtype and scale of adapters."""
    findings, rows, values = step.results, step.rows, step.record.values
    findings.exact("token ids", rows.padded(values.token_ids), rows.ids)
    findings.exact("response mask", rows.padded(values.response_mask), rows.mask)
    if step.is_reinforced:
        rollout = Pair(rows.rollout_logprobs, rows.padded(values.rollout_logprobs))
        findings.tokens("rollout logprobs", rollout, rows.mask, "number")
    if step.config.bf16 is not None:
        findings.number("computes in bfloat16", step.is_rounded, step.config.bf16)
    scale = step.record.facts.lora_scale
    findings.number("scale of adapters", scale, step.decided.lora_scale)


# --- steps on samples


def check_sampled(step: ReplayedStep) -> None:
    """Compare the values at the start of a step, and the sizes and contents of its update."""
    findings, facts, config = step.results, step.record.facts, step.config
    _check_groups(step)
    wanted = step.decided.kl_coef
    if wanted is None:
        findings.skip("KL weight", "it follows the KL of the step before, which is not recorded")
    else:
        # Allow for float32 rounding of a row's KL terms.
        findings.number("KL weight", facts.kl_coef, wanted, floor=1e-6 * wanted)
    _check_moments(step)
    has_updates = bool(step.rows.is_kept.any())
    for model in facts.optimizers:
        is_frozen = model == "actor" and facts.step <= config.freezing_actor_steps
        num_epochs = config.max_epochs if has_updates and not is_frozen else 0
        updates = [update for update in facts.updates if update.model == model]
        _check_updates(step, model, updates, num_epochs)
        _check_micro_batches(step, updates, "rows", range(len(step.mask)))


def _check_groups(step: ReplayedStep) -> None:
    """Check that rows of a group share their prompt, and that each group is complete."""
    samples, config = step.record.samples, step.config
    prompts = [
        ids[:size].tolist() for ids, size in zip(step.rows.ids, samples.prompt_lengths, strict=True)
    ]
    _, first, group_of_row, sizes = np.unique(
        samples.group_ids, return_index=True, return_inverse=True, return_counts=True
    )
    strange = [prompt != prompts[first[g]] for prompt, g in zip(prompts, group_of_row, strict=True)]
    step.results.exact("prompts of groups", strange, [False] * len(strange))
    wanted = [config.n_samples_per_prompt] * config.rollout_batch_size
    step.results.exact("rows of groups", sizes, wanted)


def _check_moments(step: ReplayedStep) -> None:
    results, config, facts = step.results, step.config, step.record.facts
    seen, wanted_moments = facts.reward_moments, step.decided.reward_moments
    name = "rewards counted before"
    if wanted_moments is None:
        most = (facts.step - 1) * config.rollout_batch_size * config.n_samples_per_prompt
        # Failed rewards are not counted.
        fails = config.reward_failure == "mask" or config.dynamic_sampling or config.has_episodes
        least = 1 if fails or config.allow_changes else most
        count = seen[0] if seen else 0.0
        short = max(0.0, least - count, 0.0 if config.allow_changes else count - most)
        results.add(name, count, float(most), short, 0.0)
    elif len(seen) != len(wanted_moments):
        results.number(name, len(seen), len(wanted_moments))
    elif wanted_moments:
        spread = math.sqrt(wanted_moments[2] / max(wanted_moments[0], 1))
        names = (name, "their mean", "their squared deviations")
        scales = (0.0, spread, 0.0)
        for each, run, wanted, scale in zip(names, seen, wanted_moments, scales, strict=True):
            results.number(each, run, wanted, scale=scale)


def _check_updates(
    step: ReplayedStep, model: str, updates: Sequence[UpdateFacts], num_epochs: int
) -> None:
    """Check that each epoch trains every row once, in the batches drawn from the seed."""
    results, config = step.results, step.config
    num_rows, size = len(step.mask), config.train_batch_size
    num_batches = num_rows // size
    batches = [sorted(chain.from_iterable(step.micro_rows(update))) for update in updates]
    results.number(f"updates of the {model}", len(batches), num_epochs * num_batches)
    sizes = [len(batch) for batch in batches]
    results.exact(f"rows of each update of the {model}", sizes, [size] * len(sizes))
    epochs = [batches[i : i + num_batches] for i in range(0, len(batches), max(num_batches, 1))]
    trained = [row for epoch in epochs for row in sorted(chain.from_iterable(epoch))]
    wanted = list(range(num_rows)) * num_epochs
    results.exact(f"rows that train the {model}", trained, wanted)
    if set(sizes) <= {size}:
        order = np.random.default_rng([config.seed, step.record.facts.step - 1])
        drawn = order.permutation(num_rows).reshape(-1, size)
        planned = sorted(np.sort(drawn).tolist())
        is_odd = [sorted(epoch) != planned for epoch in epochs]
        results.exact(f"optimizer batches of the {model}", is_odd, [False] * num_epochs)


# --- steps on rows of the data


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
    micros = [micro for update in facts.updates for micro in step.micro_rows(update)]
    findings.exact(
        "rows that train the actor", sorted(chain.from_iterable(micros)), range(len(items))
    )
    sizes = Counter(items)
    whole = [sum(sizes[item] for item in {items[row] for row in micro}) for micro in micros]
    findings.exact("items in one micro batch", [len(micro) for micro in micros], whole)
    _check_micro_batches(step, facts.updates, "items", items)


def check_places(step: ReplayedStep, run: Path) -> None:
    """Compare the trained items with the items that options, seed and earlier results select."""
    name, samples = "rows of the data", step.record.samples
    fact = PLACES if step.is_reinforced else PLACE
    if fact not in samples.facts:
        step.results.skip(name, "their places are not recorded")
        return
    try:
        drawn = Order(run, step.record, step.config).rows_of_step()
    except UnknownOrderError as reason:
        step.results.skip(name, str(reason))
        return
    groups, first = np.unique(samples.group_ids, return_index=True)
    trained, (places, shares) = samples.facts[fact][first], map(np.array, zip(*drawn, strict=True))
    if not step.is_reinforced:  # a step sorts its items
        step.results.exact(name, np.sort(trained), np.sort(places))
    elif groups.max() >= len(places):
        step.results.exact(name, groups, np.arange(len(places)))
    else:
        step.results.exact(name, trained, places[groups])
        if step.config.prompt_importance:
            shares = shares[groups] * step.record.facts.num_items
            distance = np.abs(samples.facts[WEIGHTS][first] * shares - 1).max()
            step.results.add("importance weights", None, None, float(distance), 1e-9)


def items_of(step: ReplayedStep) -> list[int]:
    """Return the pair, ranking or answer of each row: [rows]."""
    items: list[int] = step.record.samples.group_ids.tolist()
    return items


def _check_micro_batches(
    step: ReplayedStep, updates: Sequence[UpdateFacts], what: str, items: Sequence[int]
) -> None:
    """Check that micro batches have the configured number of items, or tokens of several items.

    Args:
        step: Step under audit.
        updates: Updates of a model.
        what: Name of the items.
        items: Item of each row.
    """
    config, size = step.config, step.config.micro_train_batch_size
    bound, packs = config.micro_batch_tokens, config.packing_samples
    micros = [micro for update in updates for micro in step.micro_rows(update)]
    counts = [len({items[row] for row in micro}) for micro in micros]
    if bound is None and not packs:
        step.results.exact(f"{what} of micro batches", counts, [size] * len(counts))
        return
    sizes, name = set(Counter(items).values()), "tokens of micro batches"
    if bound is None and len(sizes) > 1:
        step.results.skip(name, "the longest ranking of the data bounds them")
        return
    longest = config.max_episode_tokens if step.is_reinforced else config.max_row_tokens
    limit = bound or size * longest * max(sizes)
    several = [micro for micro, n in zip(micros, counts, strict=True) if n > 1]
    most = max((_counted_tokens(step, micro) for micro in several), default=0)
    step.results.add(name, float(most), float(limit), max(0.0, most - limit), 0.0)


def _counted_tokens(step: ReplayedStep, micro: Sequence[int]) -> int:
    """Return the tokens of a micro batch of some rows, as its bound counts them."""
    lengths, config = step.rows.lengths[micro], step.config
    if not config.packing_samples:
        return len(micro) * int(lengths.max())
    if not step.is_reinforced:
        return int(lengths.sum())
    repeated = (_repeated_prompt(step, *pair) for pair in pairwise(micro))
    return int(lengths.sum()) - sum(map(config.uncounted_tokens, repeated))


def _repeated_prompt(step: ReplayedStep, before: int, row: int) -> int:
    """Return the tokens of a row's prompt if it is computed with that of the row before, or 0."""
    size = int(step.record.samples.prompt_lengths[row])
    prompt, other = (step.rows.ids[each][:size].tolist() for each in (row, before))
    is_enough = size >= MIN_SHARED_TOKENS and 8 * size >= int(step.rows.lengths[row])
    return size if prompt == other and is_enough else 0
