"""Tiny random vision-language models of the families, with their processors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
import transformers as hf
from tokenizers import AddedToken

from lightrft.tools.model_presets import END, PAD, SYSTEM, byte_level_core, save_checked
from lightrft.tools.tiny_media_models import MEDIA_PRESETS, media_template

QWEN = MEDIA_PRESETS["tiny-qwen2.5-vl"]
MARKS, IMAGE, VIDEO = QWEN.marks, QWEN.shown["image"], QWEN.shown["video"]
PIXELS = {name: QWEN.parts["image_processor"][name] for name in ("min_pixels", "max_pixels")}
PATCH = 14
LLAMA = {"model_type": "llama", "head_dim": 32}
SIDE = 56
SQUARE = {"height": SIDE, "width": SIDE}


@dataclass(frozen=True, slots=True)
class TinyFamily:
    """Parts of the tiny model of a family.

    Args:
        marks: Special tokens of media.
        build: From the marks' ids and the text settings to the configuration and a function of
            the tokenizer and the chat template that makes the processor.
        image, video: What stands for a medium in the chat template; no video where the family
            reads none.
        named: Attributes of the tokenizer by which its processor finds the marks.
        words: Further tokens that implementations look up.
    """

    marks: tuple[str, ...]
    build: Callable
    image: str
    video: str = ""
    named: Mapping[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()

    def tokenizer(self):
        core = byte_level_core()
        core.add_tokens([AddedToken(word, normalized=False) for word in self.words])
        core.add_special_tokens(list(self.marks))
        return hf.PreTrainedTokenizerFast(
            tokenizer_object=core,
            pad_token=PAD,
            eos_token=END,
            bos_token=SYSTEM,
            padding_side="left",
            clean_up_tokenization_spaces=False,
            **({"extra_special_tokens": dict(self.named)} if self.named else {}),
        )


def qwen_ids(ids):
    """The ids of the marks, by the names of the Qwen configurations."""
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


def qwen_processor(kind):
    """A function that makes a processor with a tokenizer and a chat template."""
    return partial(
        kind,
        image_processor=hf.Qwen2VLImageProcessor(**PIXELS),
        video_processor=hf.Qwen2VLVideoProcessor(**PIXELS),
    )


def _qwen2_5_vl(ids, text):
    config = hf.Qwen2_5_VLConfig(
        text_config=text | {"rope_parameters": _rope([4, 6, 6])},
        vision_config=_qwen_vision(
            intermediate_size=128, out_hidden_size=128, window_size=56, fullatt_block_indexes=[1]
        ),
        **qwen_ids(ids),
    )
    return config, qwen_processor(hf.Qwen2_5_VLProcessor)


def _vision(**more):
    return {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": PATCH,
        "initializer_range": 0.1,
        **more,
    }


def _qwen_vision(**more):
    return {"depth": 2, "hidden_size": 64, "num_heads": 2, "initializer_range": 0.1, **more}


def _rope(sections, **more):
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections, **more}


def _qwen2_vl(ids, text):
    config = hf.Qwen2VLConfig(
        text_config=text | {"rope_parameters": _rope([4, 6, 6])},
        vision_config={
            "depth": 2,
            "embed_dim": 64,
            "num_heads": 2,
            "mlp_ratio": 2,
            "hidden_size": 128,
            "initializer_range": 0.1,
        },
        **qwen_ids(ids),
    )
    return config, qwen_processor(hf.Qwen2VLProcessor)


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def _qwen3_vl_moe(ids, text):
    return _qwen3_vl(ids, text | EXPERTS, hf.Qwen3VLMoeConfig)


def _qwen3_vl(ids, text, kind=hf.Qwen3VLConfig):
    config = kind(
        text_config=text
        | {"head_dim": 32, "rope_parameters": _rope([6, 5, 5], mrope_interleaved=True)},
        vision_config=_qwen_vision(
            intermediate_size=128,
            patch_size=PATCH,
            out_hidden_size=128,
            num_position_embeddings=64,
            deepstack_visual_indexes=[0],
        ),
        **qwen_ids(ids),
    )
    return config, _qwen3_processor()


def _qwen3_processor():
    half = [0.5] * 3
    return partial(
        hf.Qwen3VLProcessor,
        # The engines normalise images and videos with one mean and deviation.
        image_processor=hf.Qwen2VLImageProcessor(
            patch_size=PATCH, image_mean=half, image_std=half, **PIXELS
        ),
        video_processor=hf.Qwen3VLVideoProcessor(
            patch_size=PATCH, size={"shortest_edge": 56 * 56, "longest_edge": 112 * 112 * 8}
        ),
    )


def _qwen3_5_moe(ids, text):
    experts = EXPERTS | {"shared_expert_intermediate_size": 64}
    return _qwen3_5(ids, text | experts, hf.Qwen3_5MoeConfig)


def _qwen3_5(ids, text, kind=hf.Qwen3_5Config):
    linear = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 32, "value_head_dim": 32}
    config = kind(
        text_config=text
        | {f"linear_{name}": value for name, value in linear.items()}
        | {
            "head_dim": 32,
            "layer_types": ["linear_attention", "full_attention"],
            "rope_parameters": _rope([6, 5, 5], mrope_interleaved=True, partial_rotary_factor=1.0),
        },
        vision_config=_qwen_vision(
            intermediate_size=128, patch_size=PATCH, out_hidden_size=128, num_position_embeddings=64
        ),
        **qwen_ids(ids),
    )
    return config, _qwen3_processor()


def _glm4v(ids, text):
    marks = {
        "image_token_id": "<|image|>",
        "video_token_id": "<|video|>",
        "image_start_token_id": "<|begin_of_image|>",
        "image_end_token_id": "<|end_of_image|>",
        "video_start_token_id": "<|begin_of_video|>",
        "video_end_token_id": "<|end_of_video|>",
    }
    config = hf.Glm4vConfig(
        text_config=text | {"rope_parameters": _rope([4, 2, 2], partial_rotary_factor=0.5)},
        vision_config=_qwen_vision(
            intermediate_size=128, out_hidden_size=128, image_size=SIDE, patch_size=PATCH
        ),
        **{name: ids[mark] for name, mark in marks.items()},
    )
    # Of two frames, as this family counts.
    size = {"shortest_edge": 2 * 56 * 56, "longest_edge": 2 * 112 * 112}
    return config, partial(
        hf.Glm4vProcessor,
        image_processor=hf.Glm4vImageProcessor(size=size),
        video_processor=hf.Glm4vVideoProcessor(size=size),
    )


def _mistral3(ids, text):
    config = hf.Mistral3Config(
        text_config=text | {"model_type": "mistral", "head_dim": 32, "sliding_window": None},
        vision_config=_vision(model_type="pixtral", image_size=2 * SIDE, head_dim=32),
        image_token_index=ids["[IMG]"],
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )
    return config, partial(
        hf.PixtralProcessor,
        image_processor=hf.PixtralImageProcessor(size={"longest_edge": 2 * SIDE}, patch_size=PATCH),
        patch_size=PATCH,
        spatial_merge_size=2,
    )


def _internvl(ids, text):
    config = hf.InternVLConfig(
        text_config=text | {"head_dim": 32, "model_type": "qwen3"},
        vision_config=_vision(image_size=[SIDE, SIDE], patch_size=[PATCH, PATCH]),
        image_token_id=ids["<IMG_CONTEXT>"],
        image_seq_length=4,
        downsample_ratio=0.5,
        tie_word_embeddings=False,
    )
    return config, partial(
        hf.InternVLProcessor,
        image_processor=hf.GotOcr2ImageProcessor(
            size=SQUARE, crop_to_patches=True, min_patches=1, max_patches=4
        ),
        video_processor=hf.InternVLVideoProcessor(size=SQUARE),
        image_seq_length=4,
    )


def _gemma3(ids, text):
    config = hf.Gemma3Config(
        text_config=text
        | {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        vision_config=_vision(vision_use_head=False),
        mm_tokens_per_image=4,
        boi_token_index=ids["<start_of_image>"],
        eoi_token_index=ids["<end_of_image>"],
        image_token_index=ids["<image_soft_token>"],
        initializer_range=0.1,
    )
    return config, partial(
        hf.Gemma3Processor,
        image_processor=hf.Gemma3ImageProcessor(size=SQUARE, image_seq_length=4),
        image_seq_length=4,
    )


def _clip(ids, text):
    return {
        "text_config": text | LLAMA,
        "vision_config": _vision(model_type="clip_vision_model", projection_dim=64),
        "image_token_index": ids["<image>"],
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    }


_CLIP_TOKENS = {
    "patch_size": PATCH,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
    "image_token": "<image>",
}


def _llava(ids, text):
    config = hf.LlavaConfig(**_clip(ids, text), image_seq_length=16)
    return config, partial(
        hf.LlavaProcessor,
        image_processor=hf.CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=SQUARE),
        **_CLIP_TOKENS,
    )


_PINPOINTS = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]


def _llava_onevision(ids, text):
    config = hf.LlavaOnevisionConfig(
        text_config=text | {"model_type": "qwen2"},
        vision_config=_vision(model_type="siglip_vision_model", vision_use_head=False),
        image_token_index=ids["<image>"],
        video_token_index=ids["<video>"],
        image_grid_pinpoints=_PINPOINTS,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    return config, partial(
        hf.LlavaOnevisionProcessor,
        image_processor=hf.LlavaOnevisionImageProcessor(
            size=SQUARE, image_grid_pinpoints=_PINPOINTS
        ),
        video_processor=hf.LlavaOnevisionVideoProcessor(size=SQUARE),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        image_token="<image>",
        video_token="<video>",
    )


def _llava_next(ids, text):
    config = hf.LlavaNextConfig(**_clip(ids, text), image_grid_pinpoints=_PINPOINTS)
    return config, partial(
        hf.LlavaNextProcessor,
        image_processor=hf.LlavaNextImageProcessor(
            size={"shortest_edge": SIDE}, crop_size=SQUARE, image_grid_pinpoints=_PINPOINTS
        ),
        **_CLIP_TOKENS,
    )


def _idefics(kind, ids, text):
    return kind(
        text_config=text | LLAMA,
        vision_config=_vision(),
        image_token_id=ids["<image>"],
        scale_factor=2,
    )


_CUT = {"size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}}


def _smolvlm(ids, text):
    return _idefics(hf.SmolVLMConfig, ids, text), partial(
        hf.SmolVLMProcessor,
        image_processor=hf.SmolVLMImageProcessor(**_CUT),
        video_processor=hf.SmolVLMVideoProcessor(**_CUT | {"size": {"longest_edge": SIDE}}),
        image_seq_len=4,
    )


def _idefics3(ids, text):
    return _idefics(hf.Idefics3Config, ids, text), partial(
        hf.Idefics3Processor, image_processor=hf.Idefics3ImageProcessor(**_CUT), image_seq_len=4
    )


def _mllama(ids, text):
    ratios = [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]]
    config = hf.MllamaConfig(
        text_config=text
        | {
            "num_hidden_layers": 3,
            "cross_attention_layers": [1],
            "vocab_size": int(str(text["vocab_size"])) - 1,
        },
        vision_config=_vision(
            attention_heads=2,
            num_global_layers=1,
            max_num_tiles=4,
            vision_output_dim=128,
            intermediate_layers_indices=[0],
            supported_aspect_ratios=ratios,
        ),
        image_token_index=ids["<|image|>"],
        tie_word_embeddings=False,
    )
    return config, partial(
        hf.MllamaProcessor, image_processor=hf.MllamaImageProcessor(size=SQUARE, max_image_tiles=4)
    )


TINY_FAMILIES = {
    "tiny-qwen2-vl": TinyFamily(MARKS, _qwen2_vl, IMAGE, VIDEO),
    "tiny-qwen2.5-vl": TinyFamily(MARKS, _qwen2_5_vl, IMAGE, VIDEO),
    # The processor adds times and marks around each frame itself.
    "tiny-qwen3-vl": TinyFamily(MARKS, _qwen3_vl, IMAGE, "<|video_pad|>"),
    "tiny-internvl": TinyFamily(
        ("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        _internvl,
        "<IMG_CONTEXT>\n",
        "<video>\n",
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    ),
    "tiny-gemma3": TinyFamily(
        ("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        _gemma3,
        "<start_of_image>",
        named={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        words=("\n", "\n\n", "\n\n\n", "\n\n\n\n"),
    ),
    "tiny-llava": TinyFamily(("<image>",), _llava, "<image>"),
    "tiny-llava-onevision": TinyFamily(
        ("<image>", "<video>"),
        _llava_onevision,
        "<image>",
        "<video>",
        {"image_token": "<image>", "video_token": "<video>"},
    ),
    "tiny-llava-next": TinyFamily(("<image>",), _llava_next, "<image>"),
    "tiny-smolvlm": TinyFamily(
        ("<fake_token_around_image>", "<image>", "<global-img>"),
        _smolvlm,
        "<image>",
        "<video>",
        {
            "fake_image_token": "<fake_token_around_image>",
            "image_token": "<image>",
            "global_image_token": "<global-img>",
        },
    ),
    "tiny-qwen3-vl-moe": TinyFamily(MARKS, _qwen3_vl_moe, IMAGE, "<|video_pad|>"),
    "tiny-idefics3": TinyFamily(
        ("<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>"),
        _idefics3,
        "<image>",
    ),
    "tiny-qwen3.5": TinyFamily(MARKS, _qwen3_5, IMAGE, "<|video_pad|>"),
    "tiny-qwen3.5-moe": TinyFamily(MARKS, _qwen3_5_moe, IMAGE, "<|video_pad|>"),
    "tiny-glm4v": TinyFamily(
        (
            "<|begin_of_image|>",
            "<|image|>",
            "<|end_of_image|>",
            "<|begin_of_video|>",
            "<|video|>",
            "<|end_of_video|>",
        ),
        _glm4v,
        "<|begin_of_image|><|image|><|end_of_image|>",
    ),
    "tiny-mistral3": TinyFamily(("[IMG]", "[IMG_BREAK]", "[IMG_END]"), _mistral3, "[IMG]"),
    # The image's mark must be the last id: it has no row in the output projection.
    "tiny-mllama": TinyFamily(("<|image|>",), _mllama, "<|image|>"),
}


def build_tiny(preset, *, seed=0, initializer_range=0.1):
    """A random float32 model of a family, and its processor."""
    family = TINY_FAMILIES[preset]
    tokenizer = family.tokenizer()
    ids = dict(zip(family.marks, tokenizer.convert_tokens_to_ids(list(family.marks)), strict=True))
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": initializer_range,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config, build_processor = family.build(ids, text)
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    config.vision_config.initializer_range = initializer_range
    template = media_template({"image": family.image, "video": family.video})
    processor = build_processor(tokenizer=tokenizer, chat_template=template)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = hf.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for name, weight in model.named_parameters():
            # They begin with zeros, as if the model saw no images.
            if name.endswith(("mm_input_projection_weight", "cross_attn_attn_gate")):
                weight.data.normal_(std=0.1)
    return model, processor


def write_tiny_vision_model(directory, preset, seed=0, *, initializer_range=0.1):
    """Writes a random float32 model with its processor as a Hugging Face checkpoint."""
    model, processor = build_tiny(preset, seed=seed, initializer_range=initializer_range)
    sample = TINY_FAMILIES[preset].image + f"é 4+3?{END}"
    save_checked(model, processor.tokenizer, directory, sample=sample, processor=processor)
