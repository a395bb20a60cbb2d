"""Rules of texts: one beginning, no end behind a prompt, and a length that is known in time."""

from pathlib import Path

import pytest
from tests.datasets.row_files import written
from tests.rules.stages import OF_PROMPTS, OF_ROWS, answered, cells, model_folder, read, reader_of

from lightrft.config import ConfigError, TrainConfig
from lightrft.datasets.types import DataError

BOS, EOS = 1, 2
WORDS = ["<unk>", "<s>", "</s>", "<|end|>", "\u2581", "\n", *"abcdefghijklmnopqrstuvwxyz"]


def like_llama(*, ends):
    """A tokenizer of the class of Llama, whose flags say what it adds."""
    from transformers import LlamaTokenizer

    vocabulary = {word: place for place, word in enumerate(WORDS)}
    return LlamaTokenizer(vocab=vocabulary, merges=[], add_bos_token=True, add_eos_token=ends)


def with_post_processor(*, ends):
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


def begins_once(stage, tmp_path):
    for build in FORMS:
        tokenizer = build(ends=False)
        for prompt in ("say", "<s>say"):
            ids, _ = read(stage, answered(stage, prompt, "x"), tokenizer, tmp_path)
            assert ids[0] == BOS
            assert ids.count(BOS) == 1, (build.__name__, prompt)
        begun, _ = read(stage, answered(stage, "<s>say", "x"), tokenizer, tmp_path)
        as_written = tokenizer(["<s>say"], add_special_tokens=False)["input_ids"][0]
        assert begun[: len(as_written) - 1] == as_written[:-1]


def prompt_is_open(stage, tmp_path):
    for build in FORMS:
        ids, is_trained = read(stage, answered(stage, "say", "x"), build(ends=True), tmp_path)
        prompt = [token for token, flag in zip(ids, is_trained, strict=True) if not flag]
        assert EOS not in prompt
        assert ids.count(EOS) == (any(is_trained) and 1)
        assert not any(is_trained) or ids[-1] == EOS


def text_of_a_client_begins_once():
    for build in FORMS:
        ids = chat_ids(build(ends=True)).text("say").token_ids
        assert ids[0] == BOS
        assert ids.count(BOS) == 1


def text_of_a_client_is_open():
    for build in FORMS:
        assert EOS not in chat_ids(build(ends=True)).text("say").token_ids


def chat_ids(tokenizer):
    from lightrft.datasets.chat_ids import ChatIds

    return ChatIds(tokenizer)


def own_prompt_is_open(tmp_path):

    from lightrft.datasets.supervised_rows import load_supervised
    from lightrft.stages.distillation.own_samples import prompt_of

    for build in FORMS:
        path = written(tmp_path, [answered("sft", "<s>say ", "x")])
        load = load_supervised(path, build(ends=True), TrainConfig(), max_samples=1, split="train")
        prompt = prompt_of(load.rows[0])
        assert EOS not in prompt
        assert prompt.count(BOS) == 1


def scored_text_begins_once():
    from types import SimpleNamespace

    from lightrft.rollout.model_rewards import OwnTexts

    for build in FORMS:
        for prompt in ("say", "<s>say"):
            rollout = SimpleNamespace(
                prompt=SimpleNamespace(text=prompt, messages=()),
                response_text="x",
                completion=SimpleNamespace(finish_reason="stop"),
            )
            ids = list(OwnTexts(build(ends=True))(rollout))
            assert (ids[0], ids[-1]) == (BOS, EOS)
            assert ids.count(BOS) == ids.count(EOS) == 1


_BY_TEMPLATE = "Its prompts are chats, whose template writes the special tokens itself."
_IDS = "Its rows hold the token ids that were sampled, and no text is encoded."

ONE_BEGINNING = cells(
    {
        f"{OF_ROWS}, {OF_PROMPTS}": begins_once,
        "distill on samples": own_prompt_is_open,
        "agents, serve": text_of_a_client_begins_once,
        "judge and reward models": scored_text_begins_once,
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
POSITIONS, NEW = 64, 12
# A prompt that leaves no room for a response, one that just leaves it, and a row beyond the model.
TOO_LONG, JUST, BEYOND = "a" * (POSITIONS - NEW), "a" * (POSITIONS - NEW - 1), "a" * POSITIONS


def options(folder, rows):
    path = written(folder, rows)
    tokenizer = with_post_processor(ends=False)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    model = model_folder(folder, tokenizer, max_position_embeddings=POSITIONS)
    return {
        "pretrain": str(model),
        "prompt_data": path,
        "eval_data": path,
        "eval_split": "train",
        "generate_max_len": NEW,
        "output_dir": str(folder / "run"),
        "fsdp": True,
        "train_batch_size": 1,
    }


def long_rows_are_left_out_and_counted(stage, tmp_path):
    from lightrft.stages.rows.row_inputs import read_rows

    rows = [answered(stage, prompt, "b") for prompt in ("a", BEYOND)]
    _, data, held_out = read_rows(TrainConfig(**options(tmp_path, rows)), reader_of(stage))
    assert (len(data), len(held_out)) == (1, 1)
    assert "dropped 1 over-long (first: " in data.summary


def prompts_without_room_are_left_out_and_counted(stage, tmp_path):
    from lightrft.models import load_tokenizer
    from lightrft.stages.policy.inputs import load_run_prompts

    config = TrainConfig(**options(tmp_path, [{"input": text} for text in (JUST, TOO_LONG)]))
    tokenizer = load_tokenizer(str(config.pretrain))
    read = load_run_prompts(config, tokenizer, for_evaluation=stage == "eval")
    assert [len(prompt.token_ids) for prompt in read.prompts] == [POSITIONS - NEW]
    assert "dropped 1 over-long (first: " in read.report.summary()
    with pytest.raises(ConfigError, match=f"got {POSITIONS}, expected less than the {POSITIONS}"):
        load_run_prompts(config.replaced({"generate_max_len": POSITIONS}), tokenizer)


def prompt_of_a_row_without_room_is_refused(tmp_path):
    from lightrft.stages.distillation.divergence_inputs import read_inputs

    taken = options(tmp_path, [{"prompt": JUST, "completion": "b"}])
    taken |= {
        "teacher": taken["pretrain"],
        "teacher_form": "reverse",
        "offpolicy_fraction": 0.5,
        "eval_data": None,
    }
    assert len(read_inputs(TrainConfig(**taken)).data) == 1
    taken |= options(tmp_path, [{"prompt": TOO_LONG, "completion": "b"}]) | {"eval_data": None}
    with pytest.raises(DataError, match=f"from 1 to prompt_max_len = {POSITIONS - NEW}, "):
        read_inputs(TrainConfig(**taken))


EPISODES = {
    "environments": {"environment": "lightrft.tools.quickstart.task:Nothing"},
    "tools": {"tools": ("FILE.py:look",)},
    "agents": {"agent": "FILE.py:play"},
}


def episodes_stay_within_the_context(stage, tmp_path):
    from lightrft.models import load_tokenizer
    from lightrft.stages.policy.inputs import load_run_prompts
    from lightrft.stages.start_checks import prompts_within_context

    # The template writes one token behind a text, and none before it.
    texts = (JUST, TOO_LONG)
    taken = options(tmp_path, [{"input": text} for text in texts])
    config = TrainConfig(**taken, **EPISODES[stage], apply_chat_template=True, max_turns=9)
    assert config.has_episodes
    bounded = config.replaced(prompts_within_context(config))
    assert bounded.max_episode_tokens == POSITIONS
    read = load_run_prompts(config, load_tokenizer(str(config.pretrain)))
    assert [len(prompt.token_ids) for prompt in read.prompts] == [POSITIONS - NEW]
    shorter = config.replaced({"prompt_max_len": 8, "max_len": 20})
    shorter = shorter.replaced(prompts_within_context(shorter))
    assert (shorter.prompt_max_len, shorter.max_episode_tokens) == (8, 20)


def data_check_counts_what_a_run_leaves_out(tmp_path, capsys):
    from lightrft.tools.data.data_command import run

    taken = options(tmp_path, [{"input": text} for text in (JUST, TOO_LONG)])
    (Path(str(taken["pretrain"])) / "model.safetensors").touch()
    model = ["--pretrain", str(taken["pretrain"])]
    command = ["check", str(taken["prompt_data"]), *model, "--generate_max_len", str(NEW)]
    assert run(command) == 0
    shown = capsys.readouterr().out
    assert f"over {POSITIONS - NEW} tokens" in shown
    assert "1 prompts can be trained on, 1 are left out as too long" in shown


LENGTHS = cells(
    {
        OF_ROWS: long_rows_are_left_out_and_counted,
        "train, eval": prompts_without_room_are_left_out_and_counted,
        "distill on samples": prompt_of_a_row_without_room_is_refused,
        "environments, tools, agents": episodes_stay_within_the_context,
        "data check": data_check_counts_what_a_run_leaves_out,
        "judge and reward models": "They read samples, whose lengths no row tells before the run.",
        "serve": "Requests come while it serves, and one without room is answered by an error.",
        "rows": "Its rows are samples of a run, which bounded their lengths.",
    }
)
