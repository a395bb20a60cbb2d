"""Messages of rows: every form becomes the same ids, and nothing in them is dropped unsaid."""

import datetime
import json

import numpy as np
import pytest
from tests.datasets import chat_families
from tests.datasets.row_files import written
from tests.datasets.stage_ids import PROMPTS, require_alike
from tokenizers.pre_tokenizers import ByteLevel

from lightrft.config import TrainConfig
from lightrft.datasets import DataError, load_prompts
from lightrft.datasets.chat_ids import ChatIds
from lightrft.datasets.chat_turns import ChatTurns
from lightrft.datasets.messages import Conversation, read_messages
from lightrft.datasets.preference_rows import load_preferences
from lightrft.datasets.render import found_keys
from lightrft.datasets.supervised_rows import load_supervised

CHATML = """\
{%- if tools %}{{- '<|im_start|>tools\\n' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}\
{%- if m.reasoning_content %}{{- '<think>' + m.reasoning_content + '</think>' }}{%- endif %}\
{{- m.content }}{%- for k in m.tool_calls or [] %}\
{{- '<call>' + ({'name': k.function.name, 'arguments': k.function.arguments} | tojson) }}\
{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
# Writes roles and contents alone.
BARE = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}\
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
ASK = {"role": "user", "content": "Paris?"}
SAID = {"role": "assistant", "content": "20 degrees."}
RESULT = {"role": "tool", "content": "20"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}


def tokenizer_of(template=CHATML):
    pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=True)
    ends = (None, "<|im_end|>")
    return chat_families.tokenizer_of(
        template, ends, ("<|im_start|>", "<|im_end|>"), pre_tokenizer=pre_tokenizer
    )


def calling(arguments, **more):
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call], **more}


def trained(folder, row, *, template=CHATML, **options):
    """The text of a row of `sft` with what is trained between >> and <<."""
    from lightrft.stages.rows.row_inputs import marked_text

    tokenizer = tokenizer_of(template)
    data = load_supervised(
        written(folder, [row]), tokenizer, TrainConfig(**options), max_samples=9, split="train"
    )
    return "".join(marked_text(each, tokenizer) for each in data.rows)


def prompted(folder, row, *, template=CHATML, **options):
    """The text of a prompt of `train`."""
    config = TrainConfig(**{"apply_chat_template": True, "prompt_max_len": 4000} | options)
    (prompt,) = load_prompts(written(folder, [row]), tokenizer_of(template), config)
    return prompt.text


def preferred(folder, row, *, template=CHATML):
    """The text of the chosen answer of `prefer` with its prompt."""
    tokenizer = tokenizer_of(template)
    data = load_preferences(
        written(folder, [row]), tokenizer, TrainConfig(), max_samples=9, split="train"
    )
    return tokenizer.decode(data.rows[0].rows[0].token_ids)


def test_a_template_that_takes_arguments_as_json_gets_them_so(tmp_path):
    """One that joins texts refuses an object, one that prints it would write Python."""
    for way in ("'<call>' + k.function.arguments", "'<call>' ~ k.function.arguments"):
        template = CHATML.replace(
            "'<call>' + ({'name': k.function.name, 'arguments': k.function.arguments} | tojson)",
            way,
        )
        shown = trained(tmp_path, {"messages": [ASK, calling({"a": "b"})]}, template=template)
        assert '>><call>{"a": "b"}<|im_end|><<' in shown


def test_other_forms_of_calls_are_the_same_turn(tmp_path):
    value = json.dumps({"name": "weather", "arguments": {"a": 1}})
    said = {"name": "weather", "arguments": '{"a": 1}'}
    forms = [
        [ASK, calling('{"a": 1}')],
        [ASK, {"role": "assistant", "content": None, "function_call": said}],
        [ASK, {"role": "assistant", "content": None, "tool_calls": [said]}],
        [ASK, {"role": "assistant", "content": None, "tool_calls": json.dumps([said])}],
        [{"from": "human", "value": "Paris?"}, {"from": "function_call", "value": value}],
        [ASK, {"role": "tool_call", "content": value}],
    ]
    shown = {trained(tmp_path, {"messages": form}) for form in forms}
    assert len(shown) == 1
    results = [
        [*forms[0], RESULT, SAID],
        [
            *forms[4],
            {"from": "observation", "value": "20"},
            {"from": "gpt", "value": "20 degrees."},
        ],
        [*forms[1], {"role": "function", "content": "20"}, SAID],
        [*forms[5], {"role": "tool_response", "content": "20"}, SAID],
    ]
    assert len({trained(tmp_path, {"messages": form}) for form in results}) == 1


def test_nulls_of_saved_data_sets_are_left_out_and_said(tmp_path):
    datasets = pytest.importorskip("datasets")
    talks = [[ASK, calling({"city": "Paris"}), SAID], [ASK, calling({"x": 1, "y": 2}), SAID]]
    rows = [{"messages": talk} for talk in talks]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    tokenizer, limits = tokenizer_of(), {"max_samples": 9, "split": "train"}
    plain, saved = (
        load_supervised(path, tokenizer, TrainConfig(max_row_tokens=4000), **limits)
        for path in (written(tmp_path, rows), str(tmp_path / "saved"))
    )
    said = "nulls within calls and tools are left out"
    assert [data.summary.count(said) for data in (plain, saved)] == [0, 1]
    for one, other in zip(plain.rows, saved.rows, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()


@pytest.mark.parametrize("mark", ["weight", "train", "trainable", "loss"])
@pytest.mark.parametrize("value", [0, False, 0.0])
def test_turns_that_the_row_excludes_are_context(tmp_path, mark, value):
    bad = {"role": "assistant", "content": "bad", mark: value}
    good = {"role": "assistant", "content": "good", mark: not value}
    shown = trained(tmp_path, {"messages": [ASK, bad, ASK, good]})
    assert "\nbad<|im_end|>" in shown
    assert shown.endswith(">>good<|im_end|><<")
    spoken = [
        {"from": "human", "value": "Paris?"},
        {"from": "gpt", "value": "bad", mark: value},
        {"from": "human", "value": "Paris?"},
        {"from": "gpt", "value": "good"},
    ]
    assert trained(tmp_path, {"conversations": spoken}) == shown


def test_a_system_column_stands_before_the_messages_in_every_stage(tmp_path):
    spoken = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    begin = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na<|im_end|>"
    system = {"system": "Be brief."}
    assert trained(tmp_path, {**system, "conversations": spoken}).startswith(begin)
    texts = {**system, "prompt": "a", "completion": "b"}
    assert trained(tmp_path, texts, apply_chat_template=True).startswith(begin)
    assert prompted(tmp_path, {**system, "input": spoken[:1]}).startswith(begin)
    assert prompted(tmp_path, {**system, "input": "a"}).startswith(begin)
    user = {"role": "user", "content": "a"}
    better, worse = ({"role": "assistant", "content": text} for text in "bc")
    implicit = {**system, "chosen": [user, better], "rejected": [user, worse]}
    given = {**system, "prompt": [user], "chosen": [better], "rejected": [worse]}
    assert preferred(tmp_path, implicit).startswith(begin)
    assert preferred(tmp_path, given) == preferred(tmp_path, implicit)
    twice = {**system, "messages": [{"role": "system", "content": "Be long."}, ASK, SAID]}
    with pytest.raises(DataError, match=r"rows.jsonl:1: the row has a system message and a column"):
        trained(tmp_path, twice)
    with pytest.raises(DataError, match=r"rows.jsonl:1: the row has a system message and --system"):
        prompted(tmp_path, {**system, "input": "a"}, system_prompt="Be long.")


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), [TOOL["function"]]])
def test_tools_are_shown_before_messages_and_texts(tmp_path, tools):
    for text in (
        trained(tmp_path, {"messages": [ASK, SAID], "tools": tools}),
        prompted(tmp_path, {"input": "Paris?", "tools": tools}),
    ):
        assert text.startswith("<|im_start|>tools")
        assert '"name": "weather"' in text


def test_thinking_is_given_under_the_name_that_the_template_reads(tmp_path):
    template = CHATML.replace("reasoning_content", "thinking")
    for name in ("reasoning_content", "reasoning", "thinking"):
        row = {"messages": [ASK, {**SAID, name: "hm"}]}
        for text in (trained(tmp_path, row), trained(tmp_path, row, template=template)):
            assert ">><think>hm</think>20 degrees.<|im_end|><<" in text


def test_prompt_and_completion_may_be_messages(tmp_path):
    row = {"prompt": [ASK], "completion": [SAID, ASK, SAID]}
    expected = trained(tmp_path, {"messages": [ASK, SAID, ASK, SAID]})
    assert trained(tmp_path, row, apply_chat_template=True) == expected


def test_alpaca_is_read_as_turns(tmp_path):
    row = {"instruction": "Translate.", "input": "Hello", "output": "Bonjour"}
    shown = trained(tmp_path, row)
    assert "user\nTranslate.\n\nHello<|im_end|>" in shown
    assert shown.endswith(">>Bonjour<|im_end|><<")
    before = trained(tmp_path, {**row, "input": "", "history": [["a", "b"]]})
    assert "user\na<|im_end|>" in before
    assert "user\nTranslate.<|im_end|>" in before
    assert found_keys(row, TrainConfig()) == {"input_key": "instruction"}
    text = prompted(tmp_path, row, input_key="instruction")
    assert "user\nTranslate.\n\nHello<|im_end|>" in text
    with pytest.raises(DataError, match=r"rows.jsonl:1: .*Alpaca.*set --input_key instruction"):
        prompted(tmp_path, row)


@pytest.mark.parametrize(
    "columns, options, found",
    [
        ({"prompt": "a"}, {}, {"input_key": "prompt"}),
        ({"question": "a", "answer": "b"}, {}, {"input_key": "question"}),
        ({"messages": [ASK]}, {}, {"input_key": "messages", "apply_chat_template": True}),
        ({"prompt": [ASK]}, {"apply_chat_template": True}, {"input_key": "prompt"}),
        ({"input": "a", "prompt": "b"}, {}, {}),
        ({"question": "a", "prompt": "b"}, {}, {}),
        ({"prompt": "a"}, {"input_key": "text"}, {}),
        ({"other": "a"}, {}, {}),
    ],
)
def test_the_column_of_prompts_is_found_where_one_alone_may_be_meant(columns, options, found):
    assert found_keys(columns, TrainConfig(**options)) == found


def test_nan_is_no_label_and_whole_numbers_stay_whole(tmp_path):
    import pyarrow
    from pyarrow import parquet as files

    path = tmp_path / "labels.parquet"
    labels = [1.0, float("nan"), 3.0, 4.0]
    rows = {"input": ["a", "b", "c", "d"], "label": labels, "share": [0.5, None, 1.0, 2.0]}
    files.write_table(pyarrow.table(rows), path)
    data = load_prompts(path, tokenizer_of(), TrainConfig())
    assert [prompt.label for prompt in data] == ["1", None, "3", "4"]
    assert data.report.num_without_label == 1
    assert data[2].columns["share"] == 1.0


def test_nan_of_pandas_is_absent_in_rows_of_memory(tmp_path):
    from lightrft.trainer.inputs_from_python import GivenRows

    rows = [{"input": "a", "label": float("nan")}, {"input": "b", "label": np.float64("nan")}]
    given = GivenRows.of(rows, "prompt", tmp_path)
    assert [json.loads(line)["label"] for line in given.lines.splitlines()] == [None, None]


def test_a_block_of_thinking_that_the_prompt_opens_is_context():
    """The prompt holds the first mark of the empty block that the answer is rendered with."""
    block = "('<think></think>' if m.role == 'assistant' else '') + m.content +"
    template = BARE.replace("m.content +", block)
    template = template.replace("assistant\\n' }}{%- endif", "assistant\\n<think>' }}{%- endif")
    tokenizer = tokenizer_of(template)
    (turn,) = ChatTurns(ChatIds(tokenizer)).turns(Conversation((ASK, SAID)))
    assert tokenizer.decode(turn.token_ids[turn.start :]) == "20 degrees.<|im_end|>"


def test_a_parser_is_chosen_for_a_tokenizer_with_several_templates():
    from lightrft.rollout.environments.calls import choose_parser

    one, several = tokenizer_of(chat_families.chatml()), tokenizer_of()
    several.chat_template = {"default": BARE, "tool_use": chat_families.chatml()}
    assert choose_parser("auto", several, ()) is choose_parser("auto", one, ())


def test_arguments_that_json_does_not_have_are_refused():
    function = {"name": "f", "arguments": {"day": datetime.date(2026, 1, 2)}}
    said = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    with pytest.raises(DataError, match=r"message 1 of column 'm' has calls .* date is not JSON"):
        read_messages({"m": [said]}, "m")


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("family", chat_families.FAMILIES)
def test_a_row_has_the_same_ids_in_every_stage_or_is_refused_by_all(tmp_path, family, name):
    splits = ByteLevel(add_prefix_space=False, use_regex=family.startswith("Qwen"))
    tokenizer = chat_families.family_tokenizer(family, pre_tokenizer=splits)
    prompt = require_alike(tmp_path, tokenizer, name)
    # Families whose template shows neither tools nor calls; none of them shows thinking.
    bare = {"Gemma", "Phi", "DeepSeek"}
    drops = {"tools": bare, "calls": bare, "thinking": chat_families.FAMILIES}
    assert (prompt is None) == (family in drops.get(name, ()))


def test_thinking_has_the_same_ids_in_every_stage(tmp_path):
    thought = "('<think>' + m.reasoning_content + '</think>' if m.reasoning_content else '') +"
    tokenizer = tokenizer_of(BARE.replace("m.content +", f"{thought} m.content +"))
    assert "<think>hm</think>" in tokenizer.decode(require_alike(tmp_path, tokenizer, "thinking"))


def test_the_taken_column_is_said_in_a_line_and_its_data_are_checked(tmp_path, capsys):
    from lightrft.cli.preflight import check_data, found_columns

    def taken(row):
        path = written(tmp_path, [row])
        config = TrainConfig(prompt_data=path)
        return path, config.replaced(found_columns(config, path, "train", says=True))

    path, config = taken({"instruction": "Say.", "input": "Hello", "output": "Bonjour"})
    assert capsys.readouterr().out == f"{path}: prompts are taken by --input_key instruction\n"
    assert check_data(config).examples[0][0] == "Say.\n\nHello"
    path, config = taken({"messages": [ASK], "label": "x"})
    assert capsys.readouterr().out.endswith(" by --input_key messages --apply_chat_template\n")
    assert check_data(config).labels == ((f"{path}:1", "x"),)
    path = written(tmp_path, [{"messages": [ASK], "prompt": "b"}])
    assert not found_columns(TrainConfig(), path, "train", says=True)
    assert not found_columns(TrainConfig(), str(tmp_path / "none.jsonl"), "train", says=True)
