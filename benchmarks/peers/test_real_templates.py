"""Calls through the 41 chat templates of published models that TRL ships: read back, or refused.

Runs with the group `peers` (`.ci/slow peers`).
"""

from __future__ import annotations

import json
import random
import re
from functools import partial
from pathlib import Path

import pytest
from tests.datasets import chat_families as families
from tests.datasets.present_families import WORDS
from tests.datasets.row_files import written
from tests.datasets.stage_ids import PROMPTS, require_alike
from tests.rollout.test_call_formats import TYPES, random_arguments

from lightrft.config import ConfigError, TrainConfig
from lightrft.datasets.supervised_rows import load_supervised
from lightrft.datasets.types import DataError
from lightrft.rollout.environments.call_formats import PARSERS
from lightrft.rollout.environments.calls import check_call, choose_parser

pytestmark = [pytest.mark.slow, pytest.mark.shard("peers")]
trl = pytest.importorskip("trl")

FOLDER = Path(trl.__file__).with_name("chat_templates")
READ = {
    "hermes": "qwen2_5 qwen3 qwen3_instruct_2507 qwen3_vl",
    "xml": "nemotron_3_5_lightning nemotron_3_nano nemotron_3_super nemotron_3_ultra "
    "qwen3_5_nothink qwen3_5_think qwen3_6 qwen3_8",
    "gemma": "diffusion_gemma gemma4 gemma4_v2 gemma4_v3 gemma4_v4 gemma4_v5",
    "glm": "glm4moe",
    "deepseek": "deepseekv3",
    "harmony": "gptoss",
    "invoke": "muse_glimmer",
    "lfm": "lfm2_2_5 lfm2_2_5_v2 lfm2_2_5_vl lfm2_v2",
    "llama": "llama3_1 llama3_2",
}
PARSER_OF = {name: parser for parser, names in READ.items() for name in names.split()}
# They write no calls.
REFUSED = {
    "cohere",
    "cohere2",
    "deepseek_r1_distill",
    "gemma",
    "gemma3",
    "idefics3",
    "lfm2",
    "llama3",
    "llava_next",
    "phi3",
    "phi3_5",
    "qwen2_5_vl",
    "smolvlm",
}
ENDS = ("<eos>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<turn|>", "<|call|>", "<|observation|>")


def tokenizer_of(name):
    template = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    return families.tokenizer_of(template, ("<bos>", "<eos>"), ())


def turn_of(tokenizer, arguments):
    """What a template writes of a call, without the end of the turn, and what stands before it."""
    call = {"id": "call00000", "type": "function"}
    call["function"] = {"name": "find_it", "arguments": arguments}
    asked = [{"role": "user", "content": "q"}]
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    opened = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([*asked, said], tokenize=False)
    before = opened if whole.startswith(opened) else opened.partition("<think>")[0]
    turn = whole.removeprefix(before).rstrip()
    for end in ENDS:
        turn = turn.removesuffix(end).rstrip()
    return turn, before


def test_each_is_read_or_refused():
    names = {path.stem for path in FOLDER.glob("*.jinja")}
    assert {name for name in names if not name.endswith("_training")} == {*PARSER_OF, *REFUSED}
    assert len(PARSER_OF) + len(REFUSED) == 41


@pytest.mark.parametrize("name", PARSER_OF)
def test_random_calls_come_back(name):
    draw, tokenizer = random.Random(3), tokenizer_of(name)
    assert choose_parser("auto", tokenizer, ()) is PARSERS[PARSER_OF[name]]
    for _ in range(20):
        chosen = random_arguments(draw)
        given = json.dumps(chosen) if name == "deepseekv3" else chosen
        turn, before = turn_of(tokenizer, given)
        (found,) = PARSERS[PARSER_OF[name]](turn, True, before)
        schema = {"find_it": {"parameters": {"properties": TYPES}}}
        assert (found.name, check_call(found, schema)) == ("find_it", chosen)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_template_without_calls_that_are_read_is_refused(name):
    with pytest.raises(ConfigError, match="writes no known format of calls"):
        choose_parser("auto", tokenizer_of(name), ())


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", sorted({*PARSER_OF, *REFUSED}))
def test_a_row_has_the_same_ids_in_every_stage_or_is_refused_by_all(tmp_path, name, prompt):
    found = require_alike(tmp_path, tokenizer_of(name), prompt)
    assert found is not None or prompt != "plain"
    # DeepSeek's leaves tools to the user's text.
    assert found is not None or prompt == "thinking" or name in {*REFUSED, "deepseekv3"}


# Names of special tokens in the templates of those families.
SPECIAL = re.compile(
    r"<[|\uff5c][^|\uff5c<>\s{}']+[|\uff5c]>|<\|[a-z_]+>|<[a-z_]+\|>|<(?:bos|eos)>|<sop>"
)
ENDS_OF_SEQUENCE = ("<|return|>", "<|im_end|>", "<|eot_id|>")
CALL = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "add", "arguments": {"text": "arg1"}},
}
# Whose rows are refused without thinking, and with it.
_LFM = {"lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl"}  # they mark a newline as generated
_NEMOTRON = {f"nemotron_3_{name}" for name in ("5_lightning", "nano", "super", "ultra")}
_NO_THINKING = {"qwen2_5", "qwen3_instruct_2507", "qwen3_vl", "qwen3_5_nothink", "lfm2_v2"}
_GEMMA = {"gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4"}  # they show it beside calls, or nowhere
UNTRAINED = {
    False: {*_LFM, *_NEMOTRON, "qwen3_5_think", "qwen3_6", "qwen3_8", "deepseekv3"},
    True: {*_LFM, *_NO_THINKING, *_GEMMA, "deepseekv3", "llama3_1", "llama3_2"},
}
TALK = [
    {"role": "user", "content": "ask0"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "res0", "name": "add", "tool_call_id": "call00000"},
    {"role": "assistant", "content": "say1"},
    {"role": "user", "content": "ask1"},
    {"role": "assistant", "content": "say2"},
]


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("name", PARSER_OF)
def test_what_the_assistant_says_is_trained_once_or_the_row_is_refused(tmp_path, name, thinks):
    template = tokenizer_of(name).chat_template
    special = sorted({*SPECIAL.findall(template)} - {"<bos>", "<eos>"})
    eos = next(
        (end for end in ("<|return|>", "<|im_end|>", "<|eot_id|>") if end in special), "<eos>"
    )
    tokenizer = families.tokenizer_of(template, ("<bos>", eos), special, pre_tokenizer=WORDS)
    talk, said = [dict(message) for message in TALK], ["arg1", "say1", "say2"]
    if thinks:
        for number in (1, 3, 5):
            talk[number]["reasoning_content"] = f"why{number}"
        said += ["why1", "why3", "why5"]
    path = written(tmp_path, [{"messages": talk}])
    config = TrainConfig(max_row_tokens=9999)
    load = partial(load_supervised, path, tokenizer, config, max_samples=9, split="train")
    if name in UNTRAINED[thinks]:
        with pytest.raises(DataError, match=r"template (drops|asks|marks)"):
            load()
        return
    rows = load().rows
    trained = [tokenizer.decode(row.token_ids[row.is_trained]) for row in rows]
    assert sorted(re.findall(r"(?:arg|say|why|ask|res)\d", "".join(trained))) == sorted(said)
