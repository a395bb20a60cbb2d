from dataclasses import replace

import numpy as np
import torch
from tests.update_inputs import sample_table

from lightrft.experience.minibatches import micro_slices
from lightrft.records.batch import (
    ExperienceBatch,
    PolicyOutputs,
    collate,
    join_micro_batches,
    select_experience,
    select_rollouts,
)


def table(prompts, responses, *, masked=None):
    lengths = [len(response) for response in responses]
    flat = [t for p, r in zip(prompts, responses, strict=True) for t in (*p, *r)]
    return sample_table(
        lengths,
        prompt_lengths=np.array([len(prompt) for prompt in prompts]),
        group_ids=np.arange(len(prompts)) // 2,
        token_ids=np.array(flat, dtype=np.int64),
        rollout_logprobs=-np.arange(1, sum(lengths) + 1, dtype=np.float32),
        rewards=np.arange(len(prompts)),
        is_masked=np.zeros(len(prompts), bool) if masked is None else np.array(masked),
    )


def collated(samples):
    return collate(samples, temperature=0.7, device=torch.device("cpu"))


def test_rows_are_right_padded_and_the_mask_covers_the_sampled_tokens():
    batch = collated(table([(1, 2), (3,)], [(4, 5, 6), (7,)]))
    assert batch.token_ids.tolist() == [[1, 2, 4, 5, 6], [3, 7, 0, 0, 0]]
    assert batch.attention_mask.int().tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert batch.response_mask.int().tolist() == [[0, 0, 1, 1, 1], [0, 1, 0, 0, 0]]
    assert batch.rollout_logprobs.tolist() == [[0, 0, -1, -2, -3], [0, -4, 0, 0, 0]]
    assert batch.temperature == 0.7


def test_a_cut_row_is_excluded_where_it_is_asked():
    samples = table([(1,), (2,)], [(3, 4), (5,)])
    samples = replace(samples, is_truncated=np.array([True, False]))
    for masks, tokens in ((False, [2, 1]), (True, [0, 1])):
        cpu = torch.device("cpu")
        batch = collate(samples, temperature=1.0, device=cpu, masks_truncated=masks)
        assert batch.response_mask.sum(dim=1).tolist() == tokens
        assert batch.compared_mask.sum(dim=1).tolist() == tokens
        assert batch.rewards.tolist() == [0.0, 1.0]


def test_selected_rows_lose_common_padding():
    batch = collated(table([(1, 2), (3,), (4,)], [(5, 6, 7), (8,), (9, 9)]))
    part = select_rollouts(batch, slice(1, 3))
    assert part.token_ids.tolist() == [[3, 8, 0], [4, 9, 9]]
    assert part.sample_ids.tolist() == [1, 2]


def test_selecting_and_joining_gives_the_whole_back():
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 6, 7)
    samples = table([(1, 2)] * 7, [tuple(rng.integers(3, 9, n)) for n in lengths])
    batch = collated(samples)
    values = torch.where(batch.response_mask, torch.randn(batch.token_ids.shape), 0.0)
    experience = ExperienceBatch(
        batch, PolicyOutputs(values, None, values, None), advantages=values, returns=values
    )
    parts = [select_experience(experience, rows) for rows in micro_slices(0, 7, 3)]
    assert [len(part.advantages) for part in parts] == [3, 3, 1]
    width = values.shape[1]
    assert torch.equal(join_micro_batches([p.advantages for p in parts], width), values)
    assert torch.equal(join_micro_batches([p.outputs.values for p in parts], width), values)
    assert parts[0].outputs.ref_logprobs is None
    swapped = replace(experience, advantages=values.flip(0))
    assert not torch.equal(select_experience(swapped, slice(0, 3)).advantages, parts[0].advantages)
