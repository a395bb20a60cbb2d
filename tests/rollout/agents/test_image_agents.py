"""Agents that show images, answered by a real engine and scored by the trainer's actor."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.experience.test_ledger_gate import check
from tests.models.vision.tiny_world import tiny
from tests.rollout.agents.agent_stage import options_of
from tests.rollout.agents.image_agents import address_of, said
from tests.rollout.agents.test_agents import check_exact
from tests.rollout.image_environments import squares
from tests.rollout.test_image_turns import LOGPROB, PRESETS, error

from lightrft.config import ConfigError, TrainConfig
from lightrft.datasets import load_prompts
from lightrft.datasets.media import TextModality, VisionPrompts
from lightrft.engines.hf.engine import HFEngine
from lightrft.engines.media.sources import as_image
from lightrft.engines.types import EngineConfig
from lightrft.records.media import encode_row
from lightrft.rewards.build import CombinedReward
from lightrft.rewards.types import RewardError
from lightrft.rollout.agents import agents as agents_module, conversations, episodes
from lightrft.rollout.agents.agents import Agents
from lightrft.rollout.agents.conversations import CalledTurn, Conversations
from lightrft.rollout.agents.messages import Message
from lightrft.rollout.sampler import training_params
from lightrft.rollout.source import SampleRequests, SourceParts
from lightrft.strategy import get_fake_strategy

CASES = Path(__file__).with_name("image_agents.py")


class Stage:
    """Two rows, of which one has an image, and an agent that shows more."""

    def __init__(self, folder, preset, agent="album", *, rows=None, shift="none", **options):
        squares(0, (84, 84)).save(folder / "0.png")
        rows = rows or [
            {"input": "<image>Look.", "images": ["0.png"], "number": 1},
            {"input": "And without?", "number": 2},
        ]
        given = {"generate_max_len": 24, "prompt_max_len": 900, "max_turns": 3, **options}
        given |= {"engine_type": "hf", "agent": f"{CASES}:{agent}"}
        self.config = TrainConfig(**options_of(len(rows), **given))
        self.model, self.encoder = tiny(preset)
        self.tokenizer = self.encoder.processor.tokenizer
        modality = VisionPrompts(self.encoder)
        self.agents = Agents(self.config, self.tokenizer, folder=folder, modality=modality)
        path = folder / "rows.jsonl"
        path.write_text("\n".join(json.dumps({**row, "shift": str(shift)}) for row in rows))
        self.prompts = load_prompts(path, self.agents.prompt_tokenizer, self.config).prompts
        self.strategy = get_fake_strategy(self.config)
        self.strategy.session.last_weight_sync = SimpleNamespace(engine_hash=17)
        self.engine = HFEngine(EngineConfig("hf", ""), module=self.model)
        self.strategy.inference_engine = self.engine
        self.actor, self.requests = None, []
        generate = self.engine.generate

        def noted(requests, *others, **named):
            self.requests += requests
            return generate(requests, *others, **named)

        self.engine.generate = noted

    def sample(self):
        # Random models seldom end: here bytes below 90 do.
        params = replace(training_params(self.config), stop_token_ids=tuple(range(90)))
        reward, session = CombinedReward((), ()), self.strategy.session
        parts = SourceParts(session, self.config, self.tokenizer, reward, encoder=self.encoder)
        num = len(self.prompts)
        try:
            source = self.agents.source(parts)
            return source.sample(SampleRequests(self.prompts, range(num), num, params, step=1))
        finally:
            self.agents.close()


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Of each preset, the stage and what it sampled."""
    found = {}

    def of(preset):
        if preset not in found:
            stage = Stage(tmp_path_factory.mktemp("stage"), preset)
            found[preset] = stage, stage.sample()
        return found[preset]

    return of


def pixels_of(images):
    return [image.decode().tobytes() for image in images]


def squares_source(number, size):
    return as_image(squares(number, size), name="another", folder=Path())


def expected_images(rollout):
    """Of the row that went on, or of the one with other pixels in place of the second picture."""
    number = 10 * (rollout.group_id + 1)
    pictures = [squares(0 if rollout.group_id == 0 else number, (84, 84))]
    if len(rollout.images) == 2:
        pictures += [squares(number + 5, (84, 56))]
    else:
        pictures += [squares(number + 1, (84, 56)), squares(number + 2), squares(number + 3)]
    return [picture.tobytes() for picture in pictures]


@pytest.mark.parametrize("preset", PRESETS)
def test_images_are_shown_once_and_other_pixels_are_another_branch(preset, played):
    stage, samples = played(preset)
    check_exact(stage, samples)
    rollouts = [item.rollout for item in samples.scored]
    assert sorted(len(rollout.images) for rollout in rollouts) == [2] * 4 + [4] * 4
    mark = stage.model.config.image_token_id
    for rollout in rollouts:
        assert [i.decode().tobytes() for i in rollout.images] == expected_images(rollout)
        assert mark not in rollout.completion.sampled_token_ids
        for segment in rollout.segments:
            (request,) = (r for r in stage.requests if r.request_id == segment.request_id)
            assert request.encoded.token_ids == request.prompt_token_ids
            assert rollout.token_ids[: len(request.prompt_token_ids)] == request.prompt_token_ids
            shown = request.encoded.media.images
            assert shown == rollout.images[: len(shown)]
        # The first message is in no suffix, and the suffixes begin where they belong.
        for later in rollout.later[1:]:
            assert not {"Look", "without"} & set(later.text.split())
            assert later.num_skipped == 1
        assert "<image> this?" in stage.tokenizer.decode(rollout.token_ids)  # as text
    numbers = [segment.request_id for rollout in rollouts for segment in rollout.segments]
    assert len(set(numbers)) == len(numbers) == len(stage.requests) == 16


@pytest.mark.parametrize("preset", PRESETS)
def test_the_engine_scores_what_an_agent_showed_as_the_trainer(preset, played):
    stage, samples = played(preset)
    rollouts = [item.rollout for item in samples.scored]
    media = tuple(encode_row(rollout, stage.encoder) for rollout in rollouts)
    assert error(stage, rollouts, media) < LOGPROB
    assert error(stage, rollouts, media, is_packed=True) < LOGPROB
    # The comparison sees the images of a branch with the ids of the row that it leaves.
    row = next(r for r in rollouts if len(r.images) == 2)
    other = replace(row.later[-1], images=(squares_source(9, (84, 56)),))
    changed = replace(row, later=(*row.later[:-1], other))
    assert error(stage, [row], (encode_row(changed, stage.encoder),)) > 1e-3
