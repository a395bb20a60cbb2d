"""Dynamic sampling and FIRE in a whole step."""

import numpy as np
import pytest
import torch
from tests.runs import TextReward

from lightrft.engines.types import SamplingParams
from lightrft.rewards.types import RewardResult
from lightrft.rollout.fire import generate_fire
from lightrft.rollout.single_turn import build_requests


class LongPrompts(TextReward):
    """Responses differ in accuracy only for prompts that end in an even number of letters."""

    def score(self, prompts, responses, labels, columns):
        return [
            RewardResult(float(i % 2) if len(prompt) % 2 == 0 else 1.0)
            for i, prompt in enumerate(prompts)
        ]


def test_constant_groups_are_replaced_by_further_prompts(build_world):
    world = build_world(
        reward=LongPrompts(None),
        num_prompts=16,
        dynamic_sampling=True,
        overlong_buffer=True,
        overlong_buffer_len=4,
    )
    world.trainer.make_experience()
    table = world.experience.table
    for group in np.unique(table.group_ids):
        assert set(table.accuracies[table.group_ids == group]) == {0.0, 1.0}
    assert len(np.unique(table.group_ids)) == 4
    metrics = world.trainer.ppo_train(1)
    assert metrics["dynamic/num_gen_batches"] > 1
    assert metrics["dynamic/filler_share"] == 0
    sampled = metrics["dynamic/num_groups"]
    assert sampled == 4 * metrics["dynamic/num_gen_batches"]
    assert metrics["dynamic/constant_share"] + metrics["dynamic/surplus_share"] == pytest.approx(
        1 - 4 / sampled
    )
    # The next step's random numbers and prompts begin after all that were used.
    assert world.trainer.stage.memory.num_requests == sampled
    assert world.trainer.state.num_steps == 1


def test_a_solved_task_is_no_reason_to_fail_and_moves_nothing(build_world, capsys):
    world = build_world(
        reward=TextReward(lambda _: 1),
        num_prompts=16,
        dynamic_sampling=True,
        max_num_gen_batches=2,
        max_steps=2,
    )
    before = world.weights()
    result = world.trainer.fit()
    assert result.num_steps == 2
    assert result.last_metrics["dynamic/skipped_steps"] == 1
    assert result.last_metrics["dynamic/num_gen_batches"] == 2
    assert world.is_unmoved(before)
    assert "no update in step 1" in capsys.readouterr().out


def fire(world, *, max_tokens, first, n=3, temperature=0.7):
    requests = build_requests(world.prompts[:2], [10, 11])
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, n=n, seed=5)
    completions = generate_fire(
        world.strategy.session, params, requests, first_token_temperature=first
    )
    assert [(c.request_id, c.sample_index) for c in completions] == [
        (r, i) for r in (10, 11) for i in range(n)
    ]
    return completions


def law(world, completion, position, temperature):
    """log_softmax of the model for one response token."""
    model = world.actor.model
    ids = [*completion.prompt_token_ids, *completion.output_token_ids[:position]]
    with torch.no_grad():
        hidden = model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
        logits = torch.nn.functional.linear(hidden, model.get_output_embeddings().weight)
    logprobs = (logits / temperature).log_softmax(-1)
    return float(logprobs[completion.output_token_ids[position]])


def test_every_fire_logprob_follows_the_law_its_token_was_drawn_from(build_world):
    world = build_world()
    for completion in fire(world, max_tokens=4, first=5.0):
        for position, value in enumerate(completion.output_logprobs):
            temperature = 5.0 if position == 0 else 0.7
            assert value == pytest.approx(law(world, completion, position, temperature), abs=1e-4)
        assert len(completion.prompt_token_ids) == len(
            world.prompts[completion.request_id - 10].token_ids
        )


def test_fire_with_one_token_makes_one_call(build_world):
    world = build_world()
    for completion in fire(world, max_tokens=1, first=5.0):
        assert len(completion.output_token_ids) == 1
        assert completion.finish_reason in ("length", "stop")


def test_an_end_as_first_token_ends_the_response(build_world, tokenizer):
    world = build_world()
    model = world.actor.model
    weight = model.get_output_embeddings().weight
    with torch.no_grad():  # every other request ends at once
        weight[tokenizer.eos_token_id] = weight.mean(0) + 0.5
    world.strategy.update_engine_weights(world.trainer.actor)
    found = fire(world, max_tokens=5, first=1.0, n=16, temperature=1.0)
    ended = [c for c in found if c.output_token_ids[0] == tokenizer.eos_token_id]
    assert all(len(c.output_token_ids) == 1 and c.finish_reason == "stop" for c in ended)
    others = [c for c in found if c.output_token_ids[0] != tokenizer.eos_token_id]
    assert all(len(c.output_token_ids) > 1 for c in others)
    assert others


def test_fire_changes_the_first_token_and_is_trained_on(build_world):
    plain, hot = build_world(), build_world(use_fire=True, first_token_temperature=50.0)
    first = []
    for world in (plain, hot):
        batch = world.trainer.make_experience()
        mask, starts = batch.rollouts.response_mask, batch.rollouts.response_mask.int().argmax(1)
        first.append(batch.rollouts.token_ids.gather(1, starts[:, None]))
        compared = batch.rollouts.compared_mask
        assert int(compared.sum()) == int(mask.sum()) - (len(mask) if world is hot else 0)
        metrics = world.trainer.ppo_train(1)
        assert metrics["logprob_diff_max"] < 1e-4
    assert not torch.equal(*first)


def test_fire_with_a_correction_weighs_the_first_token(build_world):
    world = build_world(
        use_fire=True,
        first_token_temperature=0.05,
        off_policy_correction="tis",
        correction_high=1e6,
    )
    metrics = world.step()
    assert metrics["correction_raw_weight"] < 0.99  # drawn more often than the policy would
