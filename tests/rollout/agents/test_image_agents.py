"""Agents that show images, answered by a real engine and scored by the trainer's actor."""

import base64
import json
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.models.vision.tiny_families import TINY_FAMILIES
from tests.models.vision.tiny_world import tiny
from tests.rollout.agents.agent_stage import options_of
from tests.rollout.agents.endpoint_desk import Waiting, answer, completed
from tests.rollout.agents.image_agents import said
from tests.rollout.agents.test_agents import check_exact
from tests.rollout.agents.test_planted_faults import suffix_with
from tests.rollout.image_environments import bytes_of, squares
from tests.rollout.image_stage import PRESETS, ROWS, ImageStage, error

from lightrft.config import TrainConfig
from lightrft.datasets.chat_ids import ChatIds
from lightrft.datasets.media import VisionPrompts
from lightrft.datasets.types import DataError, Prompt
from lightrft.engines.media.media import Media
from lightrft.engines.media.sources import as_image
from lightrft.engines.types import SamplingParams
from lightrft.records.media import encode_context
from lightrft.rewards.build import CombinedReward
from lightrft.rewards.types import RewardResult
from lightrft.rollout.agents import conversations
from lightrft.rollout.agents.agents import Agents
from lightrft.rollout.agents.conversations import AgentEpisode, CalledTurn, Conversations
from lightrft.rollout.agents.http_server import HttpError
from lightrft.rollout.agents.messages import Message, read_chat
from lightrft.rollout.agents.rendering_check import fault_of
from lightrft.rollout.agents.rounds import AnswerRules, RunSampling, answer_round
from lightrft.rollout.source import SourceParts
from lightrft.stages.parity_limits import PARITY_LIMITS
from lightrft.stages.policy.inputs import require_images

CASES = Path(__file__).with_name("image_agents.py")


class Stage(ImageStage):
    """An agent that shows more images."""

    def __init__(self, folder, preset, agent="album", *, rows=ROWS, reward=None):
        super().__init__(preset)
        options = {"generate_max_len": 24, "prompt_max_len": 900, "max_turns": 3}
        options |= {"engine_type": "hf", "agent": f"{CASES}:{agent}"}
        self.config = TrainConfig(**options_of(len(rows), **options))
        self.player = Agents(self.config, self.tokenizer, folder=folder, modality=self.modality)
        self.set_rows(folder, rows, {})
        self.reward = reward or CombinedReward((), ())

    def sample(self):
        session, reward = self.strategy.session, self.reward
        parts = SourceParts(session, self.config, self.tokenizer, reward, encoder=self.encoder)
        try:
            return self.player.source(parts).sample(self.asked())
        finally:
            self.player.close()


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
            # Encoders know a picture by its digest, whatever file had it.
            shown = [image.digest for image in request.encoded.media.images]
            assert shown == [image.digest for image in rollout.images[: len(shown)]]
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
    stage.check_scores(rollouts)
    # The comparison sees other pixels with the ids of the row, by more than the gate allows.
    row = next(rollout for rollout in rollouts if len(rollout.images) == 2)
    other = replace(row.later[-1], images=(squares_source(9, (84, 56)),))
    media = stage.encoded([replace(row, later=(*row.later[:-1], other))])
    assert error(stage, [row], media) > PARITY_LIMITS[torch.float32].largest


def test_what_was_shown_is_not_sampled_again(played):
    stage, samples = played(PRESETS[0])
    again = Stage(stage.player.folder.parent, PRESETS[0])
    same = again.sample()
    assert again.requests == []
    assert [i.rollout for i in samples.scored] == [i.rollout for i in same.scored]
    check_exact(again, same)


class Desk:
    """Calls to a vision-language model that nobody samples."""

    def __init__(self, preset="tiny-qwen2.5-vl", max_tokens=400):
        self.encoder = tiny(preset)[1]
        self.tokenizer = self.encoder.processor.tokenizer
        self.chat = ChatIds(self.tokenizer, VisionPrompts(self.encoder))
        self.end = self.chat.end_of_turn
        sampling = RunSampling(SamplingParams(max_tokens=20))
        self.rules = AnswerRules(self.chat, "hermes", sampling, max_tokens)
        self.talk = Conversations(self.chat, 7)

    def ask(self, *messages, read=read_chat, **fields):
        """Asks, and answers by a word."""
        call = read({"model": "policy", "messages": list(messages), **fields})
        episode = AgentEpisode(0, None, 0, 0, {}, self.talk)
        (turn,) = answer(self.talk, self.rules.asked(episode, call))
        return turn

    def faults(self):
        """Of the rows."""
        return [fault_of(row, self.chat) for row in self.talk.branches()]


# The texts of a message side by side.
IMAGES_FIRST = (
    "{% for message in messages %}"
    "{% for part in message.content if part.type == 'image' %}<|image_pad|>{% endfor %}"
    "{% for part in message.content if part.type == 'text' %}{{ part.text }}{% endfor %}"
    "<|end|>{% endfor %}"
)
SAID = {"role": "assistant", "content": "Yes."}


def two_histories(desk):
    """Equal words and sizes, other pixels; the second goes on."""
    first, second = (said("Look.", squares(number)) for number in (1, 2))
    one, two = desk.ask(first), desk.ask(second)
    return one, two, desk.ask(second, SAID, said("More.", squares(3)))


@pytest.mark.parametrize("preset", [name for name in TINY_FAMILIES if name != "tiny-mllama"])
def test_histories_are_told_apart_by_their_pixels(preset):
    desk = Desk(preset, max_tokens=20_000)
    one, two, more = two_histories(desk)
    assert one.context == two.context
    assert one.request_id != two.request_id
    assert (one.copy, two.copy) == (0, 0)
    assert more.parent is two
    assert "Look" not in desk.tokenizer.decode(more.before.token_ids)
    assert desk.faults() == ["", ""]
    other = Desk(preset, max_tokens=20_000)  # whichever comes first
    twin = other.ask(said("Look.", squares(2)))
    assert (twin.request_id, other.ask(said("Look.", squares(1))).request_id) == (
        two.request_id,
        one.request_id,
    )
    assert [row[0].request_id for row in desk.talk.branches()] == [
        row[0].request_id for row in other.talk.branches()
    ]


def with_other_images(turn, found):
    """The images of another history where the last one's belong."""
    first = replace(found[0], images=(squares_source(8, (56, 56)),))
    return (first, *found[1:]) if turn.parent is not None else found


def keys_without_pixels(patch):
    patch.setattr(Message, "key", property(lambda m: (m.role, len(m.images), *m.texts)))


def images_mixed_up(patch):
    own = CalledTurn.later.fget
    patch.setattr(CalledTurn, "later", property(lambda turn: with_other_images(turn, own(turn))))


def places(change):
    """Change the ids of what follows a turn, where its first image stands."""

    def changed(chat, rendered):
        ids = rendered.token_ids
        return replace(rendered, token_ids=change(ids, first_place(chat, ids)))

    return suffix_with(changed)


def first_place(chat, ids):
    return next(n for n, i in enumerate(ids) if i in chat._places)


PLANTED = {
    "histories without their pixels": keys_without_pixels,
    "images of a branch are mixed up": images_mixed_up,
    "a place too many": places(lambda ids, n: (*ids[:n], ids[n], *ids[n:])),
    "a place is lost": places(lambda ids, n: (*ids[:n], *ids[n + 1 :])),
    "a place beside an image": places(lambda ids, n: (*ids, ids[n])),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_fault_in_what_was_shown_is_found(name, monkeypatch):
    PLANTED[name](monkeypatch)
    desk = Desk()
    two_histories(desk)
    desk.ask(said("Look.", squares(1)), SAID, said("More.", squares(3)))
    assert any(desk.faults())


@pytest.mark.full
def test_pixels_of_another_row_are_found(monkeypatch, tmp_path):
    own = AgentEpisode.to_rollout

    def rollout(self, number, turns):
        found = own(self, number, turns)
        return replace(found, later=tuple(with_other_images(turns[-1], found.later)))

    monkeypatch.setattr(AgentEpisode, "to_rollout", rollout)
    stage = Stage(tmp_path, "tiny-gemma3")
    samples = stage.sample()
    problems = {each.problem for each in samples.evidence.ledger.entries.values()}
    assert "its images are not those that its client sent" in problems


def address(text):
    return [{"type": "image_url", "image_url": {"url": text}}]


def torn():
    data = bytes_of(squares(1, (112, 112)))
    return f"data:image/png;base64,{base64.b64encode(data[:-999]).decode()}"


def huge(side=60_000):
    """Its header says that it is as large as that."""
    data = bytes_of(squares(1))
    header = data[:16] + struct.pack(">II", side, side) + data[24:]
    data = header[:29] + struct.pack(">I", zlib.crc32(header[12:29])) + header[33:]
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


TEXT = f"data:image/png;base64,{base64.b64encode(b'no picture at all').decode()}"
REFUSED = [
    (address("data:image/png;base64,"), "image e3b0c44298fc1c14 is no image"),
    (address(torn()), "is a damaged image"),
    (address(huge()), "larger than 100000000 pixels"),
    (address(TEXT), "an image cannot be shown: .* is no image"),
    (said(squares(1, (601, 2)))["content"], "aspect ratio"),
    (said(*[squares(n, (112, 112)) for n in range(60)])["content"], "no answer"),
    (said(*map(squares, range(65)))["content"], "65 new images at once: at most 64"),
    (address(huge(6000)), "36000000 pixels: at most 33554432 are read at once"),
]


@pytest.mark.parametrize("content, reason", REFUSED)
def test_an_image_that_cannot_be_shown_is_refused_in_one_line(content, reason):
    with pytest.raises(HttpError, match=reason) as refusal:
        Desk().ask({"role": "user", "content": content})
    assert refusal.value.status == 400
    assert "\n" not in str(refusal.value)


def test_a_model_of_text_refuses_images_by_name():
    desk = Desk()
    desk.rules = replace(desk.rules, chat=ChatIds(desk.tokenizer))
    with pytest.raises(
        HttpError, match="images are not supported: of this model only text is read"
    ):
        desk.ask(said(squares(1)))


def test_the_pixels_of_an_episode_are_bounded(monkeypatch):
    monkeypatch.setattr(conversations, "MAX_PIXEL_BYTES", 100_000)
    desk = Desk()
    with pytest.raises(HttpError, match="and the pixels of its images") as refusal:
        for number in range(40):
            desk.ask(said(squares(number)))
    assert (refusal.value.status, refusal.value.code) == (413, "episode_too_large")
    assert 1 < len(desk.talk.turns) < 20


def test_pixels_are_counted_and_kept_once_and_those_of_refused_calls_not_at_all():
    desk = Desk(max_tokens=2000)
    desk.encoder.forget()
    first = said("Look.", squares(1))
    for _ in range(3):
        desk.ask(first)
    kept = desk.encoder.num_kept, desk.talk.pixel_bytes
    assert kept == (1, desk.encoder.bytes_since(0))
    torn_one = {"type": "image_url", "image_url": {"url": torn()}}
    content = [*said(squares(2), "and", squares(3), "and")["content"], torn_one]
    for message in ({"role": "user", "content": content}, said(*map(squares, range(4, 64)))):
        with pytest.raises(HttpError):
            Desk.ask(desk, first, SAID, message, said("long " * 2000))
        assert (desk.encoder.num_kept, desk.talk.pixel_bytes) == kept


def test_choices_of_one_call_share_their_pixels():
    desk, taken = Desk(max_tokens=2000), []

    def sample(params, requests):
        taken.extend(requests)
        return [completed(r.request_id, r.prompt_token_ids, (5,), "length") for r in requests]

    content = said("Look.", squares(1), "or", squares(2))
    call = read_chat({"model": "policy", "messages": [content], "n": 3})
    episode = AgentEpisode(0, None, 0, 0, {}, desk.talk)
    assert len(answer_round([Waiting(episode, call)], desk.rules, sample)) == 3
    assert len({id(request.encoded) for request in taken}) == 1 < len(taken)


def test_special_tokens_are_not_forged_by_escapes_or_over_an_image():
    desk = Desk(max_tokens=2000)
    escaped = json.dumps({"a": "<|end|>"}).replace("<", "\\u003c")
    assert "<" not in escaped
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": escaped}}
    with pytest.raises(HttpError, match="a call or a tool holds the name of a special token"):
        desk.ask(said("Look."), {**SAID, "tool_calls": [call]}, said("And?"))
    desk.chat.renderer.chat_template = IMAGES_FIRST
    turn = desk.ask(said("x<|en", squares(1), "d|>y"))
    assert turn.before.token_ids.count(desk.end) == 1  # the template's own


@pytest.mark.parametrize("preset", [*PRESETS, "tiny-smolvlm"])
def test_a_text_that_names_a_place_of_an_image_shows_none(preset):
    desk = Desk(preset, max_tokens=2000)
    mark = desk.encoder.marks["image"]
    turn = desk.ask(said(f"Look {mark}.", squares(1)), SAID, said(f"{mark} and", squares(2)))
    row = encode_context(turn.context, None, turn.later, desk.encoder)
    assert len(row.media.images) == 2
    assert f"Look {mark}." in desk.tokenizer.decode(turn.context)
    assert desk.faults() == [""]


def test_tools_show_images():
    desk = Desk("tiny-qwen2.5-vl")
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "c1", "content": said("Here:", squares(2))["content"]}
    turn = desk.ask(said("Look."), {**SAID, "tool_calls": [call]}, result)
    assert [image.decode().tobytes() for image in turn.later[0].images] == [squares(2).tobytes()]


@pytest.mark.full
def test_one_conversation_goes_on_over_all_clients(tmp_path):
    pytest.importorskip("openai", reason="needs the package openai")
    pytest.importorskip("anthropic", reason="needs the package anthropic")
    rows = [{"input": "unused", "number": 1}]
    stage = Stage(tmp_path, "tiny-qwen2.5-vl", "by_other_clients", rows=rows)
    samples = stage.sample()
    check_exact(stage, samples)
    for item in samples.scored:
        assert len(item.rollout.segments) == 3
        found = [image.decode().tobytes() for image in item.rollout.images]
        assert found == [squares(3, (84, 84)).tobytes(), squares(4).tobytes()]


@pytest.mark.full
def test_a_reward_function_gets_the_images_that_the_first_turn_was_given(tmp_path):
    seen = []

    class Counting:
        name, needs_labels = "counting", False

        def score(self, prompts, responses, labels, columns):
            seen.extend([image.digest for image in media.images] for media in columns["images"])
            return [RewardResult(0.0) for _ in responses]

        def close(self):
            pass

    stage = Stage(tmp_path, "tiny-gemma3", reward=CombinedReward((Counting(),), (1.0,)))
    firsts = [item.rollout for item in stage.sample().scored if item.rollout.sample_id < 4]
    assert sorted(seen) == sorted([rollout.images[0].digest] for rollout in firsts)


def test_rows_with_films_are_refused_by_their_numbers():
    picture, film = Media({"image": [squares_source(1, (28, 28))]}), Media({"video": [object()]})
    require_images([Prompt(0, "", (1,), media=picture)])
    with pytest.raises(DataError, match="row 4 of the prompts: agents are shown images alone"):
        require_images([Prompt(3, "", (1,), media=picture + film)])
