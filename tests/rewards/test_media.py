"""Rewards see the media of their prompts: own functions, judges and services."""

import base64
import io
import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from tests.datasets.film_files import film

from lightrft.config import TrainConfig
from lightrft.datasets import Prompt
from lightrft.engines.media.media import Media
from lightrft.engines.media.sounds import as_audio
from lightrft.engines.media.sources import as_image, as_video
from lightrft.engines.types import Completion
from lightrft.records.rollout import AnsweredCall, ResponseTurns, Rollout
from lightrft.rewards import build_reward
from lightrft.rewards.types import RewardResult
from lightrft.rollout.scoring import GroupScorer
from lightrft.tools.rewards.http import HttpClient
from lightrft.tools.rewards.judge import JudgeReward
from lightrft.tools.rewards.remote import RemoteReward

SHADES = (10, 200, 90)


def grey(shade):
    return Image.new("RGB", (8, 4), (shade,) * 3)


def media_of(folder, *shades):
    found = []
    for shade in shades:
        grey(shade).save(folder / f"{shade}.png")
        found.append(as_image(f"{shade}.png", name=str(shade), folder=folder))
    return Media({"image": found}) if found else Media()


def rollouts(folder):
    """Two samples of a prompt with two pictures, of one of text and of one with one picture."""
    medias = [media_of(folder, *SHADES[:2]), Media(), media_of(folder, SHADES[2])]
    return [
        Rollout(
            Prompt(i, f"p{i}", (1,), columns={"k": i}, media=media),
            Completion(i, sample, (1,), (2,), (0.0,), "temperature", "stop"),
            i,
            2 * i + sample,
            f"r{i}.{sample}",
        )
        for i, media in enumerate(medias)
        for sample in range(2)
    ]


def sound_of(samples):
    form = {"array": samples, "sampling_rate": 16000}
    return as_audio(form, name="s", folder=None)


FUNCTIONS = """
import numpy as np
from PIL import Image

def looks(responses, images, k):
    assert all(isinstance(each, Image.Image) for own in images for each in own)
    return [
        {"reward": sum(float(np.asarray(each).mean()) for each in own), "count": len(own), "k": n}
        for own, n in zip(images, k)
    ]

def takes_all(responses, **columns):
    assert sorted(columns) == ["k", "labels", "prompts"]
    return [0.0 for _ in responses]

def films(responses, videos):
    return [float(videos[i][0][0].shape[0]) if videos[i] else -1.0 for i in range(len(responses))]

def hears(responses, audios):
    return [float(own[0][0].max()) if own else -1.0 for own in audios]

def talks(responses, conversations):
    said = [[(m["role"], m["content"]) for m in own] for own in conversations]
    user = ("user", [{"type": "image"}, {"type": "text", "text": "count"}])
    tools = [("assistant", "look"), ("tool", "two"), ("assistant", "it is 2")]
    alone = [("user", "p1"), ("assistant", "r1.0")]
    return [1.0 if own == [user, *tools] else 2.0 if own == alone else 0.0 for own in said]
"""


def scored(folder, name, items):
    file = folder / "own.py"
    file.write_text(FUNCTIONS)
    config = TrainConfig(reward_timeout_seconds=60.0)
    with build_reward([f"{file}:{name}"], config=config) as reward:
        has_media = any(item.prompt.media for item in items)
        with GroupScorer(reward, columns=["k"], has_media=has_media) as scorer:
            return list(scorer.results(items))


def test_a_function_sees_the_pictures_of_each_response(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the worker stays elsewhere
    found = scored(tmp_path, "looks", rollouts(tmp_path))
    assert [result.reward for result in found] == [210, 210, 0, 0, 90, 90]
    parts = [{k.rpartition("/")[2]: v for k, v in r.components.items()} for r in found]
    assert [part["count"] for part in parts] == [2, 2, 0, 0, 1, 1]
    assert [part["k"] for part in parts] == [0, 0, 1, 1, 2, 2]


def test_who_takes_everything_is_given_no_pixels(tmp_path):
    assert len(scored(tmp_path, "takes_all", rollouts(tmp_path))) == 6


@pytest.mark.full
def test_rows_of_text_have_no_pictures(tmp_path):
    found = scored(tmp_path, "looks", rollouts(tmp_path)[2:4])
    assert [result.reward for result in found] == [0, 0]


@pytest.mark.full
def test_a_function_sees_frames(tmp_path):
    frames = [grey(shade) for shade in SHADES]
    video = as_video({"frames": frames, "fps": 2}, name="v", folder=tmp_path)
    (tmp_path / "a.mp4").write_bytes(film(num_frames=15))
    for clip in (video, as_video("a.mp4", name="v", folder=tmp_path)):
        check_frames(tmp_path, clip)


def check_frames(tmp_path, video):
    items = rollouts(tmp_path)[:2]
    own = Prompt(0, "p", (1,), columns={"k": 0}, media=Media({"video": [video]}))
    items[0] = Rollout(own, items[0].completion, 0, 0, "r")
    assert [result.reward for result in scored(tmp_path, "films", items)] == [3, -1]


def test_a_function_hears_sounds(tmp_path):
    (item, other, *_) = rollouts(tmp_path)
    samples = np.full(8000, 0.25, np.float32)
    sound = sound_of(samples)
    items = [replace(item, prompt=replace(item.prompt, media=Media({"audio": [sound]}))), other]
    found = [result.reward for result in scored(tmp_path, "hears", items)]
    assert found == [pytest.approx(0.25), -1]


def test_a_function_reads_the_conversation(tmp_path):
    """Prompt, turns and answers of tools in order; of a text without a template one message."""
    item, _, text, *_ = rollouts(tmp_path)
    content = [{"type": "image"}, {"type": "text", "text": "count"}]
    prompt = replace(item.prompt, messages=({"role": "user", "content": content},))
    turns = ResponseTurns(("look", "it is 2"), ((AnsweredCall("see", {}, "ok", "two"),),))
    found = scored(tmp_path, "talks", [replace(item, prompt=prompt, conversation=turns), text])
    assert [result.reward for result in found] == [1, 2]


def shades_of(addresses):
    found = []
    for address in addresses:
        assert address.startswith("data:image/png;base64,")
        content = base64.b64decode(address.partition(",")[2])
        found.append(int(np.asarray(Image.open(io.BytesIO(content)))[0, 0, 0]))
    return found


def asked_of_judge(folder, monkeypatch, items):
    """The content of each question that a judge is asked."""
    config = TrainConfig(judge_url="http://127.0.0.1:9/v1", judge_model="m", output_dir=str(folder))
    judge, asked = JudgeReward(config), []

    def answers(bodies, *, seconds):
        asked.extend(map(json.loads, bodies))
        return [b'{"choices": [{"message": {"content": "Score: 5"}}]}'] * len(bodies)

    monkeypatch.setattr(judge.server, "answers", answers)
    with GroupScorer(judge, has_media=True) as scorer:
        scorer.results(items)
    judge.close()
    return [body["messages"][0]["content"] for body in asked]


def test_a_judge_gets_every_kind_of_media(tmp_path, monkeypatch):
    video = as_video({"frames": [grey(s) for s in SHADES], "fps": 2}, name="v", folder=tmp_path)
    samples = np.sin(np.arange(8000) / 9).astype(np.float32)
    sound = sound_of(samples)
    kinds = {"image": list(media_of(tmp_path, 10)), "video": [video], "audio": [sound]}
    item, _, of_text, *_ = rollouts(tmp_path)
    for given in ({"image"}, {"video"}, {"audio"}, {"image", "video", "audio"}):
        media = Media({kind: kinds[kind] for kind in given})
        shown = replace(item, prompt=replace(item.prompt, media=media))
        folder = tmp_path / "-".join(sorted(given))
        asked = asked_of_judge(folder, monkeypatch, [shown, of_text])
        (content,) = (each for each in asked if not isinstance(each, str))
        *parts, question = content
        assert question["type"] == "text"
        assert "r0.0" in question["text"]
        pictures = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
        expected = [10] * ("image" in given) + [*SHADES] * ("video" in given)
        assert shades_of(pictures) == expected
        sounds = [part["input_audio"] for part in parts if part["type"] == "input_audio"]
        assert len(sounds) == ("audio" in given)
        for each in sounds:
            assert each["format"] == "wav"
            heard = np.frombuffer(base64.b64decode(each["data"])[44:], dtype="<i2")
            assert np.abs(heard / 32767 - samples).max() < 1e-4


def test_a_service_gets_the_files_of_each_response(tmp_path, monkeypatch):
    service, sent = RemoteReward("http://127.0.0.1:9"), []

    def answer(client, request):
        sent.append(json.loads(request.body))
        return json.dumps({"rewards": [0.0] * len(sent[-1]["responses"])}).encode()

    monkeypatch.setattr(HttpClient, "fetch", answer)
    with GroupScorer(service, columns=["k"], has_media=True) as scorer:
        assert scorer.results(rollouts(tmp_path))[0] == RewardResult(0.0, {"remote": 0.0})
    service.close()
    assert sent[0]["conversations"][0][-1] == {"role": "assistant", "content": "r0.0"}
    given = [shades_of(own) for request in sent for own in request["images"]]
    assert given == [[10, 200]] * 2 + [[]] * 2 + [[90]] * 2


@pytest.mark.parametrize("name", ["looks", "films", "hears", "talks"])
def test_media_are_no_missing_column(tmp_path, name):
    file = tmp_path / "own.py"
    file.write_text(FUNCTIONS)
    with build_reward([f"{file}:{name}"], config=TrainConfig()) as reward:
        reward.check_columns({"k"})
