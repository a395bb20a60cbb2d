"""Episodes with an image in the prompt, in what `reset` says and in each answer, sampled by a
real engine and scored by the trainer's actor."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.models.vision.tiny_world import tiny
from tests.rollout.image_environments import squares
from tests.rollout.image_stage import PRESETS, ROWS, ImageStage, error
from tests.rollout.stages import check_rows, options_of, pool_of

from lightrft.config import ConfigError, TrainConfig
from lightrft.datasets.media import VisionPrompts
from lightrft.engines.media.inputs import axes_of_rows
from lightrft.records.media import MediaSources, encode_row, pack_sources, unpack_sources
from lightrft.rewards.types import RewardError
from lightrft.rollout.agents.agents import Agents
from lightrft.rollout.environments import specs
from lightrft.rollout.environments.call_formats import ToolCall
from lightrft.rollout.environments.environments import Environments
from lightrft.rollout.ledger_records import take_evidence
from lightrft.rollout.source import SourceParts

CASES = Path(__file__).with_name("image_environments.py")


class Stage(ImageStage):
    """Episodes of up to three turns."""

    def __init__(self, folder, preset, *, environment=f"{CASES}:Album", columns=(), **options):
        super().__init__(preset)
        options = {"generate_max_len": 24, "prompt_max_len": 400, "max_turns": 3, **options}
        options |= {"environment": environment, "engine_type": "hf"}
        self.config = TrainConfig(**options_of(2, **options))
        self.player = Environments(
            self.config,
            self.tokenizer,
            has_system=True,
            folder=folder,
            pool=pool_of(self.config, reads_images=True),
            modality=self.modality,
        )
        self.set_rows(folder, ROWS, dict(columns))

    def sample(self):
        source = self.player.source(SourceParts(self.strategy.session, self.config, None, None))
        return source.rollouts(self.asked(), lambda group: None)


@pytest.fixture(scope="module")
def calls():
    """Random models write no calls: here every turn is one."""
    with pytest.MonkeyPatch.context() as patched:
        found = [ToolCall("turn")]
        patched.setattr(specs, "choose_parser", lambda *given: lambda text, *others: found)
        yield


@pytest.fixture(scope="module")
def played(calls, tmp_path_factory):
    """Of each preset, the stage and what it sampled."""
    found = {}

    def of(preset):
        if preset not in found:
            stage = Stage(tmp_path_factory.mktemp("stage"), preset)
            found[preset] = stage, *stage.sample()
        return found[preset]

    return of


@pytest.mark.parametrize("preset", PRESETS)
def test_images_of_turns_are_added_and_nothing_is_encoded_again(preset, played):
    stage, rollouts, rewards = played(preset)
    several = [rollout for rollout in rollouts if len(rollout.segments) == 3]
    assert several, "no episode had three turns"
    assert max(reward.reward for reward in rewards) >= 2
    for rollout in rollouts:
        sample, prompt = rollout.sample_id, rollout.prompt
        base = 10 * (1 + rollout.group_id)
        expected = [squares(0, (84, 84))] if rollout.group_id == 0 else []
        expected += [squares(base)]
        expected += [
            squares(base + n, (84, 56) if n % 2 else (56, 56))
            for n in range(1, len(rollout.segments))
        ]
        shown = [image.decode() for image in rollout.images]
        assert [image.tobytes() for image in shown] == [image.tobytes() for image in expected]
        assert "First:" in prompt.text
        own = [r for r in stage.requests if r.request_id % 2**40 == sample]
        assert len(own) == len(rollout.segments)
        for turn, request in enumerate(own):
            # What the engine was given: the row so far, and every image so far, in order.
            media = request.encoded
            assert media.token_ids == request.prompt_token_ids
            assert rollout.token_ids[: len(media.token_ids)] == media.token_ids
            # The encoder keeps what it has encoded, by content: a file may have another name.
            images = [image.decode().tobytes() for image in media.media.images]
            assert images == [i.tobytes() for i in shown[: len(expected) - len(own) + 1 + turn]]
            for name, tensor in own[-1].encoded.tensors.items():
                begins = media.tensors[name]
                assert torch.equal(tensor[: len(begins)], begins), name
        # Each place of a feature has one.
        row = encode_row(rollout, stage.encoder)
        mark = stage.model.config.image_token_id
        with torch.no_grad():
            features = stage.model.get_image_features(**row.tensors, return_dict=True).pooler_output
        assert rollout.token_ids.count(mark) == sum(len(f) for f in features)
        assert not {mark} & set(rollout.completion.sampled_token_ids)
        text = stage.tokenizer.decode(rollout.token_ids)
        assert text.count("<image> ") == len(rollout.segments) - 1  # of the environment, as text
    special_ids = stage.player.special_ids
    check_rows(rollouts, take_evidence(rollouts, stage.strategy.session, special_ids=special_ids))


@pytest.mark.parametrize("preset", PRESETS)
def test_the_engine_scores_turns_with_images_as_the_trainer(preset, played):
    stage, rollouts, _ = played(preset)
    stage.check_scores(rollouts)
    # The comparison sees an image that is lost, and another one in its place.
    row = next(rollout for rollout in rollouts if len(rollout.segments) == 3)
    lost = replace(row, later=row.later[:-1])
    assert error(stage, [row], (encode_row(lost, stage.encoder),)) > 1e-3
    whole = encode_row(row, stage.encoder)
    pixels = whole.tensors["pixel_values"].clone()
    pixels[-len(pixels) // 4 :] *= -1
    other = replace(whole, tensors={**whole.tensors, "pixel_values": pixels})
    assert error(stage, [row], (other,)) > 1e-3


@pytest.mark.parametrize("preset", PRESETS)
def test_exchanged_and_re_expanded_images_are_found(preset, played):
    stage, rollouts, _ = played(preset)
    row = next(r for r in rollouts if len(r.segments) == 3)
    good = encode_row(row, stage.encoder)
    one, two = row.later
    if preset == "tiny-gemma3":  # all images have one size
        exchanged = (replace(one, images=two.images), replace(two, images=one.images))
        media = encode_row(replace(row, later=exchanged), stage.encoder)
        assert media.token_ids == good.token_ids
        assert error(stage, [row], (media,)) > 1e-3
    else:
        wrong = (replace(one, images=two.images), two)
        with pytest.raises(ValueError, match="a row has other tokens at"):
            encode_row(replace(row, later=wrong), stage.encoder)
    # An engine or a trainer that expands what is expanded gets another row.
    mark = stage.model.config.image_token_id
    again = [m for i in row.token_ids for m in ((i, i) if i == mark else (i,))]
    with pytest.raises(ValueError, match="a row has other tokens at"):
        stage.encoder.row(again, None, row.later)


def test_places_are_those_of_the_whole_conversation(played):
    """What the model's own rule gives for all tokens and all images at once."""
    stage, rollouts, _ = played("tiny-qwen2.5-vl")
    trunk = stage.model.model
    for rollout in rollouts:
        media, ids = encode_row(rollout, stage.encoder), torch.tensor(rollout.token_ids)
        (found,) = axes_of_rows(trunk, [ids], [media])
        types = (ids == stage.model.config.image_token_id).long()
        grid = torch.cat(
            [
                stage.encoder.processor.image_processor(
                    images=[image.decode()], return_tensors="pt"
                )["image_grid_thw"]
                for image in rollout.images
            ]
        )
        expected, _ = trunk.get_rope_index(
            ids[None], mm_token_type_ids=types[None], image_grid_thw=grid
        )
        assert torch.equal(found, expected[:, 0])
        plain = torch.arange(len(ids)).expand(3, -1)
        assert not torch.equal(found, plain)


def test_rows_travel_with_their_images(played):
    stage, rollouts, _ = played("tiny-qwen2.5-vl")
    own = {-1 - r.sample_id: MediaSources.of(r) for r in rollouts}
    found = dict(unpack_sources(pack_sources(own, list(own))))
    assert list(found) == list(own)
    for rollout in rollouts:
        expected = encode_row(rollout, stage.encoder)
        media = found[-1 - rollout.sample_id].encode(stage.encoder)
        assert (media.token_ids, media.token_types) == (expected.token_ids, expected.token_types)
        assert [i.digest for i in media.media.images] == [i.digest for i in expected.media.images]
        assert all(torch.equal(media.tensors[n], t) for n, t in expected.tensors.items())


def test_a_journal_with_images_is_followed_and_another_image_starts_over(calls, tmp_path):
    shift = tmp_path / "shift"
    columns = {"shift": str(shift)}
    stage = Stage(tmp_path, "tiny-qwen2.5-vl", columns=columns)
    before, rewards = stage.sample()
    num_requests = len(stage.requests)
    again = Stage(tmp_path, "tiny-qwen2.5-vl", columns=columns)
    followed, same = again.sample()
    assert again.requests == []
    assert [r.token_ids for r in followed] == [r.token_ids for r in before]
    assert [[i.digest for i in r.images] for r in followed] == [
        [i.digest for i in r.images] for r in before
    ]
    assert [r.reward for r in same] == [r.reward for r in rewards]
    shift.touch()  # the environment shows other pictures of the same sizes
    other = Stage(tmp_path, "tiny-qwen2.5-vl", columns=columns)
    found, _ = other.sample()
    assert len(other.requests) >= num_requests / 2
    assert all(r.conversation.num_restarts == 1 for r in found)
    assert [r.prompt.token_ids for r in found] == [r.prompt.token_ids for r in before]


def test_a_conversation_of_skyrl_gyms_make_shows_images(tmp_path):
    stage = Stage(tmp_path, "tiny-gemma3", environment=f"skyrl_gym:{CASES}:Walk")
    rollouts, rewards = stage.sample()
    assert max(len(rollout.segments) for rollout in rollouts) == 3
    for rollout, reward in zip(rollouts, rewards, strict=True):
        assert [len(each.images) for each in rollout.later] == [1] * (len(rollout.segments) - 1)
        assert reward.reward == 0.5 * len(rollout.conversation.answers)
    stage.check_scores(rollouts)


@pytest.mark.parametrize(
    "shows, reason",
    [
        ("{folder}/large.png", "more than --max_observation_tokens 16: raise"),
        ("{folder}/long.png", "an image cannot be shown: absolute aspect ratio"),
        ("{folder}/torn.png", "torn.png is a damaged image"),
        ("nowhere.png", "image in block 1: no file nowhere.png"),
    ],
)
def test_an_image_that_cannot_be_shown_fails_its_episode(shows, reason, calls, tmp_path):
    squares(1, (112, 112)).save(tmp_path / "large.png")
    squares(1, (601, 2)).save(tmp_path / "long.png")
    (tmp_path / "torn.png").write_bytes((tmp_path / "large.png").read_bytes()[:-999])
    columns = {"shows": shows.format(folder=tmp_path)}
    stage = Stage(tmp_path, "tiny-qwen2.5-vl", columns=columns, max_observation_tokens=16)
    with pytest.raises(RewardError, match=reason):
        stage.sample()


def test_an_image_without_room_ends_its_episode(calls, tmp_path):
    stage = Stage(tmp_path, "tiny-qwen2.5-vl", prompt_max_len=86, max_len=110)
    rollouts, _ = stage.sample()
    assert max(len(rollout.segments) for rollout in rollouts) < 3
    assert all(len(rollout.token_ids) <= 110 for rollout in rollouts)
    stage.check_scores(rollouts)


@pytest.mark.parametrize("player", [Environments, Agents])
@pytest.mark.parametrize(
    "preset, options, reason",
    [
        ("tiny-mllama", {}, "models of type mllama attend to images beside the text"),
        (PRESETS[0], {"rollout_lag": 1}, "keep rows with the media of their prompts alone"),
    ],
)
def test_what_episodes_with_images_cannot_be_is_refused_at_the_start(
    preset, options, reason, player
):
    encoder, option = tiny(preset)[1], "agent" if player is Agents else "environment"
    options = {option: f"{CASES}:Album", "apply_chat_template": True, **options}
    config = TrainConfig(**options)
    with pytest.raises(ConfigError, match=reason):
        player(config, encoder.processor.tokenizer, modality=VisionPrompts(encoder))
