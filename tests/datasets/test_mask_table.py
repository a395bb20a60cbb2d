# ruff: noqa: RUF001
"""The mask table: ids and masks of thirteen families' conversations, and faults planted in each.

Of each family the table shows what its template does with turns, in our own words: what stands
around a user's and an assistant's message, what is written into an answer without thinking, and
what follows the end of a turn.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.datasets.chat_families import WORDS, tokenizer_of
from tests.datasets.row_files import written

from lightrft.config import TrainConfig
from lightrft.datasets.supervised_rows import load_supervised
from lightrft.datasets.types import DataError

CHAT = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "ok."},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "ll"},
]
THINKING = "<think>\n\n</think>\n\n"
# Name -> [ids, mask as text] of each row of CHAT.
GOLDEN = json.loads(Path(__file__).with_name("mask_table.json").read_text())


@dataclass(frozen=True)
class Family:
    """Texts of a template; `empty` stands in answers without thinking, but not in prompts.

    `last` ends the last turn where that differs from the others, `closes` ends the conversation.
    """

    special: tuple[str, ...]
    user: tuple[str, str]
    answer: str
    end: str
    after: str = ""
    begin: str = ""
    before: str = ""
    empty: str = ""
    last: str = ""
    closes: str = ""

    def template(self, start="", stop=""):
        """The template, with {% generation %} before the part `start` up to that of `stop`."""
        parts = {
            "answer": repr(self.answer),
            "empty": f"({self.empty!r} if loop.last else '')",
            "text": f"({self.before!r} + m.content)",
            "end": f"({self.last or self.end!r} if loop.last else {self.end!r})",
            "after": repr(self.after),
        }
        marks = {start: "{%- generation %}", stop: "{%- endgeneration %}"}
        turn = "".join(marks.get(name, "") + f"{{{{- {x} }}}}" for name, x in parts.items())
        asked, answered = map(repr, self.user)
        return (
            f"{{{{- {self.begin!r} }}}}{{%- for m in messages %}}{{%- if m.role == 'user' %}}"
            f"{{{{- {asked} + m.content + {answered} }}}}{{%- else %}}{turn}{{%- endif %}}"
            f"{{%- endfor %}}{{{{- {self.answer!r} if add_generation_prompt else "
            f"{self.closes!r} }}}}"
        )

    def tokenizer(self, template):
        ends = (None, self.last or self.end or self.special[-1])
        return tokenizer_of(template, ends, self.special, pre_tokenizer=WORDS)


IM = ("<|im_start|>", "<|im_end|>")
CHATML = Family(
    IM, ("<|im_start|>user\n", "<|im_end|>\n"), "<|im_start|>assistant\n", "<|im_end|>", "\n"
)
SYSTEM = "<|im_start|>system\nYou help.<|im_end|>\n"
COHERE = "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"
FAMILIES = {
    "ChatML": CHATML,
    "Qwen2.5": replace(CHATML, begin=SYSTEM),
    "Qwen3": replace(CHATML, empty=THINKING),
    "LFM2": replace(CHATML, special=(*IM, "<|startoftext|>"), begin="<|startoftext|>"),
    "Llama 3": Family(
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        ("<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"),
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
        begin="<|begin_of_text|>",
    ),
    "Gemma": Family(
        ("<bos>", "<start_of_turn>", "<end_of_turn>"),
        ("<start_of_turn>user\n", "<end_of_turn>\n"),
        "<start_of_turn>model\n",
        "<end_of_turn>",
        "\n",
        begin="<bos>",
    ),
    "GLM-4": Family(
        ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|endoftext|>"),
        ("<|user|>\n", ""),
        "<|assistant|>",
        "",
        begin="[gMASK]<sop>",
        before="\n",
    ),
    "Phi-3": Family(
        ("<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
        ("<|user|>\n", "<|end|>\n"),
        "<|assistant|>\n",
        "<|end|>",
        "\n",
        closes="<|endoftext|>",
    ),
    "DeepSeek V3": Family(
        ("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
        ("<｜User｜>", ""),
        "<｜Assistant｜>",
        "<｜end▁of▁sentence｜>",
        begin="<｜begin▁of▁sentence｜>",
    ),
    "Mistral": Family(
        ("<s>", "[INST]", "[/INST]", "</s>"),
        ("[INST] ", "[/INST]"),
        "",
        "</s>",
        begin="<s>",
        before=" ",
    ),
    "Zephyr": Family(("</s>",), ("<|user|>\n", "</s>\n"), "<|assistant|>\n", "</s>", "\n"),
    "gpt-oss": Family(
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"),
        ("<|start|>user<|message|>", "<|end|>"),
        "<|start|>assistant",
        "<|end|>",
        before="<|channel|>final<|message|>",
        last="<|return|>",
    ),
    "Cohere": Family(
        (*COHERE, "<|START_THINKING|>", "<|END_THINKING|>", "<|CHATBOT_TOKEN|>", "<|USER_TOKEN|>"),
        (COHERE[0] + "<|USER_TOKEN|>", COHERE[1]),
        COHERE[0] + "<|CHATBOT_TOKEN|>",
        COHERE[1],
        empty="<|START_THINKING|><|END_THINKING|>",
    ),
}
# Where each fault begins and ends what is marked as generated; right is from "text" to "after".
FAULTS = {
    "end of turn outside": ("text", "end"),
    "prompt inside": ("answer", "after"),
    "empty thinking inside": ("empty", "after"),
    "newline inside": ("text", ""),
}


def rows_of(folder, tokenizer):
    path = written(folder, [{"messages": CHAT}])
    return load_supervised(path, tokenizer, TrainConfig(), max_samples=9, split="train").rows


def as_table(rows):
    return [[row.token_ids.tolist(), "".join(map(str, row.is_trained.astype(int)))] for row in rows]


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_and_masks_are_those_of_the_table(tmp_path, name):
    family = FAMILIES[name]
    tokenizer = family.tokenizer(family.template())
    rows = rows_of(tmp_path, tokenizer)
    assert as_table(rows) == GOLDEN[name]
    said = "".join(tokenizer.decode(row.token_ids[row.is_trained]) for row in rows)
    first, last = family.last or family.end, family.last or family.end
    if name == "GLM-4":
        first = last = "<|user|>"
    assert said == f"{family.before}ok.{first}{family.before}ll{last}"


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "GLM-4"])
def test_marks_of_what_is_sampled_change_nothing(tmp_path, name):
    family = FAMILIES[name]
    tokenizer = family.tokenizer(family.template("text", "after"))
    assert as_table(rows_of(tmp_path, tokenizer)) == GOLDEN[name]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_fault_in_the_marks_of_a_template_ends_the_start_with_both_texts(tmp_path, name, fault):
    family = FAMILIES[name]
    if "thinking" in fault:
        family = replace(family, empty=family.empty or THINKING)
    if "newline" in fault:
        family = replace(family, after="\n")
    if "prompt" in fault and not family.answer:
        family = replace(family, answer="<s>")
    start, stop = FAULTS[fault]
    template = family.template(start, stop)
    if not stop:
        template = template.replace("{%- endif %}", "{%- endgeneration %}{%- endif %}")
    marked = r"marks .*ok\..* as generated, and what a model has to sample is .*ok\."
    # GLM's end of turn is another message, behind which the block is not shown any more.
    said = rf"rows.jsonl:1: message 2.*({marked}|ends in .*no special token)"
    with pytest.raises(DataError, match=said):
        rows_of(tmp_path, family.tokenizer(template))


def test_a_turn_that_ends_in_the_mark_of_the_next_one_cannot_be_marked(tmp_path):
    """Its end would never be trained."""
    family = FAMILIES["GLM-4"]
    with pytest.raises(DataError, match=r"marks '\\nok.' as .* to sample is '\\nok.<\|user\|>'"):
        rows_of(tmp_path, family.tokenizer(family.template("text", "after")))
