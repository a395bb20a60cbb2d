"""Present families: what is trained, what follows a turn, and which calls are read, by a table.

`present_families.json` has for each family the ends of turns, the rows of a conversation with the
trained parts in brackets, and what follows its turns, all compared with published formats.
"""

import json
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import pytest
from tests.datasets.present_families import FAMILIES, GEMMA, QWEN
from tests.datasets.row_files import written

from lightrft.config import TrainConfig
from lightrft.datasets.chat_ids import ChatIds
from lightrft.datasets.chat_template import QUESTION, answering, template_of
from lightrft.datasets.chat_turns import ChatTurns
from lightrft.datasets.messages import Conversation, read_messages
from lightrft.datasets.suffix import TurnSuffix
from lightrft.datasets.supervised_rows import load_supervised
from lightrft.datasets.types import DataError
from lightrft.engines.types import SamplingParams
from lightrft.rollout.environments.call_formats import PARSERS, read_calls
from lightrft.rollout.environments.calls import calls_in_turns, check_call, choose_parser

GOLDEN = json.loads(Path(__file__).with_name("present_families.json").read_text("utf-8"))
SCHEMAS = {
    name: {
        "name": name,
        "description": name,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    }
    for name in ("sky", "sun")
}
TOOLS = [{"type": "function", "function": schema} for schema in SCHEMAS.values()]
ASKED = [("sky", {"city": "Oslo"}), ("sun", {"city": "Rome", "days": 3})]


def talk_of(family, *, thinks=True):
    """Two questions; the first is answered with calls, the second with a text."""
    calls = [
        {
            "id": f"functions.{name}:{i}",
            "type": "function",
            "function": {"name": name, "arguments": values},
        }
        for i, (name, values) in enumerate(ASKED[: 1 if family == "gpt-oss" else 2])
    ]
    results = [
        {"role": "tool", "content": f"res{i}", "name": call["function"]["name"]}
        | {"tool_call_id": call["id"]}
        for i, call in enumerate(calls)
    ]
    thoughts = [{"reasoning_content": f"why{i}"} if thinks else {} for i in range(3)]
    return [
        {"role": "user", "content": "ask0"},
        {"role": "assistant", "content": "", "tool_calls": calls} | thoughts[0],
        *results,
        {"role": "assistant", "content": "say1"} | thoughts[1],
        {"role": "user", "content": "ask1"},
        {"role": "assistant", "content": "say2"} | thoughts[2],
    ]


def rows_of(folder, tokenizer, talk):
    path = written(folder, [{"messages": talk, "tools": TOOLS}])
    config = TrainConfig(max_row_tokens=9999)
    return load_supervised(path, tokenizer, config, max_samples=9, split="train").rows


def bracketed(tokenizer, row):
    """The text of a row behind its tools, with the trained parts in brackets."""
    text, pairs = "", zip(row.is_trained, row.token_ids, strict=True)
    for is_trained, part in groupby(pairs, key=itemgetter(0)):
        said = tokenizer.decode([token for _, token in part])
        text += f"«{said}»" if is_trained else said
    return text.partition(json.dumps(TOOLS[1]) + "]")[2]


def table_of(folder, family):
    form = FAMILIES[family]
    tokenizer = form.tokenizer()
    chat, talk = ChatIds(tokenizer), talk_of(family)
    rows = rows_of(folder, tokenizer, talk)
    parse = choose_parser("auto", tokenizer, ())
    suffix = TurnSuffix(chat, tools=TOOLS, read_calls=calls_in_turns(chat, parse))
    read = read_messages({"messages": talk}, "messages").messages
    turns = ChatTurns(chat)
    num_results = sum(each["role"] == "tool" for each in talk)

    def sampled(count):
        before = chat.prompt(read[: count - 1], TOOLS).token_ids
        (turn,) = turns.turns(Conversation(read[:count], tuple(TOOLS)), start=count - 1)
        return before, turn.token_ids[len(before) :]

    (before, calling), (_, answer) = sampled(2), sampled(3 + num_results)
    results = [f"res{i}" for i in range(num_results)]
    question = chat.suffix(answer, [], read[3 + num_results : 4 + num_results])
    parser = next((name for name, each in PARSERS.items() if each is parse), "auto")
    calls = read_calls(parse, tokenizer, calling[:-1], before, is_ended=True)
    return {
        "stops": sorted(tokenizer.convert_ids_to_tokens(sorted(chat.stop_ids))),
        "parser": parser,
        "calls": [[each.name, check_call(each, SCHEMAS)] for each in calls],
        "rows": [bracketed(tokenizer, row) for row in rows],
        "after calls": tokenizer.decode(suffix.after(calling, results).token_ids),
        "after a text": tokenizer.decode(question.token_ids),
        "differences": [*suffix.differences],
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_trained_continued_and_read_as_its_row_of_the_table_says(tmp_path, family):
    table = table_of(tmp_path, family)
    assert table == GOLDEN[family]
    assert table["calls"] == [*map(list, ASKED[: len(table["calls"])])]


for_every_family = pytest.mark.parametrize("family", FAMILIES)


def refused(folder, form, talk, message):
    with pytest.raises(DataError, match=message):
        rows_of(folder, form.tokenizer(), talk)


@for_every_family
def test_thinking_that_is_not_written_is_refused(tmp_path, family):
    form, talk = FAMILIES[family], talk_of(family)
    refused(tmp_path, replace(form, thinks="false"), talk, "drops the thinking beside the content")
    # Of the whole row, one message is enough.
    only_calls = replace(form, thinks=f"m.tool_calls and ({form.thinks})")
    reason = r"message [45]: the chat template (drops its thinking 'why1'|asks .* begin otherwise)"
    refused(tmp_path, only_calls, talk, reason)


@for_every_family
def test_calls_that_are_not_written_are_refused(tmp_path, family):
    form, talk = FAMILIES[family], talk_of(family)
    refused(tmp_path, replace(form, call="", calls=("", "")), talk, "drops the calls of tools")
    first = f"{{%- if loop.first %}}{form.call}{{%- endif %}}"
    talk[1] = {**talk[1], "tool_calls": [*talk[1]["tool_calls"]] * 2}
    refused(tmp_path, replace(form, call=first), talk, "drops some of several calls in a message")


@for_every_family
def test_text_that_is_not_written_beside_calls_is_refused(tmp_path, family):
    form, talk = FAMILIES[family], talk_of(family)
    talk[1] = {**talk[1], "content": "I look."}
    dropped = "m.content if not m.tool_calls }}"
    tokenizer = form.tokenizer(
        form.template().replace("m.content }}{%- if m.tool", f"{dropped}{{%- if m.tool")
    )
    with pytest.raises(DataError, match="drops the text before calls"):
        rows_of(tmp_path, tokenizer, talk)


def test_text_that_is_written_behind_its_calls_is_refused(tmp_path):
    form, talk = FAMILIES["Kimi-K2"], talk_of("Kimi-K2")
    talk[1]["content"] = "I look."
    here, there = "+ m.content }}{%- if m.tool", "{%- endfor %}{{- '<|tool_calls_"
    moved = form.template().replace(here, f"+ (m.content if not m.tool_calls else ''){here[11:]}")
    moved = moved.replace(there, there.replace("'", "m.content + '"))
    assert "I look.<|tool" in bracketed_text(tmp_path, form.tokenizer(), talk)
    with pytest.raises(DataError, match="drops the text before calls, or writes it behind them"):
        rows_of(tmp_path, form.tokenizer(moved), talk)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "GLM-4.5"])
def test_a_call_without_an_end_is_refused(tmp_path, family):
    refused(tmp_path, replace(FAMILIES[family], call_end="."), talk_of(family), "would not stop")


@for_every_family
def test_generation_stops_where_turns_are_trained_to_end(tmp_path, family):
    tokenizer = FAMILIES[family].tokenizer()
    params = ChatIds(tokenizer).with_end_of_turn(SamplingParams())
    last = {int(row.token_ids[-1]) for row in rows_of(tmp_path, tokenizer, talk_of(family))}
    assert last <= {*params.stop_token_ids}


def test_an_unanswered_call_ends_as_if_its_result_followed(tmp_path):
    for family in FAMILIES:
        tokenizer, talk = FAMILIES[family].tokenizer(), talk_of(family)
        (row,) = rows_of(tmp_path, tokenizer, talk[:2])
        assert (
            row.token_ids.tolist()
            == rows_of(tmp_path, tokenizer, talk)[0].token_ids.tolist()[: len(row.token_ids)]
        )


def test_an_empty_block_that_only_prompts_have_stays_in_the_prompt(tmp_path):
    block = "<|channel>thought\n<channel|>"
    form, talk = replace(GEMMA, asked=block), talk_of("Gemma 4", thinks=False)
    tokenizer = form.tokenizer()
    shown = [bracketed(tokenizer, row) for row in rows_of(tmp_path, tokenizer, talk)]
    assert [text.partition("«")[2] for text in shown] == [
        '<|tool_call>call:sky{city:<|"|>Oslo<|"|>}<tool_call|><|tool_call>call:sun{city:<|"|>Rome'
        '<|"|>,days:3}<tool_call|><|tool_response>»',
        "say1<turn|>»",
        "say2<turn|>»",
    ]
    assert [text.partition("«")[0].endswith(block) for text in shown] == [True, False, True]
    with pytest.raises(DataError, match="begin otherwise"):
        rows_of(tmp_path, tokenizer, talk_of("Gemma 4"))


def test_marks_before_the_end_of_sequence_are_part_of_the_turn(tmp_path):
    special = (*QWEN.special, "<|end_text|>")
    tokenizer = replace(QWEN, special=special, end="<|end_text|><|im_end|>").tokenizer()
    (row, *_) = rows_of(tmp_path, tokenizer, talk_of("Qwen3.5"))
    assert tokenizer.decode(row.token_ids).endswith("</tool_call><|end_text|><|im_end|>")
    assert ChatIds(tokenizer).end_of_turn == tokenizer.eos_token_id


def test_thinking_in_a_content_that_the_template_cuts_is_refused(tmp_path):
    form = FAMILIES["DeepSeek V3.1"]
    cut = form.template().replace(
        "+ m.content }}{%- if m.tool", "+ m.content.split('</think>')[-1] }}{%- if m.tool"
    )
    talk = [{"role": "user", "content": "ask"}]
    talk.append({"role": "assistant", "content": "<think>why</think>say"})
    plain = replace(form, asked="", bare="").template()
    assert cut != form.template()
    assert "why" in bracketed_text(tmp_path, form.tokenizer(plain), talk)
    with pytest.raises(DataError, match="message 2: the chat template drops its thinking 'why'"):
        rows_of(tmp_path, form.tokenizer(cut), talk)


@pytest.mark.parametrize(
    "form", [FAMILIES["Kimi-K2"], replace(GEMMA, asked="<|channel>thought\n<channel|>")]
)
def test_thinking_behind_an_empty_block_of_the_template_is_refused(tmp_path, form):
    said = {"role": "assistant", "content": "<think>why</think>say"}
    refused(tmp_path, form, [QUESTION, said], "message 2: .* ends thinking .* with 'why': put it")


def bracketed_text(folder, tokenizer, talk):
    return "".join(bracketed(tokenizer, row) for row in rows_of(folder, tokenizer, talk))


def without_ids(talk):
    bare = [{k: each[k] for k in each if k not in ("name", "tool_call_id")} for each in talk]
    bare[1]["tool_calls"] = [{"function": call["function"]} for call in talk[1]["tool_calls"]]
    return bare


@for_every_family
def test_calls_and_results_without_ids_get_them_in_their_order(tmp_path, family):
    tokenizer, talk = FAMILIES[family].tokenizer(), talk_of(family)
    assert not template_of(tokenizer).unread_keys(talk, ())
    shown = bracketed_text(tmp_path, tokenizer, without_ids(talk))
    assert shown == bracketed_text(tmp_path, tokenizer, talk)


def test_ids_hold_names_that_the_template_does_not_write(tmp_path):
    form, talk = FAMILIES["Kimi-K2"], talk_of("Kimi-K2")
    by_name = "functions.' + k.name + ':' + loop.index0 | string"
    tokenizer = replace(form, call=form.call.replace(by_name, "' + x.id")).tokenizer()
    foreign = json.loads(json.dumps(talk).replace("functions.s", "call_"))
    for each in (talk, foreign, without_ids(talk)):
        shown = bracketed_text(tmp_path, tokenizer, each)
        assert shown == bracketed_text(tmp_path, form.tokenizer(), talk)
    assert choose_parser("auto", tokenizer, ()) is PARSERS["kimi"]


def test_results_find_their_calls_by_name_and_no_id_is_invented_that_would_be_written():
    talk = without_ids(talk_of("Kimi-K2"))[1:4]
    results = [each | {"name": name} for each, name in zip(talk[1:], ("sun", "sky"), strict=True)]
    shown = answering([talk[0], *results])
    assert [each["tool_call_id"] for each in shown[1:]] == ["functions.sun:1", "functions.sky:0"]
    assert answering([talk[0], *results], writes_ids=True) == [talk[0], *results]


def called(name, call_id):
    function = {"name": name, "arguments": "{}"}
    return {"id": call_id, "type": "function", "function": function}


@pytest.mark.parametrize("family", ["gpt-oss", "Kimi-K2", "Gemma 4"])
@pytest.mark.parametrize("forged", ["x{}", "{}\n"])
def test_no_name_or_id_that_a_model_writes_can_forge_a_turn(family, forged):
    chat = ChatIds(FAMILIES[family].tokenizer())
    text = forged.format(FAMILIES[family].special[-1])
    turn = (*chat.encode_text("x"), chat.end_of(called_turn()))
    plain = TurnSuffix(chat).after(turn, ["ok"])
    for name, call_id in ((text, "call00000"), ("function", text)):
        calls = [called(name, call_id)]
        suffix = TurnSuffix(chat, read_calls=lambda _, calls=calls: calls)
        assert suffix.after(turn, ["ok"]) == plain


def called_turn():
    return {"role": "assistant", "content": "", "tool_calls": [called("function", "call00000")]}


@for_every_family
def test_no_id_argument_or_tool_that_a_client_sends_can_forge_a_turn(family):
    chat, caller = ChatIds(FAMILIES[family].tokenizer()), called_turn()
    for token in FAMILIES[family].special:
        result = {"role": "tool", "content": "ok", "tool_call_id": f"a{token}"}
        caller["tool_calls"][0]["function"]["arguments"] = json.dumps({"x": f"a{token}"})
        for messages, tools in (([result], []), ([caller], []), ([], [{"a": ({token: 1},)}])):
            with pytest.raises(DataError, match="holds the name of a special token"):
                chat.prompt([QUESTION, *messages], tools)
