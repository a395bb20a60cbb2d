"""A vision-language model's parameters all reach the engine, under the engine's names."""

import dataclasses

import pytest
import torch
from tests.engines.altered_engines import CopyingEngine
from tests.models.vision.tiny_families import TINY_FAMILIES, write_tiny_vision_model
from tests.models.vision.tiny_world import tiny
from transformers import AutoModelForCausalLM, MllamaForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from lightrft.engines import EngineConfig
from lightrft.engines.media.families import family_of
from lightrft.models.actor import Actor
from lightrft.models.loading import ModelLoadError, load_causal_lm, load_model
from lightrft.strategy.weight_sync.parameter_source import ParameterSource, module_parameter_source
from lightrft.strategy.weight_sync.sync import WeightSync
from lightrft.strategy.weight_sync.verification import WeightSyncError


def engine_of(model):
    return CopyingEngine(EngineConfig("hf", ""), module=model)


def planted_sync(engine, actor, change):
    """What a sync says if the entries of the source are changed."""
    source = module_parameter_source(actor)
    entries = tuple(changed for entry in source.entries for changed in change(entry))
    planted = ParameterSource(source.owner, entries, None, source.tied_names)
    before = engine.hash_parameters()
    with pytest.raises(WeightSyncError) as caught:
        WeightSync(engine).sync(planted)
    assert caught.value.check == "accounting"
    assert engine.hash_parameters() == before
    return caught.value


def modules_of(model):
    """The tower, and the projector, which may lie in it."""
    family = family_of(model.config)
    kind = family.model_type.split("_")[0]
    projector = dict.fromkeys(("qwen2", "qwen3", "glm4v"), "visual.merger")
    projector |= dict.fromkeys(("smolvlm", "idefics3"), "connector")
    return [*family.towers, projector.get(kind, "multi_modal_projector")]


@pytest.mark.parametrize("preset", TINY_FAMILIES)
def test_a_module_that_is_not_sent_ends_the_sync(preset):
    model, _ = tiny(preset)
    actor, engine = Actor(model), engine_of(model)
    for module in modules_of(model):
        names = {n for n, _ in model.named_parameters() if n.startswith(f"model.{module}.")}
        assert names
        error = planted_sync(
            engine,
            actor,
            lambda entry, names=names: [] if entry.checkpoint_name in names else [entry],
        )
        assert set(error.names) == names
        assert f"model.{module}." in str(error)
        assert "needed by the engine, unknown to the trainer" in str(error)
    # Positive control: the whole of it is taken.
    assert WeightSync(engine).sync(module_parameter_source(actor)).num_verified_bytes > 0


@pytest.mark.parametrize(
    "preset", ["tiny-qwen2.5-vl", "tiny-gemma3", "tiny-smolvlm", "tiny-mllama"]
)
def test_names_of_another_class_end_the_sync(preset):
    """As files have them, and as models of text alone do."""
    model, _ = tiny(preset)
    actor, engine = Actor(model), engine_of(model)
    inner = f"model.{'text' if preset == 'tiny-smolvlm' else 'language'}_model."
    # The engine ties it as well: it is filled by the embedding, whatever that is called.
    tied = {"lm_head.weight"} if preset == "tiny-gemma3" else set()

    def renamed(new):
        def change(entry):
            name = entry.checkpoint_name.replace(inner, new)
            return [dataclasses.replace(entry, checkpoint_name=name)]

        return change

    text = {n for n, _ in model.named_parameters() if n.startswith(inner)}
    assert text
    for new in ("language_model.model.", "model."):
        error = planted_sync(engine, actor, renamed(new))
        assert set(error.names) == text.union(tied, (name.replace(inner, new) for name in text))


def test_a_class_of_text_models_is_known_for_three_families_only():
    """transformers refuses to build one for the others."""
    known = {p for p in TINY_FAMILIES if type(tiny(p)[0].config) in MODEL_FOR_CAUSAL_LM_MAPPING}
    assert known == {"tiny-gemma3", "tiny-mllama", "tiny-qwen3.5"}


@pytest.mark.parametrize("preset", ["tiny-gemma3", "tiny-mllama", "tiny-qwen2.5-vl"])
def test_a_class_of_text_models_is_refused_or_is_the_right_one(preset, tmp_path):
    write_tiny_vision_model(tmp_path, preset, seed=1)
    own = load_causal_lm(str(tmp_path))
    for module in modules_of(own):
        assert any(name.startswith(f"model.{module}.") for name, _ in own.named_parameters())
    if preset == "tiny-gemma3":  # whose class of text models has images
        assert type(load_model(AutoModelForCausalLM, str(tmp_path), "float32")) is type(own)
        return
    # The class that there is leaves the tower in the file.
    message = "53 unexpected" if preset == "tiny-mllama" else "Unrecognized configuration class"
    with pytest.raises(ModelLoadError, match=message):
        load_model(AutoModelForCausalLM, str(tmp_path), "float32")


def test_a_model_of_text_is_no_source_of_a_model_with_images():
    model, _ = tiny("tiny-mllama")
    with torch.device("meta"):
        text = MllamaForCausalLM(model.config.get_text_config())
    text = text.to_empty(device="cpu")
    with pytest.raises(WeightSyncError, match=r"model\.vision_model\.") as caught:
        WeightSync(engine_of(model)).sync(module_parameter_source(text))
    assert caught.value.check == "accounting"
