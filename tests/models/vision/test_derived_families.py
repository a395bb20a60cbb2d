"""Types without a row in the table of families read images as transformers does, or say why not."""

import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from tests.engines.media_requests import logprob_error, requests_of
from tests.models.all_types import types
from tests.models.batches import relative_norm
from tests.models.vision.test_scores import gradients
from tests.models.vision.tiny_world import Batch, image, pack, scored, twin_of
from tests.runs import write
from tests.stages.test_proof_at_load import POLICY

from lightrft.cli.main import main
from lightrft.config import ConfigError, TrainConfig
from lightrft.datasets.media import encoder_of
from lightrft.engines.hf.engine import HFEngine
from lightrft.engines.media.encoder import PromptEncoder
from lightrft.engines.media.families import FAMILIES, family_of, placeholder_ids
from lightrft.engines.media.media import RowMedia
from lightrft.engines.types import EngineConfig, SamplingParams
from lightrft.models import Actor
from lightrft.models.loading import (
    ModelLoadError,
    load_causal_lm,
    load_config,
    load_processor,
    save_pretrained,
)
from lightrft.models.vision import forward
from lightrft.models.vision.proof import prove_media
from lightrft.strategy import get_fake_strategy
from lightrft.trainer import SFTTrainer, train

# Its tower computes images together otherwise than alone.
MIXED = "minimax_m3_vl"
# Tokens that see later ones, and a processor that takes no two images of one row.
REFUSED = (MIXED, "paligemma", "perception_lm")
LONG = ("got_ocr2", "glm5_next", "step3p7")
READ = [
    pytest.param(name, marks=pytest.mark.full) if name in LONG else name
    for name in types.SIZES["images"]
    if name not in FAMILIES and name not in REFUSED
]
CONTEXT = get_fake_strategy({}).context


def world(model_type):
    """A model, the encoder of its prompts, and rows with one image, none and two."""
    model, encoder = twin_of(types.tiny_vision, model_type=model_type)
    return model, encoder, Batch(model, encoder)


def gradient(model, logprobs, weights):
    model.zero_grad()
    sum((row * weight).sum() for row, weight in zip(logprobs, weights, strict=True)).backward()
    return gradients(model)


@pytest.mark.cover(6)
@pytest.mark.parametrize("model_type", READ)
def test_rows_with_images_are_those_of_transformers(model_type):
    model, encoder, batch = world(model_type)
    alone = batch.each_alone(model)
    weights = [torch.randn(len(row)) for row in alone]
    expected = gradient(model, alone, weights)
    actor, outcome = Actor(model), types.examine_images(model_type).outcome
    for is_packed in {False, outcome == types.PACKED}:
        if is_packed:
            pack(actor)
        found = batch.of_rows(scored(actor, batch))
        for one, other in zip(found, alone, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
        assert relative_norm(gradient(model, found, weights), expected) < 1e-5
    actor.pack_samples(False)
    assert outcome != types.REFUSED
    # An engine that samples reads them alike.
    engine = HFEngine(EngineConfig("hf", "", max_model_len=600), module=model)
    made = engine.generate(requests_of(batch.prompts), SamplingParams(max_tokens=5, seed=4))
    assert logprob_error(actor, encoder, batch.prompts, made) < 3e-5
    assert not set(placeholder_ids(model.config)) & {t for m in made for t in m.output_token_ids}


@pytest.mark.cover(4)
@pytest.mark.parametrize("model_type", READ)
def test_a_rank_without_images_waits_for_the_same_gradients(model_type):
    model, encoder, batch = world(model_type)
    if encoder.family.token_axis:  # experts of images
        pair = SimpleNamespace(world_size=2)
        with pytest.raises(ModelLoadError, match="ranks without images would wait: got 2 ranks"):
            prove_media(Actor(model), pair, encoder)
        return
    text = Batch(model, encoder, prompts=[batch.prompts[1]])
    alone = text.alone(model, 0)
    expected, alone = gradient(model, [alone], [torch.ones(len(alone))]), alone.detach()
    actor = Actor(model)
    reached = gradient(model, batch.of_rows(scored(actor, batch)), [1.0] * len(batch.rows))
    found = text.of_rows(scored(actor, text, RowMedia((None,), encoder.blanks(["image"]))))[0]
    torch.testing.assert_close(found, alone, atol=1e-5, rtol=0)
    seen = gradient(model, [found], [torch.ones(len(found))])
    assert relative_norm(seen, expected) < 1e-5
    assert seen.keys() == reached.keys()


@pytest.mark.cover(3)
@pytest.mark.parametrize("model_type", READ)
def test_images_are_proved_in_half_precision(model_type):
    model, encoder, _ = world(model_type)
    assert prove_media(Actor(model.bfloat16()), CONTEXT, encoder) is not None


def test_a_model_that_ignores_images_is_refused():
    model, encoder, _ = world("vipllava")
    torch.nn.init.zeros_(model.model.multi_modal_projector.linear_2.weight)
    with pytest.raises(ModelLoadError, match="computes the same for other images: they change "):
        prove_media(Actor(model), CONTEXT, encoder)


@pytest.mark.cover(4)
@pytest.mark.parametrize("model_type", READ)
def test_files_are_read_as_they_were_written(model_type, tmp_path):
    model, encoder, _ = world(model_type)
    save_pretrained(model, None, tmp_path)
    encoder.processor.save_pretrained(tmp_path)
    read, expected = load_causal_lm(str(tmp_path)).state_dict(), model.state_dict()
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], value) for name, value in expected.items())
    again = PromptEncoder(load_processor(str(tmp_path)), encoder.family)
    text, media = encoder.question("image", [image(84, 56), image(56, 56, 1)])
    assert again.encode(text, media).token_ids == encoder.encode(text, media).token_ids


def of_the_next_row(inputs):
    """Features are those of the row behind."""
    return {
        n: t.roll(1, int(len(t) == 1)) if t.is_floating_point() else t for n, t in inputs.items()
    }


@contextmanager
def shifted_places(model):
    """Each feature stands one token behind its place."""

    def shift(module, args, given):
        given["inputs_embeds"] = given["inputs_embeds"].roll(1, 1)
        return args, given

    part = forward.language_model(model.base_model)
    handle = part.register_forward_pre_hook(shift, with_kwargs=True)
    yield
    handle.remove()


FAULTS = ["shifted", "next row", "other axis"]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("model_type", ["lfm2_vl", "glm46v", "gemma4", "idefics2"])
def test_wrong_places_are_found_before_the_first_step(model_type, fault, monkeypatch):
    model, encoder, _ = world(model_type)
    right = forward.vision_inputs
    run = forward.run_trunk

    def inputs(trunk, family, layout, media):
        found = right(trunk, family, layout, media)
        return of_the_next_row(found) if fault == "next row" else found

    def shifted(trunk, *given):
        with shifted_places(model):
            return run(trunk, *given)

    monkeypatch.setattr(forward, "vision_inputs", inputs)
    if fault == "shifted":
        monkeypatch.setattr(forward, "run_trunk", shifted)
    if fault == "other axis":
        encoder = PromptEncoder(encoder.processor, encoder.family)
        encoder.axes = dict.fromkeys(encoder.axes, 2)
    actor = Actor(model)
    with pytest.raises(ModelLoadError, match="text alone with --text_only"):
        prove_media(actor, CONTEXT, encoder)
    monkeypatch.undo()
    assert prove_media(actor, CONTEXT, world(model_type)[1]) is not None


def written(folder, model_type):
    """Write a model with its processor, and rows with an image, with two and without."""
    model, encoder, _ = world(model_type)
    save_pretrained(model, None, folder / "model")
    encoder.processor.save_pretrained(folder / "model")
    for seed, name in enumerate("ab"):
        Image.new("RGB", (56, 28 * (seed + 2)), (90 * seed, 40, 70)).save(folder / f"{name}.png")
    asked = [("<image> What?", "a"), ("<image><image> Both?", "ab"), ("No?", "")]
    rows = [
        {
            "prompt": [{"role": "user", "content": text}],
            "images": [str(folder / f"{n}.png") for n in names],
        }
        for text, names in asked
    ]
    return str(folder / "model"), rows


@pytest.mark.cover(1)
@pytest.mark.parametrize("model_type", ["glm46v", "gemma4", "qwen3_5_moe", "lfm2_vl"])
def test_a_policy_trains_on_images(model_type, tmp_path):
    model, rows = written(tmp_path, model_type)
    summary = train(
        model,
        [{"input": row["prompt"], "images": row["images"]} for row in [*rows, rows[0]]],
        lambda responses: [float(place % 2) for place in range(len(responses))],
        output_dir=str(tmp_path / "run"),
        apply_chat_template=True,
        parity_limit=1e-4,
        **{**POLICY, "rollout_batch_size": 4, "train_batch_size": 8},
    )
    before, after = (load_causal_lm(path).state_dict() for path in (model, summary.model_dir))
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert any("vis" in name for name in changed)
    assert type(load_processor(summary.model_dir)) is type(load_processor(model))


@pytest.mark.parametrize("shows", [True, False])
def test_a_tower_that_mixes_images_is_refused_and_its_text_is_trained(shows, tmp_path, capsys):
    model, rows = written(tmp_path, MIXED)
    rows = [{**row, "completion": "b"} for row in rows if bool(row["images"]) == shows] * 4
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows[:4])))
    data = ["--prompt_data", str(tmp_path / "rows.jsonl"), "--train_batch_size", "2"]
    options = [*data, "--fsdp", "--apply_chat_template", "--output_dir", str(tmp_path / "run")]
    code, said = main(["sft", "--pretrain", model, *options]), capsys.readouterr()
    assert code == (2 if shows else 0), said.err
    name = "MiniMaxM3SparseForConditionalGeneration"
    words = f"rows with images are not computed by {name} as each row alone: max |d log p| ="
    assert (words in said.err) == shows
    assert "Traceback" not in said.err


@pytest.mark.parametrize("place", ["", "http://127.0.0.1:9/v1"])
def test_images_are_shown_to_no_teacher(place, tmp_path):
    model, rows = written(tmp_path, "lfm2_vl")
    with pytest.raises(ConfigError, match="rows have images, and a teacher sees texts"):
        train(
            model,
            [{"input": row["prompt"], "images": row["images"]} for row in rows],
            len,
            output_dir=str(tmp_path / "run"),
            apply_chat_template=True,
            teacher=place or model,
            **POLICY,
        )


def test_a_step_on_texts_of_a_model_with_towers_is_not_recorded_for_an_audit(tmp_path):
    model, rows = written(tmp_path, "lfm2_vl")
    write(tmp_path / "rows.jsonl", [{**rows[2], "completion": "b"}] * 4)
    options = {"audit_every": 1, "train_batch_size": 4, "apply_chat_template": True, "fsdp": True}
    with pytest.raises(ConfigError, match="audit_every recomputes models of text"):
        SFTTrainer(
            TrainConfig(
                pretrain=model,
                prompt_data=str(tmp_path / "rows.jsonl"),
                output_dir=str(tmp_path / "run"),
                **options,
            )
        ).train()


def test_a_processor_of_another_model_is_named_and_text_is_trained(tmp_path):
    model, _ = written(tmp_path, "glm46v")
    _, other, _ = world("aya_vision")
    other.processor.save_pretrained(tmp_path / "other")
    processor = load_processor(str(tmp_path / "other"))
    encoder = encoder_of(processor, family_of(load_config(model)))
    assert not encoder.reads_media
    assert (
        "are not supported: the processor of glm46v gave 1 features and 0 places"
        in encoder.hindrance
    )
