"""Every type of the installed transformers trains as transformers computes it, or is refused."""

import json
import shutil
from contextlib import nullcontext

import pytest
import torch
from PIL import Image
from tests.models.all_types import types
from tests.models.vision.tiny_families import write_tiny_vision_model
from tests.runs import lines
from tests.stages.test_proof_at_load import POLICY, reinforce

from lightrft.cli.main import main
from lightrft.config import TrainConfig
from lightrft.engines.media.families import language_model_class, placeholder_ids
from lightrft.models.loading import (
    ModelLoadError,
    load_causal_lm,
    load_processor,
    save_pretrained,
)
from lightrft.stages.start_checks import load_modality
from lightrft.tools.invariance.batch import draw_prompts
from lightrft.tools.model_presets import byte_level_tokenizer
from lightrft.trainer import train

ACCEPTED = (types.PACKED, types.PADDED)


def assert_computed_right(verdict):
    assert verdict.logprobs < 2e-5, verdict
    assert verdict.gradient < types.MAX_GRADIENT, verdict


@pytest.mark.parametrize(
    "model_type, outcome",
    [
        ("gemma4", types.PACKED),
        ("glm46v", types.PACKED),
        ("llama4", types.PADDED),
        ("lfm2_vl", types.PACKED),
        ("qwen3_5_moe", types.PACKED),
        ("nemotron", types.PADDED),
        # No attention of torch's, a mask for each head, layers of three kinds.
        ("gpt_oss", types.PACKED),
        ("doge", types.PADDED),
        ("recurrent_gemma", types.PACKED),
        ("bert", types.REFUSED),
        ("xlm", types.REFUSED),
        # A class of text in the table of models with towers.
        ("mistral4", types.PACKED),
    ],
)
def test_text_of_a_type_that_no_table_of_families_has(model_type, outcome):
    verdict, reason = types.examine(model_type), ""
    try:
        types.tiny_model(model_type)(input_ids=torch.ones(1, 4, dtype=torch.long))
    except AttributeError as error:  # Llama 4 of transformers 5.24
        outcome, reason = types.REFUSED, str(error)
    assert verdict.outcome == outcome, verdict
    assert reason in verdict.reason
    if outcome in ACCEPTED:
        assert_computed_right(verdict)


def test_a_model_whose_hidden_states_cannot_be_had_is_named():
    reason = types.examine("pix2struct").reason
    assert "Pix2StructForConditionalGeneration has no part with its embedding" in reason


@pytest.mark.full
def test_the_page_says_what_each_type_does():
    verdicts = [types.examine(name) for name in sorted({*types.TEXT, *types.IMAGES})]
    for verdict in verdicts:
        if verdict.outcome in ACCEPTED:
            assert_computed_right(verdict)
    images = [types.examine_images(name) for name in types.SIZES["images"]]
    _, _, rest = types.PAGE.read_text(encoding="utf-8").partition(types.BEGIN)
    assert rest.partition(types.END)[0].strip() == types.page(verdicts, images), (
        "python scripts/model_types.py"
    )


def saved(folder, model_type):
    """Write a random model of a type with a tokenizer of bytes; return its folder."""
    tokenizer = byte_level_tokenizer()
    config = types.tiny_config(model_type, vocabulary=len(tokenizer) + 30)
    torch.manual_seed(0)
    save_pretrained(language_model_class(config).from_config(config), tokenizer, folder)
    return str(folder)


@pytest.mark.parametrize(
    # Unknown towers, no processor, no beginning of texts, masks for each head, no last position.
    "model_type",
    ["ovis2", "lfm2_vl", "gemma3", "glm46v", "doge", "mamba"],
)
def test_types_that_no_table_has_train_on_text(model_type, tmp_path):
    model = saved(tmp_path / "model", model_type)
    summary = reinforce(
        model, tmp_path, lambda responses: [float(n % 2) for n in range(len(responses))]
    )
    before, after = (load_causal_lm(path).state_dict() for path in (model, summary.model_dir))
    assert before.keys() == after.keys()
    # The tower computes nothing for texts, and stays.
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert changed
    assert not any("vision" in name for name in changed)


def test_a_word_that_a_configuration_names_is_no_mark_of_unknown_towers():
    config = types.tiny_config("qwen3_omni_moe_thinker")
    config.user_token_id = 7
    assert placeholder_ids(config) == ()


def test_attention_that_a_file_names_need_not_be_installed(tmp_path):
    path = tmp_path / "model"
    saved(path, "qwen3")
    config = json.loads((path / "config.json").read_text())
    text = json.dumps(config | {"attn_implementation": "flash_attention_2"})
    (path / "config.json").write_text(text)
    assert load_causal_lm(str(path)).config._attn_implementation == "lightrft_short"


@pytest.mark.parametrize("has_file", [False, True])
def test_the_processor_of_unknown_towers_is_read_where_there_is_one(has_file, tmp_path):
    model = saved(tmp_path / "model", "ovis2")
    if has_file:
        (tmp_path / "model" / "processor_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="processor") if has_file else nullcontext():
        modality = load_modality(TrainConfig(pretrain=model), byte_level_tokenizer())
        assert modality.processor is None


def test_a_processor_of_unknown_towers_is_saved_and_gives_its_template(tmp_path):
    model = saved(tmp_path / "model", "ovis2")
    write_tiny_vision_model(tmp_path / "llava", "tiny-llava")
    template = load_processor(tmp_path / "llava").chat_template
    for file in (tmp_path / "llava").glob("*processor*"):
        shutil.copy(file, model)
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = None
    modality = load_modality(TrainConfig(pretrain=model), tokenizer)
    assert tokenizer.chat_template == template
    assert type(modality.processor).__name__ == "LlavaProcessor"
    assert not modality.encoder.reads_media
    assert draw_prompts(model, 0) == ()


UNKNOWN = "those of models of type 'video_llava' are not supported: its class has no pixel_values"


@pytest.mark.parametrize(
    "model_type, words",
    [
        ("video_llava", UNKNOWN),
        ("gemma3", "the model's folder has no processor: add its processor_con"),
    ],
)
def test_images_that_a_model_cannot_take_are_refused_in_one_line(
    model_type, words, tmp_path, capsys
):
    model = saved(tmp_path / "model", model_type)
    Image.new("RGB", (28, 28)).save(tmp_path / "a.png")
    row = {"prompt": "<image> What?", "completion": "b", "images": [str(tmp_path / "a.png")]}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 4)
    rows = ["--prompt_data", str(tmp_path / "rows.jsonl"), "--train_batch_size", "4"]
    code = main(["sft", "--pretrain", model, *rows, "--fsdp", "--output_dir", str(tmp_path / "r")])
    text = capsys.readouterr().err
    assert code == 4
    assert words in text
    assert "Traceback" not in text


def lower_case(responses):
    """Reward the share of lower-case letters."""
    return [sum(map(str.islower, text)) / max(1, len(text)) for text in responses]


@pytest.mark.full
@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe", "gemma4"])
def test_present_families_learn_with_packed_rows(model_type, tmp_path):
    model = saved(tmp_path / "model", model_type)
    options = {"rollout_batch_size": 4, "n_samples_per_prompt": 8, "train_batch_size": 32}
    train(
        model,
        [{"input": "abc " * number} for number in range(1, 5)],
        lower_case,
        output_dir=str(tmp_path / "run"),
        **{**POLICY, **options, "max_steps": None, "generate_max_len": 8},
        num_episodes=20,
        actor_learning_rate=1e-2,
        packing_samples=True,
    )
    rewards = [row["reward"] for row in lines(tmp_path / "run/metrics.jsonl")]
    assert sum(rewards[-3:]) > 2.5 * sum(rewards[:3])
