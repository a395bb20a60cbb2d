"""`lightrft init-model` writes checkpoints that load."""

import pytest
import torch

from lightrft.cli.main import main
from lightrft.tools.init_model_command import MEDIA_PRESETS, TEXT_PRESETS
from lightrft.tools.model_presets import write_shape
from lightrft.tools.plan.sizes import SHAPES, ModelSize


@pytest.mark.parametrize("preset", TEXT_PRESETS)
def test_the_model_loads_and_depends_on_the_seed_alone(tmp_path, capsys, preset):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        argv = ["init-model", str(tmp_path / name), "--preset", preset, "--seed", seed]
        assert main(argv) == 0
        assert preset in capsys.readouterr().out
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in "abc"]
    first, twin, other = (
        torch.cat([parameter.flatten() for parameter in model.parameters()]) for model in models
    )
    assert torch.equal(first, twin)
    assert not torch.equal(first, other)
    assert AutoTokenizer.from_pretrained(tmp_path / "a").chat_template


@pytest.mark.parametrize("preset", MEDIA_PRESETS)
def test_a_model_of_media_is_that_of_its_seed_with_its_processor(tmp_path, capsys, preset):
    from lightrft.models.loading import load_causal_lm, load_processor
    from lightrft.tools.tiny_media_models import build_tiny

    assert main(["init-model", str(tmp_path / "a"), "--preset", preset, "--seed", "3"]) == 0
    assert preset in capsys.readouterr().out
    built, processor = build_tiny(preset, seed=3)
    loaded, expected = load_causal_lm(str(tmp_path / "a")).state_dict(), built.state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.items())
    assert type(load_processor(str(tmp_path / "a"))) is type(processor)


def test_presets_are_those_that_can_be_written():
    from lightrft.tools import model_presets, tiny_media_models

    assert set(TEXT_PRESETS) == set(model_presets.PRESETS)
    assert set(MEDIA_PRESETS) == set(tiny_media_models.MEDIA_PRESETS)


@pytest.mark.parametrize("has_qk_norm", [False, True])
def test_a_shape_is_written_by_shards_and_every_id_is_a_token(tmp_path, has_qk_norm):
    from lightrft.models.loading import load_causal_lm, load_tokenizer
    from lightrft.models.statements import vocabulary_of

    size = ModelSize(2, 64, 96, 2000, 4, 2, 16, True, not has_qk_norm, has_qk_norm)
    write_shape(tmp_path, size, lengths=20, shard_bytes=100_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model, tokenizer = load_causal_lm(str(tmp_path)), load_tokenizer(str(tmp_path))
    assert sum(parameter.numel() for parameter in model.parameters()) == size.parameters
    assert model.dtype == torch.float32
    assert model.config.dtype == torch.float32
    vocabulary = vocabulary_of(str(tmp_path))
    assert len(vocabulary.ends) == 2000 // 20
    assert vocabulary.num_tokens is None
    assert tokenizer.decode(tokenizer("What is é?")["input_ids"]) == "What is é?"
    assert tokenizer.decode([1999]) == " 1999"
    ids = torch.randint(300, 1800, (8, 16), generator=torch.Generator().manual_seed(0))
    chances = model(ids).logits.softmax(-1)[..., list(vocabulary.ends)].sum(-1)
    assert 1 / float(chances.mean()) == pytest.approx(20, rel=0.2)


def test_published_shapes_have_the_published_number_of_weights():
    published = {
        "qwen2.5-0.5b": 494_032_768,
        "qwen2.5-1.5b": 1_543_714_304,
        "qwen2.5-3b": 3_085_938_688,
        "qwen2.5-7b": 7_615_616_512,
        "qwen3-0.6b": 596_049_920,
        "qwen3-1.7b": 1_720_574_976,
        "qwen3-4b": 4_022_468_096,
        "qwen3-8b": 8_190_735_360,
    }
    assert {name: SHAPES[name].parameters for name in published} == published


def test_a_preset_with_lengths_has_as_many_ends(tmp_path):
    from lightrft.models.statements import vocabulary_of

    assert main(["init-model", str(tmp_path / "m"), "--lengths", "16"]) == 0
    assert len(vocabulary_of(str(tmp_path / "m")).ends) == 261 // 16
