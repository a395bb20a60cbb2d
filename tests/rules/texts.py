"""Rules of texts: one beginning, no end behind a prompt, and a length that is known in time."""

from __future__ import annotations

from pathlib import Path

from tests.rules.stages import OF_PROMPTS, OF_ROWS, answered, cells, read

BOS, EOS = 1, 2
WORDS = ["<unk>", "<s>", "</s>", "<|end|>", "\u2581", "\n", *"abcdefghijklmnopqrstuvwxyz"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}<|end|>\n{% endfor %}"


def like_llama(*, ends: bool) -> object:
    """A tokenizer of the class of Llama, whose flags say what it adds."""
    from transformers import LlamaTokenizer

    vocabulary = {word: place for place, word in enumerate(WORDS)}
    return LlamaTokenizer(vocab=vocabulary, merges=[], add_bos_token=True, add_eos_token=ends)


def with_post_processor(*, ends: bool) -> object:
    """A tokenizer of no class of its own, whose post-processor says what it adds."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: place for place, word in enumerate(WORDS)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.add_special_tokens([AddedToken(word, special=True) for word in WORDS[1:4]])
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.post_processor = processors.TemplateProcessing(
        single=f"<s> $A{' </s>' * ends}", special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


FORMS = (like_llama, with_post_processor)


def begins_once(stage: str, tmp_path: Path) -> None:
    for build in FORMS:
        tokenizer = build(ends=False)
        for prompt in ("say", "<s>say"):
            ids, _ = read(stage, answered(stage, prompt, "x"), tokenizer, tmp_path)
            assert ids[0] == BOS
            assert ids.count(BOS) == 1, (build.__name__, prompt)
        begun, _ = read(stage, answered(stage, "<s>say", "x"), tokenizer, tmp_path)
        as_written = tokenizer(["<s>say"], add_special_tokens=False)["input_ids"][0]
        assert begun[: len(as_written) - 1] == as_written[:-1]


def prompt_is_open(stage: str, tmp_path: Path) -> None:
    for build in FORMS:
        ids, is_trained = read(stage, answered(stage, "say", "x"), build(ends=True), tmp_path)
        prompt = [token for token, flag in zip(ids, is_trained, strict=True) if not flag]
        assert EOS not in prompt
        assert ids.count(EOS) == (any(is_trained) and 1)
        assert not any(is_trained) or ids[-1] == EOS


def text_of_a_client_begins_once() -> None:
    for build in FORMS:
        ids = chat_ids(build(ends=True)).text("say").token_ids
        assert ids[0] == BOS
        assert ids.count(BOS) == 1


def text_of_a_client_is_open() -> None:
    for build in FORMS:
        assert EOS not in chat_ids(build(ends=True)).text("say").token_ids


def chat_ids(tokenizer: object) -> object:
    from lightrft.datasets.chat_ids import ChatIds

    return ChatIds(tokenizer, None)


def own_prompt_is_open(tmp_path: Path) -> None:
    from tests.rules.stages import written

    from lightrft.config import TrainConfig
    from lightrft.datasets.supervised_rows import load_supervised
    from lightrft.stages.distillation.own_samples import prompt_of

    for build in FORMS:
        path = str(written(tmp_path, answered("sft", "<s>say ", "x")))
        load = load_supervised(path, build(ends=True), TrainConfig(), max_samples=1, split="train")
        prompt = prompt_of(load.rows[0])
        assert EOS not in prompt
        assert prompt.count(BOS) == 1


_BY_TEMPLATE = "Its prompts are chats, whose template writes the special tokens itself."
_IDS = "Its rows hold the token ids that were sampled, and no text is encoded."

ONE_BEGINNING = cells(
    {
        f"{OF_ROWS}, {OF_PROMPTS}": begins_once,
        "distill on samples": own_prompt_is_open,
        "agents, serve": text_of_a_client_begins_once,
        "environments, tools": _BY_TEMPLATE,
        "rows": _IDS,
    }
)
OPEN_PROMPTS = cells(
    {
        f"{OF_ROWS}, {OF_PROMPTS}": prompt_is_open,
        "distill on samples": own_prompt_is_open,
        "agents, serve": text_of_a_client_is_open,
        "environments, tools": _BY_TEMPLATE,
        "rows": _IDS,
        "judge and reward models": "They read an answer behind its prompt, and sample nothing.",
    }
)
LENGTHS = cells({})
