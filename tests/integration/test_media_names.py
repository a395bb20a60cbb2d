"""A vision-language model's parameters all reach the engine, under the engine's names."""

import pytest
from tests.engines.altered_engines import CopyingEngine, embedded
from tests.engines.syncs import failing
from tests.models.vision.tiny_families import TINY_FAMILIES, write_tiny_vision_model
from tests.models.vision.tiny_world import tiny, tower_of
from transformers import AutoModelForCausalLM

from lightrft.engines.media.families import family_of
from lightrft.models.actor import Actor
from lightrft.models.loading import ModelLoadError, load_causal_lm, load_model
from lightrft.strategy.weight_sync.parameter_source import ParameterSource, module_parameter_source
from lightrft.strategy.weight_sync.sync import WeightSync


def sync_without(engine, actor, names):
    """What a sync says if the source lacks some parameters."""
    source = module_parameter_source(actor)
    entries = tuple(entry for entry in source.entries if entry.checkpoint_name not in names)
    with failing("accounting") as caught:
        WeightSync(engine).sync(ParameterSource(source.owner, entries, None, source.tied_names))
    return caught.value


def modules_of(model):
    """The tower, and the projector, which may lie in it."""
    family = family_of(model.config)
    kind = family.model_type.split("_")[0]
    projector = dict.fromkeys(("qwen2", "qwen3", "glm4v"), "visual.merger")
    projector |= dict.fromkeys(("smolvlm", "idefics3"), "connector")
    (tower,) = (n for n, part in model.base_model.named_children() if part is tower_of(model))
    return [tower, projector.get(kind, "multi_modal_projector")]


@pytest.mark.parametrize("preset", TINY_FAMILIES)
def test_a_module_that_is_not_sent_ends_the_sync(preset):
    model, _ = tiny(preset)
    actor, engine = Actor(model), embedded(model, CopyingEngine)
    for module in modules_of(model):
        names = {n for n, _ in model.named_parameters() if n.startswith(f"model.{module}.")}
        assert names
        error = sync_without(engine, actor, names)
        assert set(error.names) == names
        assert f"model.{module}." in str(error)
        assert "needed by the engine, unknown to the trainer" in str(error)
    # Positive control: the whole of it is taken.
    assert WeightSync(engine).sync(module_parameter_source(actor)).num_verified_bytes > 0


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
