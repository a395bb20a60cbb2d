"""Rules of messages: what a row says in them is read by every stage, or refused by it."""

import json

import pytest
from tests.datasets.row_files import written
from tests.datasets.test_messages import ASK, SAID, tokenizer_of
from tests.rules import stages
from tests.rules.stages import OF_ROWS, cells, model_folder

from lightrft.config import TrainConfig
from lightrft.datasets.types import DataError

# Asks for keys, as templates of published models do; writes calls and thinking.
CHATML = """\
{%- if tools %}{{- '<|im_start|>tools\\n' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content }}\
{%- if 'tool_calls' in m %}{%- for k in m.tool_calls %}\
{{- '<call>' + ({'name': k.function.name, 'arguments': k.function.arguments} | tojson) }}\
{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
TOKENIZER = tokenizer_of(CHATML)
WORSE = {"role": "assistant", "content": "Who knows."}
RESULT = {"role": "tool", "content": "20", "tool_call_id": "call00001"}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"city": "text"}}},
    {"type": "function", "function": {"name": "g", "parameters": {"x": 1, "y": 2}}},
]
OF_PROMPTS = "train, eval, distill on samples, environments, tools, data check"
ENDPOINT = "agents, serve"
_SCORES = "They read what was sampled as text, behind a prompt that train has rendered."
_IDS = "Its rows hold the token ids that were sampled, and no message is read."


def calling(*arguments):
    """An assistant's message with a call of `f`, without arguments or with some."""
    function = {"name": "f", **({"arguments": arguments[0]} if arguments else {})}
    call = {"id": "call00001", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def row_of(stage, talk, **columns):
    """A row of a stage that asks what a talk asks, with an answer where the stage has one."""
    if stage in ("prefer", "reward"):
        return {"prompt": talk, "chosen": [SAID], "rejected": [WORSE], **columns}
    return {"messages": [*talk, SAID] if stage in OF_ROWS else talk, **columns}


def config_of(stage, **options):
    """Options of a stage whose prompts, if it samples, are messages."""
    if stage in OF_ROWS:
        return TrainConfig(max_row_tokens=4000, **options)
    episodes = {"environments": {"environment": "e.py:E"}, "tools": {"tools": ("t.py:f",)}}
    asks = {"input_key": "messages", "apply_chat_template": True, "prompt_max_len": 4000}
    return TrainConfig(**{**asks, **episodes.get(stage, {}), **options})


def load(stage, path, **options):
    """The texts of all rows as a stage reads them, trained answers included, and its summary."""
    rows, summary = stages.load(stage, path, TOKENIZER, config_of(stage, **options))
    return [TOKENIZER.decode(ids) for ids, _ in rows], summary


def read(stage, folder, talk, **columns):
    """The text of one row of a stage."""
    (text,), _ = load(stage, written(folder, [row_of(stage, talk, **columns)]))
    return text


def asked(talk, **more):
    """The text that a client's messages become, in the endpoint of agents and in `serve`."""
    from lightrft.rollout.agents.conversations import template_messages
    from lightrft.rollout.agents.messages import read_chat
    from lightrft.tools.serve.chat_model import ChatModel

    chat = ChatModel(TOKENIZER, TrainConfig()).chat_ids
    call = read_chat({"model": "m", "messages": list(talk), **more})
    return TOKENIZER.decode(chat.prompt(template_messages(call.messages), call.tools).token_ids)


def nulls_of_arrow_are_stripped(stage, tmp_path):
    pytest.importorskip("pyarrow")
    columns = {} if stage in ("environments", "tools") else {"tools": TOOLS}
    rows = [
        row_of(stage, [ASK, calling({"city": "Paris"}), {**RESULT, "name": "f"}], **columns),
        row_of(stage, [ASK, calling({"x": 1, "y": 2}), RESULT], **columns),
        row_of(stage, [ASK], **columns),
    ]
    texts, _ = load(stage, written(tmp_path, rows))
    padded, _ = load(stage, written(tmp_path, rows, "rows.parquet"))
    assert padded == texts
    assert "null" not in str(texts)
    assert "<call>" not in texts[2]


def arguments_are_text_or_object(stage, tmp_path):
    texts = {
        read(stage, tmp_path, [ASK, calling(arguments), RESULT])
        for arguments in ({"city": "Paris"}, '{"city": "Paris"}')
    }
    (text,) = texts
    assert '<call>{"name": "f", "arguments": {"city": "Paris"}}' in text


def arguments_of_a_client_are_text():
    from lightrft.rollout.agents.http_server import HttpError

    text = asked([ASK, calling('{"city": "Paris"}'), RESULT])
    assert '<call>{"name": "f", "arguments": {"city": "Paris"}}' in text
    with pytest.raises(HttpError, match="a call has an id, a name, arguments"):
        asked([ASK, calling({"city": "Paris"}), RESULT])


def sampled_calls(arguments):
    """Arguments of a call that a model samples for a tool."""
    from lightrft.rollout.environments.call_formats import Marked, parse_json_body

    parse = Marked("<tool_call>", "</tool_call>", parse_json_body)
    text = f'<tool_call>{{"name": "f"{arguments}}}</tool_call>'
    return [call.arguments for call in parse(text, True)]


def arguments_of_samples_are_an_object(stage, tmp_path):
    from lightrft.rollout.environments.call_formats import MalformedCallError

    arguments_are_text_or_object(stage, tmp_path)
    assert sampled_calls(', "arguments": {"city": "Paris"}') == [{"city": "Paris"}]
    # What a model samples is shown to it again: it learns the one form of its template.
    with pytest.raises(MalformedCallError, match="the arguments of f must be an object"):
        sampled_calls(f', "arguments": {json.dumps("{}")}')


NOTHING = ((), (None,), ("null",), ("",), ("{}",), ({},))


def calls_need_no_arguments(stage, tmp_path):
    for arguments in NOTHING:
        text = read(stage, tmp_path, [ASK, calling(*arguments), RESULT])
        assert '<call>{"name": "f", "arguments": {}}' in text


def calls_of_a_client_need_no_arguments():
    for arguments in ("", "null", "{}"):
        text = asked([ASK, calling(arguments), RESULT])
        assert '<call>{"name": "f", "arguments": {}}' in text


def calls_of_rows_and_samples_need_no_arguments(stage, tmp_path):
    calls_need_no_arguments(stage, tmp_path)
    for rest in ("", ', "arguments": {}', ', "arguments": null'):
        assert sampled_calls(rest) == [{}]


PARTS_OF_TEXT = [{"type": "text", "text": "What is "}, {"type": "text", "text": "1?"}]


def parts_are_joined(stage, tmp_path):
    text = read(stage, tmp_path, [{"role": "user", "content": PARTS_OF_TEXT}])
    assert "user\nWhat is 1?<|im_end|>" in text
    assert text == read(stage, tmp_path, [{"role": "user", "content": "What is 1?"}])


def parts_of_a_client_are_joined():
    talk = [{"role": "user", "content": PARTS_OF_TEXT}]
    assert "user\nWhat is 1?<|im_end|>" in asked(talk)


BEGUN = [ASK, {"role": "assistant", "content": "It is"}]


def a_begun_answer_is_refused(stage, tmp_path):
    row = row_of(stage, BEGUN)
    if stage in ("sft", "distill on rows"):
        row = {"prompt": BEGUN, "completion": [SAID]}
    options = {"apply_chat_template": True} if "completion" in row else {}
    with pytest.raises(DataError, match=r"assistant's message 'It is', .*lightrft sft"):
        load(stage, written(tmp_path, [row]), **options)


def a_begun_answer_of_a_client_is_refused():
    from lightrft.rollout.agents.http_server import HttpError

    with pytest.raises(HttpError, match="the last message must not be the assistant's"):
        asked(BEGUN)


def unread_names_are_said(stage, tmp_path):
    row = row_of(stage, [{**ASK, "mood": "good"}], text="x", instruction="y")
    _, summary = load(stage, written(tmp_path, [row]))
    assert "not read: columns" in summary
    for name in ("instruction", "keys of messages mood"):
        assert name in summary


def data_check_says_unread_names(tmp_path, capsys):
    from lightrft.tools.data.data_command import run

    model = model_folder(tmp_path, TOKENIZER)
    (model / "model.safetensors").touch()
    row = row_of("train", [{**ASK, "mood": "good"}], instruction="y")
    command = ["check", written(tmp_path, [row]), "--pretrain", str(model), "--input_key"]
    assert run([*command, "messages", "--apply_chat_template"]) == 0
    shown = capsys.readouterr().out
    assert "not read: columns" in shown
    for name in ("instruction", "keys of messages mood"):
        assert name in shown


def unknown_names_of_a_client_are_refused():
    from lightrft.rollout.agents.http_server import HttpError

    with pytest.raises(HttpError, match=r"messages\[0\].mood is not supported"):
        asked([{**ASK, "mood": "good"}])
    with pytest.raises(HttpError, match="mood is not supported"):
        asked([ASK], mood="good")


def marked_turns_are_untrained(stage, tmp_path):
    bad = {"role": "assistant", "content": "bad", "weight": 0}
    path = written(tmp_path, [{"messages": [ASK, bad, ASK, SAID]}])
    ((ids, is_trained),), _ = stages.load(stage, path, TOKENIZER, config_of(stage))
    trained = [token for token, flag in zip(ids, is_trained, strict=True) if flag]
    assert TOKENIZER.decode(trained) == "20 degrees.<|im_end|>"


def a_judged_answer_that_is_marked_untrained_is_refused(stage, tmp_path):
    row = {**row_of(stage, [ASK]), "chosen": [{**SAID, "weight": 0}]}
    with pytest.raises(DataError, match="is marked untrained"):
        load(stage, written(tmp_path, [row]))


def a_label_that_is_nan_is_absent(stage, tmp_path):
    rows = [{"messages": [ASK], "label": label} for label in (1.0, float("nan"))]
    for name in ("rows.jsonl", "rows.parquet"):
        path = written(tmp_path, rows, name)
        _, summary = load(stage, path)
        if stage == "data check":
            assert "label=None" in summary
        else:
            assert "1 without label" in summary


def a_judgement_that_is_nan_is_no_judgement(stage, tmp_path):
    row = {"prompt": "a", "completion": "b", "label": float("nan")}
    with pytest.raises(DataError, match=r"expected|label"):
        load(stage, written(tmp_path, [row]))
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    for columns in ({"margin": float("nan")}, {"score_chosen": float("nan"), "score_rejected": 1}):
        texts, _ = load(stage, written(tmp_path, [{**pair, **columns}]))
        assert texts == load(stage, written(tmp_path, [pair]))[0]


NULLS = cells(
    {
        f"{OF_ROWS}, {OF_PROMPTS}": nulls_of_arrow_are_stripped,
        "agents": "Its prompts are those of train, and what its program sends is JSON.",
        "serve": "Its requests are JSON, whose objects have no keys of other rows.",
        "judge and reward models": _SCORES,
        "rows": _IDS,
    }
)
ARGUMENTS = cells(
    {
        f"{OF_ROWS}, train, eval, distill on samples, data check": arguments_are_text_or_object,
        "environments, tools": arguments_of_samples_are_an_object,
        ENDPOINT: arguments_of_a_client_are_text,
        "judge and reward models": _SCORES,
        "rows": _IDS,
    }
)
BARE_CALLS = cells(
    {
        f"{OF_ROWS}, train, eval, distill on samples, data check": calls_need_no_arguments,
        "environments, tools": calls_of_rows_and_samples_need_no_arguments,
        ENDPOINT: calls_of_a_client_need_no_arguments,
        "judge and reward models": _SCORES,
        "rows": _IDS,
    }
)
PARTS = cells(
    {
        f"{OF_ROWS}, {OF_PROMPTS}": parts_are_joined,
        ENDPOINT: parts_of_a_client_are_joined,
        "judge and reward models": _SCORES,
        "rows": _IDS,
    }
)
BEGUN_ANSWERS = cells(
    {
        f"{OF_ROWS}, {OF_PROMPTS}": a_begun_answer_is_refused,
        ENDPOINT: a_begun_answer_of_a_client_is_refused,
        "judge and reward models": _SCORES,
        "rows": _IDS,
    }
)
UNREAD = cells(
    {
        f"{OF_ROWS}, train, eval, distill on samples": unread_names_are_said,
        "data check": data_check_says_unread_names,
        ENDPOINT: unknown_names_of_a_client_are_refused,
        "environments, tools": "Their reset is given every column and every key of a row.",
        "judge and reward models": "Rewards are given every column that is in no prompt.",
        "rows": "It writes columns, and reads the records of a run alone.",
    }
)
UNTRAINED = cells(
    {
        "sft, distill on rows": marked_turns_are_untrained,
        "prefer, reward": a_judged_answer_that_is_marked_untrained_is_refused,
        "train, eval, distill on samples": "Of a row the prompt is read, and no prompt is trained.",
        "environments, tools, agents": "Turns of a row are a prompt, and samples are trained.",
        "judge and reward models": "They score answers, and no turn is trained.",
        "serve": "Nothing is trained while a model is served.",
        "rows": "Its rows mark what was sampled, by the record of the run.",
        "data check": "It marks tokens with the reader of the stage that it checks for.",
    }
)
NOT_A_NUMBER = cells(
    {
        OF_PROMPTS: a_label_that_is_nan_is_absent,
        "prefer, reward": a_judgement_that_is_nan_is_no_judgement,
        "sft, distill on rows": "Its rows have answers, and no column is a label.",
        "agents": "Its rows, and their labels, are read as those of train.",
        "judge and reward models": "They are given the labels that train has read.",
        "serve": "Requests have no labels, and NaN is no JSON there.",
        "rows": "Its scores are rewards of a run, which are finite.",
    }
)
