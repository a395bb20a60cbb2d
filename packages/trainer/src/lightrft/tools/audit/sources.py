"""Checks of a step's sources besides options: data rows, first weights, reward components."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence, Sized
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightrft.config import TrainConfig
from lightrft.config.files import FileError, file_sha256, lines_of, parse_object, read_object
from lightrft.config.parts.data import PromptOptions
from lightrft.config.parts.training import TrainingOptions
from lightrft.tools.audit.findings import Findings
from lightrft.tools.audit.models import FIRST, POLICY, SECOND, TRUNK, frozen_state
from lightrft.tools.audit.optimizers import (
    ADAM,
    DECOUPLED,
    configured_groups,
    learning_rate,
    stored_groups,
)
from lightrft.tools.audit.record import (
    COMPONENT,
    CONFIG,
    OptimizerFacts,
    RecordError,
    StepRecord,
    named,
)
from lightrft.tools.audit.replay import ReplayedStep

RUN_FILE = "run.json"
LINES = (".jsonl", ".ndjson")
# A tokenizer adds at most this many special tokens to a plain prompt.
SPECIAL_TOKENS = 8
# Rounding of a weight that is cast or merged with its adapter, relative to the tensor's largest.
CAST: Mapping[str, float] = {"float32": 2.0**-20, "bfloat16": 2.0**-7}


def planned_steps(run: Path, record: StepRecord, config: TrainConfig) -> tuple[int, int] | None:
    """Return fewest and most rollout steps of the whole run, by its options and data.

    A pass takes whole batches of prompts. Prompts of more than `prompt_max_len` tokens are dropped,
    and a prompt has at most as many tokens as bytes.

    Args:
        run: Folder of the run, with hashes of the data.
        record: Record of a step.
        config: Options of the step.

    Returns:
        None if unknown.
    """
    top = config.max_steps
    counted = None if record.facts.stage != "policy" else count_recorded_rows(run, config)
    if counted is None:
        return None if top is None else (1, top)
    world, batch = max(record.facts.world_size, 1), config.rollout_batch_size
    steps = [rows // world * world // batch * config.num_episodes for rows in counted]
    least, most = (each if top is None else min(each, top) for each in steps)
    return max(least, 1), most


def count_recorded_rows(run: Path, config: TrainConfig) -> tuple[int, int] | None:
    """Return rows that are surely short enough, and all rows; None if they cannot be counted."""
    lines = None if config.prompt_data_probs else recorded_lines(run, config.prompt_data)
    if lines is None:
        return None
    templates = (config.apply_chat_template, config.input_template, config.system_prompt)
    # Templates make prompts longer, and a range of pass rates leaves some out.
    is_plain = not any((*templates, config.prompt_pass_rate, config.has_episodes))
    most = min(config.prompt_max_len, _room(config)) - SPECIAL_TOKENS
    num_short = sum(_num_bytes(line, config) <= most for line in lines) if is_plain else 0
    return min(num_short, config.max_samples), min(len(lines), config.max_samples)


def recorded_lines(run: Path, names: str | None) -> list[bytes] | None:
    """Return the lines of files; None if they are no files of lines, or not those of the run."""
    paths = [Path(name) for name in (names or "").split(",")]
    is_read = all(path.suffix in LINES and path.is_file() for path in paths)
    if not is_read or not _is_unchanged(run, paths):
        return None
    return [line for path in paths for line in lines_of(path) if line.strip()]


def _is_unchanged(run: Path, paths: Sequence[Path]) -> bool:
    """Return whether no file differs from its hash in the run."""
    try:
        inputs = read_object(run / RUN_FILE).get("inputs")
    except FileError:
        return True
    noted = inputs if isinstance(inputs, dict) else {}
    seen = [(path, noted.get(str(path))) for path in paths]
    return all(
        not isinstance(each, dict) or each.get("sha256") == file_sha256(path) for path, each in seen
    )


def _room(config: TrainConfig) -> float:
    """Return how many tokens the model's context leaves for a prompt; 0 if unknown."""
    context = config.max_len
    if context is None and config.pretrain is not None:
        try:
            model = read_object(Path(config.pretrain) / "config.json")
        except FileError:
            return 0
        parts = (model, model.get("text_config"))
        names = ("max_position_embeddings", "n_positions")
        sizes = [part.get(name) for part in parts if isinstance(part, dict) for name in names]
        context = min((size for size in sizes if isinstance(size, int)), default=None)
    return math.inf if context is None else context - config.generate_max_len


def _num_bytes(line: bytes, config: PromptOptions) -> float:
    text = parse_object(line).get(config.input_key)
    return len(text.encode()) if isinstance(text, str) else math.inf


def check_sources(
    step: ReplayedStep, before: StepRecord | None, planned: tuple[int, int] | None
) -> None:
    """Compare the sources of a step of a configured run.

    Args:
        step: Step under audit.
        before: Record of the previous step; None without.
        planned: See `planned_steps`.
    """
    name, seen = "steps of the run", step.record.facts.num_planned
    if planned is None or seen == 0:
        why = "its data is no file of lines that is still there, and has no max_steps"
        step.results.skip(name, why)
    else:
        least, most = planned
        off = max(least - seen, seen - most, 0)
        step.results.add(name, float(seen), float(most), float(off), 0.0)
    check_schedules(step, before)
    _check_components(step)
    _check_first_weights(step)


def check_schedules(step: ReplayedStep, before: StepRecord | None) -> None:
    """Check that schedules continue from the previous step, unless the run's length changed."""
    results, record, counts = step.results, step.record, step.decided.counts
    for model, facts in record.facts.optimizers.items():
        name = f"change of the schedule, {model}"
        if record.facts.step == 1:
            results.number(name, facts.schedule_changed_at, -1)
        elif before is not None:
            changed_at, gap = _expected_change(record, before, model, counts[model])
            results.number(name, facts.schedule_changed_at, changed_at)
            results.number(f"size of it, {model}", facts.schedule_gap, gap, floor=1e-9)
        elif facts.schedule_changed_at >= 0:
            results.skip(name, "the step before is not recorded; the run's is taken")


def _expected_change(
    record: StepRecord, before: StepRecord, model: str, count: int | None
) -> tuple[int, float]:
    """Return when the plan of the learning rate last changed, and by what share of the peak."""
    new, old = record.facts.optimizers[model], before.facts.optimizers[model]
    new_config, old_config = (TrainConfig.load(each.folder / CONFIG) for each in (record, before))
    if _plan(new, new_config) == _plan(old, old_config) or count is None:
        return old.schedule_changed_at, old.schedule_gap
    unchanged = replace(new, schedule_changed_at=-1)
    former = learning_rate(1.0, count, old.schedule_steps, old, old_config)
    return count, former - learning_rate(1.0, count, new.schedule_steps, unchanged, new_config)


def _plan(facts: OptimizerFacts, config: TrainingOptions) -> tuple[object, ...]:
    schedule = (config.lr_scheduler, config.lr_warmup_ratio, config.min_lr_ratio)
    return facts.schedule_steps, *schedule


def _check_first_weights(step: ReplayedStep) -> None:
    """Check that untrained weights are those of the model in the options.

    Value and score heads are initialised at random.
    """
    config = step.config
    for model, scorer in {"actor": step.policy, "critic": step.critic}.items():
        weights = _untrained(step, model) if model in step.states else {}
        if not weights or scorer is None:
            continue
        name, is_critic = f"first weights of the {model}", model == "critic"
        critic_path = config.critic_pretrain if is_critic else None
        path = Path(critic_path if isinstance(critic_path, str) else str(config.pretrain))
        try:
            first = frozen_state(path, TRUNK if is_critic else POLICY)
        except RecordError:
            step.results.skip(name, f"no model in {path}")
            continue
        _compare(step, name, scorer.merged(weights), first)


def _untrained(step: ReplayedStep, model: str) -> dict[str, Tensor]:
    """Return recorded weights that no update has changed: all before the first.

    New adapters have no effect then, so they are kept, unless the run starts from adapters.
    """
    config, number = step.config, step.record.facts.step
    is_frozen = model == "actor" and number <= config.freezing_actor_steps + 1
    trained = set() if number == 1 or is_frozen else set(step.trained_names(model))
    left_out = () if not trained and config.lora_path is None else (FIRST, SECOND)
    weights = named(step.states[model], "weight", "master")
    return {n: v for n, v in weights.items() if n not in trained and not n.endswith(left_out)}


def _compare(
    step: ReplayedStep, name: str, weights: Mapping[str, Tensor], first: Mapping[str, Tensor]
) -> None:
    """Compare common weights, each relative to its largest entry."""
    shares = {"": 0.0}
    for each in sorted(weights.keys() & first.keys()):
        one, other = weights[each], first[each]
        shares[each] = math.inf
        if one.shape == other.shape:
            share = (one - other).abs().max() / other.abs().max().clamp(min=1e-30)
            shares[each] = float(share.nan_to_num(math.inf, math.inf))
    odd = max(shares, key=shares.__getitem__)
    worst, limit = shares[odd], CAST[step.record.facts.compute_dtype]
    note = f"such as {odd}" if worst > limit else ""
    step.results.add(name, None, None, worst, limit, note)


def _check_components(step: ReplayedStep) -> None:
    """Check that rewards are the weighted sums of their functions' values."""
    results, samples, config = step.results, step.record.samples, step.config
    if not config.reward_fn:
        return
    name = "rewards from their components"
    others = (config.remote_rm_url, config.reward_pretrain, config.reward_recipe)
    if any(others) or config.has_episodes:
        results.skip(name, "parts of them have no weight among the options")
        return
    parts: list[np.ndarray] = []
    for component in _component_names(config.reward_fn):
        values = samples.facts.get(f"{COMPONENT}{component}")
        if values is None:
            results.skip(name, f"no component is called {component}")
            return
        parts.append(values.astype(np.float64))
    weights = np.array(config.reward_weights or np.ones(len(parts)))
    terms, is_scored = weights[:, None] * np.stack(parts), ~samples.is_failed
    recomputed, scale = terms.sum(axis=0)[is_scored], np.abs(terms).sum(axis=0)[is_scored]
    distance = np.abs(samples.rewards[is_scored] - recomputed) / np.maximum(scale, 1.0)
    totals = float(samples.rewards[is_scored].sum()), float(recomputed.sum())
    worst = float(np.where(np.isnan(distance), np.inf, distance).max(initial=0.0))
    results.add(name, *totals, worst, results.tolerances["number"])


def _component_names(functions: Sequence[str]) -> list[str]:
    """Return the component of each reward function; a repeated name is NAME/NAME."""
    names: list[str] = []
    for spelling in functions:
        name = spelling.rpartition(":")[2]
        names.append(f"{name}/{name}" if name in names else name)
    return names


def check_optimizers(step: ReplayedStep) -> None:
    """Compare classes, numbers, names, counters and schedules of optimizers with the options."""
    results, config, decided = step.results, step.config, step.decided
    for model, facts in step.record.facts.optimizers.items():
        count, state = decided.counts[model], step.states[model]
        results.number(f"optimizer of the {model} is AdamW", facts.kind in DECOUPLED, True)
        stored, trained = stored_groups(facts), set(step.trained_names(model))
        weights = named(state, "weight")
        wanted = configured_groups(trained, weights, config)
        both = sorted(stored.keys() & wanted.keys())
        # Flattened parameters have the numbers of the first group, that of matrices.
        matrices = [name for name in both if weights[name].dim() >= 2]
        for key, names in (("eps", both), ("betas", both), ("weight_decay", matrices)):
            values = ([getattr(each[name], key) for name in names] for each in (stored, wanted))
            results.exact(f"{key} of the {model}", *values)
        odd = stored.keys() ^ trained
        _count_odd(results, f"trained weights of the {model}", stored, trained, odd)
        num_steps = decided.schedule_steps[model]
        if num_steps and facts.schedule_steps:
            results.number(f"schedule length, {model}", facts.schedule_steps, num_steps)
        if count is None:
            results.skip(f"updates of the {model} before", "the run does not say how many it took")
            continue
        results.number(f"schedule position, {model}", facts.schedule_position, count)
        counters = [float(value.max()) for value in named(state, "step").values()]
        if counters or (facts.kind in ADAM and count and not named(state, "exp_avg")):
            results.number(f"Adam's steps, {model}", max(counters, default=0.0), count)


def check_link(step: ReplayedStep, before: StepRecord) -> None:
    """Check that a step starts with the final weights and optimizer states of the previous one."""
    for model, state in step.states.items():
        after = before.state("after", model)
        common = state.keys() & after.keys()
        odd = {
            n for n in common if not torch.equal(state[n], after[n])
        } | state.keys() ^ after.keys()
        _count_odd(step.results, f"states before, {model}", state, after, odd)


def _count_odd(results: Findings, name: str, run: Sized, own: Sized, odd: Collection[str]) -> None:
    """Add a comparison of names; none may be odd."""
    note = f"such as {min(odd)}" if odd else ""
    results.add(name, float(len(run)), float(len(own)), float(len(odd)), 0.0, note)
