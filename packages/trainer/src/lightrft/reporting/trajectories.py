"""Samples of a step token by token, for analysis by programs."""

from __future__ import annotations

import base64
import io
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from lightrft.config.printable import printable
from lightrft.records.rollout import Rollout, ScoredRollout
from lightrft.records.table import BRANCH_STEP
from lightrft.reporting.loggers import JsonLinesFile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from lightrft.datasets.prompt_sampler import GroupResult
    from lightrft.experience.maker import StepExperience


# Limit of a tool's answer in a line about a sample; the journal has all of it.
MAX_ANSWER_CHARACTERS = 4000
# Limit of an episode's branches in such a line.
MAX_BRANCHES = 16
# Longest side in pixels of a row's picture, and the limit of pictures of a row.
THUMBNAIL_SIDE, MAX_THUMBNAILS = 96, 4


class TrajectoryLog(JsonLinesFile):
    """Log of samples of each step in a JSONL file, with one value per response token.

    Each line has step, sample_id, group_id, prompt, response, reward (as the estimator saw it),
    components, truncated, masked, weights_version, token_ids, tokens (their text), sampled_spans
    ([start, stop) of the tokens that were sampled; the others are observations), logprobs (of
    the trainer before the update), rollout_logprobs (of the engine), advantages and returns. Where
    the step has them, it also has ref_logprobs, teacher_logprobs, values, entropy and log_kept_mass
    (to be subtracted from logprobs before they are compared with the engine's).

    Args:
        path: Path of the file.
        num_samples: Samples of one step: those with the lowest ids that the first rank trains on.
        every: Steps between two steps that are written; the first one is written, too.
        has_rewards: Whether something scores the responses.
    """

    def __init__(
        self, path: Path, *, num_samples: int = 10, every: int = 1, has_rewards: bool = True
    ) -> None:
        super().__init__(path)
        self._num_samples, self._has_rewards = num_samples, has_rewards
        self._every = max(1, every)

    def is_scheduled(self, step: int) -> bool:
        """Return whether a step is written."""
        return step == 1 or step % self._every == 0

    def log(self, step: int, experience: StepExperience, decoder: PreTrainedTokenizerBase) -> None:
        """Write the samples of a step."""
        if not self.is_scheduled(step):
            return
        ids = experience.batch.rollouts.sample_ids.tolist()
        order = sorted(range(len(ids)), key=lambda row: ids[row])
        for row in order[: self._num_samples]:
            line = _as_line(step, experience, row, decoder)
            if not self._has_rewards:
                del line["reward"]
            self.append(line)


def _as_line(
    step: int, experience: StepExperience, row: int, decoder: PreTrainedTokenizerBase
) -> dict[str, object]:
    batch, table = experience.batch, experience.table
    rollouts, outputs = batch.rollouts, batch.outputs
    sample_id = int(rollouts.sample_ids[row])
    where = int(np.searchsorted(table.sample_ids, sample_id))
    start, stop = int(table.prompt_lengths[where]), int(table.lengths[where])
    token_ids = rollouts.token_ids[row, :stop].tolist()

    def values(tensor: Tensor | None) -> list[float] | None:
        return None if tensor is None else [round(x, 6) for x in tensor[row, start:stop].tolist()]

    per_token = {
        "logprobs": values(outputs.old_logprobs),
        "rollout_logprobs": values(rollouts.rollout_logprobs),
        "log_kept_mass": values(outputs.log_kept_mass),
        "ref_logprobs": values(outputs.ref_logprobs),
        "teacher_logprobs": values(outputs.teacher_logprobs),
        "entropy": values(outputs.entropy),
        "values": values(outputs.values),
        "advantages": values(batch.advantages),
        "returns": values(batch.returns),
    }
    is_sampled = experience.rows.take(np.array([row])).is_sampled
    components = zip(table.component_names, table.components[where].tolist(), strict=True)
    return {
        "step": step,
        "sample_id": sample_id,
        "group_id": int(table.group_ids[where]),
        "prompt": decoder.decode(token_ids[:start], skip_special_tokens=False),
        "response": decoder.decode(token_ids[start:], skip_special_tokens=False),
        "reward": float(experience.rewards.rewards[where]),
        "components": {name: value for name, value in components if not np.isnan(value)},
        "truncated": bool(table.is_truncated[where]),
        "masked": bool(table.is_masked[where]),
        "weights_version": int(table.weights_versions[where]),
        "token_ids": token_ids[start:],
        "tokens": [decoder.decode([i], skip_special_tokens=False) for i in token_ids[start:]],
        "sampled_spans": spans(is_sampled.tolist()),
        **{name: numbers for name, numbers in per_token.items() if numbers is not None},
    }


def spans(flags: Sequence[bool]) -> list[tuple[int, int]]:
    """Return [start, stop) of each run of True."""
    edges = np.flatnonzero(np.diff([0, *map(int, flags), 0])).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


class ShownSamples:
    """Console output of a prompt of a step with its best and its worst response.

    Args:
        write: Callback that takes a line.
        every: Steps between two that are shown; 0 shows none.
        has_rewards: Whether something scores the responses.
    """

    def __init__(self, write: Callable[[str], None], *, every: int, has_rewards: bool) -> None:
        self._write, self._every, self._has_rewards = write, every, has_rewards

    def log(self, step: int, experience: StepExperience, decoder: PreTrainedTokenizerBase) -> None:
        """Show samples of a prompt that this rank trains on, if the step is due."""
        if not self._every or step % self._every:
            return
        rollouts, table = experience.batch.rollouts, experience.table
        rows = [
            (int(np.searchsorted(table.sample_ids, sample_id)), row)
            for row, sample_id in enumerate(rollouts.sample_ids.tolist())
        ]
        first = table.group_ids[min(rows)[0]]
        group = [each for each in rows if table.group_ids[each[0]] == first]
        group.sort(key=lambda each: (-table.rewards[each[0]], each))
        for number, (where, row) in enumerate(dict.fromkeys((group[0], group[-1]))):
            start, stop = int(table.prompt_lengths[where]), int(table.lengths[where])
            tokens = rollouts.token_ids[row, :stop].tolist()
            if number == 0:
                prompt = decoder.decode(tokens[:start], skip_special_tokens=True)
                self._write(f"sample of step {step}: {shortened(prompt, keep_end=True)}")
            what = f"reward {table.rewards[where]:.3f}" if self._has_rewards else "response"
            response = decoder.decode(tokens[start:], skip_special_tokens=True)
            self._write(f"  {what}: {shortened(response)}")


def shortened(text: str, *, keep_end: bool = False, limit: int = 160) -> str:
    """Return the text on one line, printable, and cut in front or behind if it is long."""
    words = " ".join(text.split())
    if len(words) <= limit:
        return printable(words)
    return printable(f"... {words[-limit:]}" if keep_end else f"{words[:limit]} ...")


class SampleLog(JsonLinesFile):
    """Log of the first samples of each step in a JSONL file.

    Each line has step, prompt_id, prompt, response, label, reward, components, response_length,
    truncated. Rows with images or videos also have images: small pictures as data addresses. With
    an environment or tools, turns has what was said, and each call's name, arguments, outcome and
    answer. An agent's episode with further rows has branches. Each branch has the number of the
    row that it leaves (0 is the first one), the count of that row's turns in its context, and
    what was said.

    Args:
        path: Path of the file.
        num_samples: Samples of one step.
        has_rewards: Whether something scores the responses.
    """

    def __init__(self, path: Path, *, num_samples: int = 8, has_rewards: bool = True) -> None:
        super().__init__(path)
        self._num_samples, self._has_rewards = num_samples, has_rewards

    def log(self, step: int, scored: Sequence[ScoredRollout]) -> None:
        """Write the samples of a step."""
        pictures: dict[tuple[int, int], list[str]] = {}
        episodes: dict[int, list[Rollout]] = {}
        for item in scored:
            episodes.setdefault(item.rollout.sample_id % BRANCH_STEP, []).append(item.rollout)
        firsts = [item for item in scored if item.rollout.sample_id < BRANCH_STEP]
        for item in firsts[: self._num_samples]:
            rollout = item.rollout
            # Samples of a prompt share its images, unless an environment may show others.
            key = (rollout.group_id, rollout.sample_id if rollout.conversation else -1)
            if key not in pictures:
                pictures[key] = thumbnails(rollout)
            self.append(
                {
                    "step": step,
                    "prompt_id": rollout.prompt.id,
                    "sample_id": rollout.sample_id,
                    "prompt": rollout.prompt.text,
                    "response": rollout.response_text,
                    "label": rollout.prompt.label,
                    **({"reward": item.reward} if self._has_rewards else {}),
                    "components": dict(item.components),
                    "response_length": len(rollout.completion.sampled_token_ids),
                    "truncated": rollout.completion.finish_reason == "length",
                    **({"images": images} if (images := pictures[key]) else {}),
                    **_turns(rollout),
                    **_branches(episodes[rollout.sample_id]),
                }
            )


def _turns(rollout: Rollout) -> dict[str, object]:
    conversation = rollout.conversation
    if conversation is None:
        return {}
    pairs = zip_longest(conversation.turns, conversation.answers, fillvalue=())
    return {
        "turns": [
            {
                "said": said,
                "calls": [
                    {
                        "name": call.name,
                        "arguments": dict(call.arguments),
                        "outcome": call.outcome,
                        "answer": call.text[:MAX_ANSWER_CHARACTERS],
                    }
                    for call in answers
                ],
            }
            for said, answers in pairs
        ]
    }


def _branches(rows: Sequence[Rollout]) -> dict[str, object]:
    """Return where each further row of an episode leaves an earlier one, and what it said."""
    branches = []
    ids = [np.array(row.token_ids) for row in rows[: 1 + MAX_BRANCHES]]
    for number, row in enumerate(rows[1 : len(ids)], 1):
        context = np.array(row.completion.prompt_token_ids)
        shared = [_num_shared(context, other) for other in ids[:number]]
        parent = int(np.argmax(shared))
        before = len(rows[parent].completion.prompt_token_ids)
        ends = [before + stop for _, stop in spans(rows[parent].completion.is_sampled)]
        said = () if row.conversation is None else row.conversation.turns
        num_turns = sum(end <= shared[parent] for end in ends)
        branches.append({"of": parent, "after": num_turns, "said": list(said)})
    return {"branches": branches} if branches else {}


def _num_shared(first: np.ndarray, second: np.ndarray) -> int:
    """Return the number of tokens with which both begin."""
    size = min(len(first), len(second))
    differs = np.flatnonzero(first[:size] != second[:size])
    return int(differs[0]) if len(differs) else size


def thumbnails(rollout: Rollout) -> list[str]:
    """Return data addresses of a row's first images, and of first frames of its prompt's videos."""
    showing = [image.decode for image in rollout.images]
    showing += [video.poster for video in rollout.prompt.media.videos]
    addresses = []
    for show in showing[:MAX_THUMBNAILS]:
        picture = show()
        picture.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
        buffer = io.BytesIO()
        picture.save(buffer, "JPEG", quality=80)
        addresses.append(f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}")
    return addresses


class DrawLog(JsonLinesFile):
    """Log of the drawn prompts, a line a step.

    Args:
        path: Path of the file.
        num_prompts: Prompts of the run.
    """

    def __init__(self, path: Path, num_prompts: int) -> None:
        super().__init__(path)
        self._num_prompts = num_prompts

    def log(self, step: int, groups: Sequence[GroupResult]) -> None:
        """Write the groups of a step, also those that are not trained on."""
        self.append(
            {
                "step": step,
                "num_prompts": self._num_prompts,
                "rows": [each.place for each in groups],
                "accuracies": [
                    fmean(each.accuracies) if each.accuracies else None for each in groups
                ],
                "without_signal": [each.has_no_signal for each in groups],
            }
        )
