"""A model written from a GGUF file is the model that the file was made of."""

import json
import struct

import gguf
import pytest
import torch
from examples.smollm2.from_gguf import main
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# "Ġ 4" and "Ġ Ġ" tell whether a space before a digit belongs to it.
MERGES = [("Ġ", "Ġ"), ("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "hell"), ("Ċ", "Ċ"), ("Ġ", "4")]
VOCAB = [*MARKS, *bytes_to_unicode().values(), *("".join(pair) for pair in MERGES)]
CONFIGS = {"llama": LlamaConfig, "qwen3": Qwen3Config}


def source_tokenizer():
    """Byte-level BPE over single digits, as SmolLM2's."""
    bpe = models.BPE(vocab={token: i for i, token in enumerate(VOCAB)}, merges=MERGES)
    backend = Tokenizer(bpe)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=MARKS[1],
        eos_token=MARKS[2],
        unk_token=MARKS[0],
        pad_token=MARKS[2],
        chat_template=TEMPLATE,
    )


def source_model(architecture, seed=0):
    """Two layers, untied from the vocabulary's order: every tensor matters to the logits."""
    config = CONFIGS[architecture](
        vocab_size=len(VOCAB),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.2,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    return model


def interleaved(weight, heads):
    """Rows of each head as llama.cpp rotates them: halves (transformers) become pairs."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns)


def write_gguf(path, model, *, quantization=None, permutes=True, architecture=None, pre="smollm"):
    """Writes the file; with a quantization, the model's matrices become what the file holds."""
    config = model.config
    kind = config.model_type
    writer = gguf.GGUFWriter(str(path), architecture or kind)
    header = {
        "name": "tiny",
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
        "key_length": config.head_dim,
        "value_length": config.head_dim,
        "rope_dimension_count": config.head_dim,
        "layer_norm_rms_eps": config.rms_norm_eps,
        "rope_freq_base": 50000.0,
        "vocab_size": config.vocab_size,
        **tokenizer_header(pre),
    }
    for field, value in header.items():
        getattr(writer, f"add_{field}")(value)
    names = gguf.get_tensor_name_map(
        {v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[kind], config.num_hidden_layers
    )
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        stem, suffix = name.rsplit(".", 1)
        projection = stem.rsplit(".", 1)[-1]
        if quantization is not None and value.dim() == 2:
            packed = gguf.quantize(value.numpy(), quantization)
            value.copy_(torch.from_numpy(gguf.dequantize(packed, quantization)))
        if kind == "llama" and projection in heads and permutes:
            value = interleaved(value, heads[projection])
        array, dtype = value.contiguous().numpy(), None
        if quantization is not None and value.dim() == 2:
            array, dtype = gguf.quantize(array, quantization), quantization
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", array, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tokenizer_header(pre):
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    return {
        "tokenizer_model": "gpt2",
        "tokenizer_pre": pre,
        "token_list": VOCAB,
        "token_types": [control if token in MARKS else normal for token in VOCAB],
        "token_merges": [" ".join(pair) for pair in MERGES],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unk_token_id": 0,
        "pad_token_id": 2,
        "add_bos_token": False,
        "eot_token_id": 0,
        "chat_template": TEMPLATE,
    }


TEXTS = (
    "hello",
    "  hello\n\n 45  4 x4",
    "what is 23+45?\n\n  7 8",
    "é ü 日本 🙂 don't",
    " 44\t4\n4",
)
TALK = [
    {"role": "user", "content": "hello 4"},
    {"role": "assistant", "content": "7"},
    {"role": "user", "content": "  4 <|im_end|> x"},
]


def convert(tmp_path, model, **options):
    write_gguf(tmp_path / "model.gguf", model, **options)
    assert main([str(tmp_path / "a"), str(tmp_path / "model.gguf")]) == 0
    return AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.float32)


def largest_difference(model, other):
    token_ids = torch.arange(1, 121).reshape(4, 30) * 2 % model.config.vocab_size
    with torch.no_grad():
        return (model(token_ids).logits - other(token_ids).logits).abs().max().item()


@pytest.mark.parametrize(
    "architecture, quantization", [("llama", None), ("llama", "Q4_1"), ("qwen3", "Q8_0")]
)
def test_the_logits_are_those_of_the_source(tmp_path, capsys, architecture, quantization):
    source = source_model(architecture)
    kind = gguf.GGMLQuantizationType[quantization] if quantization else None
    # AutoTokenizer gives models of Qwen the split of Qwen, whatever their files say.
    pre = "qwen2" if architecture == "qwen3" else "smollm"
    loaded = convert(tmp_path, source, quantization=kind, pre=pre)
    assert architecture in capsys.readouterr().out
    assert largest_difference(source, loaded) < 1e-4
    assert largest_difference(source, source_model(architecture, seed=1)) > 0.1
    written = json.loads((tmp_path / "a/config.json").read_text())
    assert "quantization_config" not in written
    assert str(tmp_path) not in json.dumps(written)


def test_a_wrong_order_of_rows_would_show(tmp_path):
    source = source_model("llama")
    assert largest_difference(source, convert(tmp_path, source, permutes=False)) > 0.1


def test_tokenizer_template_and_ends_are_those_of_the_source(tmp_path):
    convert(tmp_path, source_model("llama"))
    source, loaded = source_tokenizer(), AutoTokenizer.from_pretrained(tmp_path / "a")
    for text in TEXTS:
        assert loaded(text)["input_ids"] == source(text)["input_ids"]
        assert loaded.decode(loaded(text)["input_ids"]) == text
    for options in ({"add_generation_prompt": True}, {"add_generation_prompt": False}):
        rendered = loaded.apply_chat_template(TALK, tokenize=False, **options)
        assert rendered == source.apply_chat_template(TALK, tokenize=False, **options)
        assert loaded(rendered)["input_ids"] == source(rendered)["input_ids"]
    assert (loaded.eos_token, loaded.pad_token, loaded.bos_token) == (
        "<|im_end|>",
        "<|im_end|>",
        "<|im_start|>",
    )
    assert loaded.model_max_length == 128
    settings = GenerationConfig.from_pretrained(tmp_path / "a")
    assert (settings.eos_token_id, settings.pad_token_id) == ([2, 0], 2)


def test_other_vocabularies_keep_the_split_of_transformers(tmp_path):
    """The control of the test above: without the file's word for it a space joins a digit."""
    convert(tmp_path, source_model("llama"), pre="default")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert loaded(TEXTS[1])["input_ids"] != source_tokenizer()(TEXTS[1])["input_ids"]


def require_refusal(folder, capsys, text, code=2):
    """Check that the file is refused in one line."""
    assert main([str(folder / "a"), str(folder / "model.gguf")]) == code
    error = capsys.readouterr().err.strip()
    assert error.count("\n") == 0
    assert text in error
    assert not (folder / "a").exists()


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.999])
def test_a_file_that_is_cut_off_is_one_line(tmp_path, capsys, share):
    write_gguf(tmp_path / "whole.gguf", source_model("llama"))
    content = (tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(content[: max(int(len(content) * share), 4)])
    require_refusal(tmp_path, capsys, "model.gguf is cut off or damaged")


def test_an_array_of_more_than_the_file_holds_is_one_line_at_once(tmp_path, capsys):
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    array = struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, 0, 2**60)
    (tmp_path / "model.gguf").write_bytes(header + array)
    require_refusal(tmp_path, capsys, "model.gguf is cut off or damaged")


def test_an_unknown_architecture_is_one_line(tmp_path, capsys):
    write_gguf(tmp_path / "model.gguf", source_model("llama"), architecture="quokka")
    require_refusal(tmp_path, capsys, "architecture quokka is not supported")


def test_what_is_no_gguf_file_is_one_line(tmp_path, capsys):
    require_refusal(tmp_path, capsys, "model.gguf")
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04 and more")
    require_refusal(tmp_path, capsys, "model.gguf is not a GGUF file: it starts with b'PK")


def test_a_missing_tensor_is_named(tmp_path, capsys, monkeypatch):
    add = gguf.GGUFWriter.add_tensor

    def leaves_one_out(self, name, *arguments, **options):
        if name != "blk.1.ffn_up.weight":
            add(self, name, *arguments, **options)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", leaves_one_out)
    write_gguf(tmp_path / "model.gguf", source_model("llama"))
    require_refusal(tmp_path, capsys, "model.layers.1.mlp.up_proj.weight")


def test_a_tokenizer_that_does_not_survive_being_loaded_is_refused(tmp_path, capsys):
    write_gguf(tmp_path / "model.gguf", source_model("qwen3"))
    require_refusal(tmp_path, capsys, "reads 'What is 23+45?")


def test_the_missing_package_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("examples.smollm2.from_gguf.find_spec", lambda name: None)
    require_refusal(tmp_path, capsys, "smollm2", code=3)
