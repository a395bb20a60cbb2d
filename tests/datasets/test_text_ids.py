"""Texts as ids: what a tokenizer writes around them, written once."""

import pytest
from tests.rules.texts import BOS, EOS, FORMS, WORDS, with_post_processor

from lightrft.config import TrainConfig
from lightrft.datasets import load_prompts
from lightrft.datasets.supervised_rows import load_supervised
from lightrft.datasets.text_ids import TextIds, frame_ids
from lightrft.datasets.types import DataError
from lightrft.engines.text import context_tokens

END = WORDS.index("<|end|>")
TEMPLATE = "{% for m in messages %}<s>{{ m.content }}<|end|>\n{% endfor %}"


@pytest.mark.parametrize("build", FORMS)
def test_a_tokenizer_shows_what_it_writes_around_texts(build):
    assert frame_ids(build(ends=True)) == ([BOS], [EOS])
    assert frame_ids(build(ends=False)) == ([BOS], [])


def test_a_tokenizer_that_encodes_texts_otherwise_beside_its_marks_is_refused():
    def tokenizer(texts, *, add_special_tokens):
        return {"input_ids": [[1, 5] if add_special_tokens else [7] for _ in texts]}

    with pytest.raises(DataError, match="what it writes around a text is not known"):
        frame_ids(tokenizer)


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("text", ["<s>a<|end|>", "<s>a<|end|>\n", "a<|end|>\n\n"])
def test_a_rendered_chat_is_trained_up_to_its_own_end(write, text, ends):
    tokenizer = with_post_processor(ends=ends)
    tokenizer.chat_template = TEMPLATE
    path = write("rows.jsonl", [{"text": text}])
    rows = load_supervised(str(path), tokenizer, TrainConfig(), max_samples=1, split="train")
    assert rows.rows[0].token_ids.tolist() == [BOS, WORDS.index("a"), END]


def test_a_text_without_an_end_gets_the_one_of_the_tokenizer():
    for ends in (False, True):
        whole = TextIds(with_post_processor(ends=ends), None)("ab")
        assert whole.token_ids == [BOS, WORDS.index("a"), WORDS.index("b"), EOS]
        assert whole.stops[:3] == [0, 1, 2]
        assert whole.stops[3] > 2
        assert whole.remarks == ()


def test_what_is_read_otherwise_is_said(write):
    tokenizer = with_post_processor(ends=True)
    path = write("rows.jsonl", [{"text": "<s>a</s>\n"}, {"text": "b"}])
    rows = load_supervised(str(path), tokenizer, TrainConfig(), max_samples=2, split="train")
    assert "1 texts hold their beginning, which is not written a second time" in rows.summary
    assert "1 texts hold their end, and what stands behind it is left out" in rows.summary
    path = write("prompts.jsonl", [{"input": "<s>a"}, {"input": "b"}])
    summary = load_prompts(path, tokenizer).report.summary()
    assert "1 texts hold their beginning" in summary
    assert "prompts are left without it" in summary
    path = write("plain.jsonl", [{"input": "b"}])
    assert (
        "text"
        not in load_prompts(path, with_post_processor(ends=False))
        .report.summary()
        .partition(":")[2]
    )


def with_spaces_before_words():
    """A tokenizer whose words hold the space before them, so that an answer may take one along."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "</s>", "say", " ", " a", "1", "b"]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(" ?[a-z]+| |1"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="</s>")


def test_the_key_of_a_prompt_does_not_depend_on_its_answer(write):
    prompts = ("say ", "say ", "say")
    answers = ("a", "1", "b")
    rows = [{"prompt": p, "completion": a} for p, a in zip(prompts, answers, strict=True)]
    path = write("rows.jsonl", rows)
    tokenizer = with_spaces_before_words()
    first, same, other = load_supervised(
        str(path), tokenizer, TrainConfig(), max_samples=3, split="train"
    ).rows
    assert first.prompt_ids.tolist() != same.prompt_ids.tolist()
    assert first.prompt_key == same.prompt_key != other.prompt_key


def test_the_context_of_a_model_is_known_under_its_own_name():
    from transformers import GPT2Config, MambaConfig, Phi3Config

    assert context_tokens(GPT2Config(n_positions=48)) == 48
    assert context_tokens(MambaConfig()) is None
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 128}
    phi = Phi3Config(**sizes, rope_parameters=rope, original_max_position_embeddings=32)
    # With room for one more token, as vLLM has it, the first frequencies still hold.
    assert context_tokens(phi) == 31
