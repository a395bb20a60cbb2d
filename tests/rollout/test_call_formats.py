# ruff: noqa: RUF001
"""Calls of tools as model families write them, and the proof by their chat templates."""

import contextlib
import json
import random

import pytest
from tests.datasets import chat_families as families
from tests.rollout.stages import call

from lightrft.config import ConfigError
from lightrft.rollout.environments.call_formats import (
    PARSERS,
    MalformedCallError,
    ToolCall,
    hermes_calls,
    xml_calls,
)
from lightrft.rollout.environments.calls import check_call, choose_parser

TURNS = """\
{%%- for m in messages %%}{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') }}\
{%%- for k in m.tool_calls or [] %%}{%%- set f = k.function %%}%s{%%- endfor %%}\
{{- '<|im_end|>\\n' }}{%%- endfor %%}\
{%%- if add_generation_prompt %%}{{- '<|im_start|>assistant\\n' }}{%%- endif %%}"""
XML = """\
{{- '<tool_call>\\n<function=' + f.name + '>\\n' }}{%- for n, v in f.arguments | items %}\
{{- '<parameter=' + n + '>\\n' + (v if v is string else (v | tojson if v is mapping or (v is \
sequence) else v | string)) + '\\n</parameter>\\n' }}{%- endfor %}\
{{- '</function>\\n</tool_call>' }}"""
GLM = """\
{{- '\\n<tool_call>' + f.name }}{%- for n, v in f.arguments | items %}\
{{- '\\n<arg_key>' + n + '</arg_key>\\n<arg_value>' + (v if v is string else v | tojson) + \
'</arg_value>' }}{%- endfor %}{{- '\\n</tool_call>' }}"""
DEEPSEEK = """\
{{- '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + f.name + '<｜tool▁sep｜>' + f.arguments + \
'<｜tool▁call▁end｜><｜tool▁calls▁end｜>' }}"""
LFM = """\
{{- '<|tool_call_start|>[' + f.name + '(' }}{%- for n, v in f.arguments | items %}\
{{- n + '=' + (v | tojson) + (', ' if not loop.last else '') }}{%- endfor %}\
{{- ')]<|tool_call_end|>' }}"""
GEMMA = """\
{%- macro show(v) %}{%- if v is string %}{{- '<|"|>' + v + '<|"|>' }}{%- elif v is mapping %}\
{{- '{' }}{%- for n, x in v | items %}{{- n + ':' }}{{- show(x) }}\
{{- ',' if not loop.last else '' }}{%- endfor %}{{- '}' }}{%- elif v is sequence %}{{- '[' }}\
{%- for x in v %}{{- show(x) }}{{- ',' if not loop.last else '' }}{%- endfor %}{{- ']' }}\
{%- else %}{{- v | tojson }}{%- endif %}{%- endmacro %}\
{{- '<|tool_call>call:' + f.name }}{{- show(f.arguments) }}{{- '<tool_call|>' }}"""
KIMI = """\
{{- '<|tool_call_begin|>functions.' + f.name + ':0<|tool_call_argument_begin|>' + \
(f.arguments | tojson) + '<|tool_call_end|>' }}"""
INVOKE = """\
{{- '<minimax:tool_call>\\n<invoke name="' + f.name + '">\\n' }}\
{%- for n, v in f.arguments | items %}{{- '<parameter name="' + n + '">' + \
(v if v is string else v | tojson) + '</parameter>\\n' }}{%- endfor %}\
{{- '</invoke>\\n</minimax:tool_call>' }}"""
HARMONY = """\
{%- for m in messages %}{%- if m.tool_calls %}{{- '<|start|>assistant<|channel|>commentary \
to=functions.' + m.tool_calls[0].function.name + ' <|constrain|>json<|message|>' + \
(m.tool_calls[0].function.arguments | tojson) + '<|call|>' }}{%- else %}\
{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
THINKS = "{{- '<|im_start|>assistant\\n<think>\\n' }}"
TEMPLATES = {
    "xml": TURNS % XML,
    "glm": TURNS % GLM,
    "deepseek": TURNS % DEEPSEEK,
    "kimi": TURNS % KIMI,
    "invoke": TURNS % INVOKE,
    "lfm": TURNS % LFM,
    "gemma": TURNS % GEMMA,
    "harmony": HARMONY,
}


def written(first, call, last, between=", "):
    """A template of calls with JSON: ID, NAME and JSON stand for the parts of one."""
    for mark, value in ("ID", "k.id"), ("NAME", "f.name"), ("JSON", "(f.arguments | tojson)"):
        call = call.replace(mark, f"' + {value} + '")
    return (
        f"{{{{- {first!r} if loop.first else {between!r} }}}}{{{{- '{call}' }}}}"
        f"{{{{- {last!r} if loop.last else '' }}}}"
    )


NAMED = '{"name": "NAME", "arguments": JSON}'
# Formats of no parser's name, as published families write them.
WRITTEN = {
    "Command A": written(
        "<|START_ACTION|>[\n",
        '{"tool_call_id": "ID", "tool_name": "NAME", "parameters": JSON}',
        "\n]<|END_ACTION|>",
        ",\n",
    ),
    "Command R": written("Action: ```json\n[", '{"tool_name": "NAME", "parameters": JSON}', "]```"),
    "Granite 3": written("<|tool_call|>[", NAMED, "]"),
    "Nemotron": written("<TOOLCALL>[", NAMED, "]</TOOLCALL>"),
    "InternLM": written("<|action_start|><|plugin|>\n", NAMED, "<|action_end|>", "\n"),
    "xLAM": written("[", NAMED, "]"),
    "Hunyuan": written(
        "<tool_calls>", "<tool_call>NAME\\n```json\\nJSON\\n```</tool_call>", "</tool_calls>", "\n"
    ),
    "Apertus": written("<|tools_prefix|>[", '{"NAME": JSON}', "]<|tools_suffix|>"),
    "Llama 3 of one's own tools": written("", "<function=NAME>JSON</function>", "", ""),
    "OpenAI": written(
        "<tools>[", '{"id": "ID", "function": ' + NAMED + ', "type": "function"}', "]</tools>"
    ),
}


def tokenizer_of(template):
    return families.tokenizer_of(template, (None, "<|im_end|>"), families.IM)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_that_the_template_writes_is_read_back(name):
    tokenizer = tokenizer_of(TEMPLATES[name])
    assert choose_parser("auto", tokenizer, ()) is PARSERS[name]
    assert choose_parser(name, tokenizer, ()) is PARSERS[name]


@pytest.mark.parametrize(
    "family, name",
    [
        ("Qwen2.5", "hermes"),
        ("Qwen3", "hermes"),
        ("Hermes", "hermes"),
        ("Llama 3", "llama"),
        ("Mistral", "mistral"),
        ("DeepSeek", "deepseek"),
    ],
)
def test_the_families_of_the_suffix_are_read(family, name):
    assert choose_parser("auto", families.family_tokenizer(family), ()) is PARSERS[name]


def test_a_prompt_that_opens_the_thinking_does_not_hide_the_call():
    template = TEMPLATES["xml"].replace("{{- '<|im_start|>assistant\\n' }}", THINKS)
    assert choose_parser("auto", tokenizer_of(template), ()) is PARSERS["xml"]


def turn_of(tokenizer, *calls):
    """The prompt, and the text of a turn with these calls, without its end."""
    asked = [{"role": "user", "content": "q"}]
    items = [
        {"id": f"call{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    said = {"role": "assistant", "content": "", "tool_calls": items}
    prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([*asked, said], tokenize=False)
    turn = whole[len(prompt) :].rstrip()
    return prompt, turn.removesuffix("<|im_end|>").removesuffix("<|call|>")


@pytest.mark.parametrize("family", WRITTEN)
def test_a_format_with_json_is_read_off_the_template(family):
    tokenizer = tokenizer_of(TURNS % WRITTEN[family])
    parse = choose_parser("auto", tokenizer, ())
    assert parse not in PARSERS.values()
    with pytest.raises(ConfigError, match="give --tool_parser auto"):
        choose_parser("hermes", tokenizer, ())
    _, turn = turn_of(tokenizer, F, G)
    assert [(each.name, each.arguments) for each in parse(turn, True)] == [F, G]
    has_ids = family in ("Command A", "OpenAI")
    assert [each.call_id for each in parse(turn, True)] == [f"call{i}" * has_ids for i in range(2)]
    assert parse(f"<think>{turn}</think>no", True) == parse('[1] {"answer": 3}', True) == []
    with pytest.raises(MalformedCallError):
        parse(turn.replace('{"x": 1}', "1"), True)


@pytest.mark.parametrize(
    "call",
    ["<call:ID>" + NAMED + "</call:ID>", "<NAME>JSON</NAME>", '[{"NAME": JSON}]', ">>>NAME JSON"],
)
def test_a_format_whose_marks_hold_the_call_is_not_read_off(call):
    with pytest.raises(ConfigError, match="no calls can be read"):
        choose_parser("auto", tokenizer_of(TURNS % written("", call, "", "")), ())


@pytest.mark.parametrize(
    "family, text",
    [
        ("xLAM", '[{"name": "Alice", "age": 5}]'),
        ("xLAM", '{"id": 7, "title": "x"}'),
        ("xLAM", "[note] hello"),
        ("Command R", 'Action: ```json\n[{"a": 1}]```'),
        ("Command R", "as ```json\n[1]``` shows"),
    ],
)
def test_other_json_is_an_answer(family, text):
    assert choose_parser("auto", tokenizer_of(TURNS % WRITTEN[family]), ())(text, True) == []


@pytest.mark.parametrize("name", ["hermes", "glm", "llama", "pythonic"])
def test_a_parser_that_does_not_read_the_template_is_refused(name):
    with pytest.raises(ConfigError, match=r"does not read the calls .*give --tool_parser xml"):
        choose_parser(name, tokenizer_of(TEMPLATES["xml"]), ())


def test_a_template_of_no_known_format_is_refused_whatever_is_asked_for():
    template = TURNS % "{{- '<<' + f.name + '>>' }}"
    for name in ("auto", "hermes"):
        with pytest.raises(ConfigError, match="tool_parser"):
            choose_parser(name, tokenizer_of(template), ())


def test_what_writes_no_calls_is_read_as_it_is_asked_for():
    tokenizer = families.family_tokenizer("Gemma")
    assert choose_parser("pythonic", tokenizer, ()) is PARSERS["pythonic"]
    with pytest.raises(ConfigError, match="give --tool_parser"):
        choose_parser("auto", tokenizer, ())


def test_a_template_that_fails_on_calls_says_why():
    template = TURNS % "{{ raise_exception('no tools here') }}"
    with pytest.raises(ConfigError, match=r"fails on a message with a call: .*no tools here.*give"):
        choose_parser("auto", tokenizer_of(template), ())


WORDS = ["plain", 'a "quote"', "<b>", "{c}", "x, y", "two\nlines", "[1]", "7", "Zürich", "a = 1"]

TYPES = {
    "s": {"type": "string"},
    "n": {"type": "integer"},
    "x": {"type": "number"},
    "b": {"type": "boolean"},
    "l": {"type": "array"},
    "o": {"type": "object"},
}


def random_arguments(draw):
    values = {
        "s": draw.choice(WORDS),
        "n": draw.randrange(-99, 99),
        "x": draw.randrange(-99, 99) / 4,
        "b": draw.random() < 0.5,
        "l": [draw.choice(WORDS), draw.randrange(9)],
        "o": {"k": draw.choice(WORDS), "m": [True, None]},
    }
    return {key: values[key] for key in draw.sample(sorted(values), draw.randrange(7))}


@pytest.mark.parametrize("name", TEMPLATES | WRITTEN)
def test_random_calls_come_back_through_their_templates(name):
    tokenizer = tokenizer_of(TEMPLATES.get(name) or TURNS % WRITTEN[name])
    draw, parse = random.Random(3), choose_parser("auto", tokenizer, ())
    for _ in range(20):
        chosen = random_arguments(draw)
        shown = json.dumps(chosen) if name == "deepseek" else chosen
        prompt, turn = turn_of(tokenizer, ("find_it", shown))
        (read,) = parse(turn, True, prompt)
        schema = {"find_it": {"parameters": {"properties": TYPES}}}
        assert (read.name, check_call(read, schema)) == ("find_it", chosen)


BEFORE = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
XML_CALL = "<function={}>\n<parameter=x>\n1\n</parameter>\n</function>"
LLAMA_CALL = '{"name": "f", "parameters": {"x": 1}}'
F, G = ("f", {"x": 1}), ("g", {})
INVOKED = '<{0}invoke name="f"><{0}parameter name="x"{1}>{2}</{0}parameter></{0}invoke>'
DSML = "｜DSML｜"


@pytest.mark.parametrize(
    "name, text, calls",
    [
        ("hermes", f"hm {call('f', x=1)} and {call('g')}", [F, G]),
        ("hermes", call("f", x=1).removesuffix("</tool_call>"), [F]),
        ("hermes", f"<tool_call>{LLAMA_CALL}</tool_call>", [F]),
        ("hermes", "no call", []),
        ("hermes", f"<think>{call('f')}</think>no", []),
        ("hermes", f"<think>{call('f')}", []),
        ("llama", LLAMA_CALL, [F]),
        ("llama", f"<|python_tag|>{LLAMA_CALL}; {LLAMA_CALL}", [F, F]),
        ("llama", "hello", []),
        ("llama", '{"answer": 3}', []),
        ("pythonic", "[f(x=1), g(s='a', t=[1])]", [F, ("g", {"s": "a", "t": [1]})]),
        ("pythonic", "text [f(x=1)]", []),
        ("pythonic", "[1, 2]", []),
        # The first mark may be missing.
        ("xml", f"hm {XML_CALL.format('f')}", [("f", {"x": "1"})]),
        (
            "xml",
            "\n".join(f"<tool_call>\n{XML_CALL.format(n)}\n</tool_call>" for n in "fg"),
            [("f", {"x": "1"}), ("g", {"x": "1"})],
        ),
        (
            "lfm",
            "<|tool_call_start|>[f(x=1), g(y='</s>')]<|tool_call_end|>ok",
            [F, ("g", {"y": "</s>"})],
        ),
        # Gemma may write null as Python does.
        (
            "gemma",
            '<|tool_call>call:f{x:None,l:[None , null],s:<|"|>None<|"|>}<tool_call|>',
            [("f", {"x": None, "l": [None, None], "s": "None"})],
        ),
        (
            "gemma",
            '<|tool_call>call:f{\n a: "h:i",\n <|"|>b<|"|>:{ c:1, d:[2,],},}<tool_call|>',
            [("f", {"a": "h:i", "b": {"c": 1, "d": [2]}})],
        ),
        ("gemma", "<|channel>thought\n<|tool_call>call:f{}<tool_call|><channel|>no", []),
        # DeepSeek says which values are no texts.
        ("invoke", INVOKED.format(DSML, ' string="false"', "null"), [("f", {"x": None})]),
        ("invoke", INVOKED.format(DSML, ' string="true"', "null"), [("f", {"x": "null"})]),
        ("invoke", INVOKED.format(DSML, ' string="false"', "1 2"), [("f", {"x": "1 2"})]),
        (
            "invoke",
            f"<think>{INVOKED.format('', '', 1)}</think>{INVOKED.format(DSML, '', 2)}",
            [("f", {"x": "2"})],
        ),
        # Thinking may name a call.
        (
            "harmony",
            "<|channel|>analysis<|message|>to=functions.g now<|end|><|start|>assistant<|channel|>"
            'commentary to=functions.f <|constrain|>json<|message|>{"x": 1}',
            [F],
        ),
    ],
)
def test_calls_are_read_in_their_order(name, text, calls):
    assert [(each.name, each.arguments) for each in PARSERS[name](text, True)] == calls


@pytest.mark.parametrize(
    "name, form, text",
    [
        ("invoke", INVOKED.format(DSML, "", "{}"), INVOKED.format("", "", 1)),
        ("invoke", INVOKED.format("", "", "{}"), INVOKED.format(DSML, "", 1)),
        ("llama", LLAMA_CALL.replace("1", '"{}"'), "<|python_start|>a<|python_end|><|python_tag|>"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"x": "{}"}}]', "[TOOL_CALLS]g{}"),
        ("mistral", '[TOOL_CALLS]f{"x": "{}"}', "[TOOL_CALLS]g{}"),
        ("pythonic", "[f(x='{}')]", "[g()]"),
        ("harmony", 'to=functions.f<|message|>{"x": "{}"}', "to=functions.g<|message|>{}"),
    ],
)
def test_marks_and_thinking_in_an_argument_are_its_text(name, form, text):
    for value in (text, f"<think>a</think>{text}", "a <think>"):
        (found,) = PARSERS[name](form.replace("{}", value), True)
        assert (found.name, found.arguments) == ("f", {"x": value})


@pytest.mark.parametrize("name", ["hermes", "llama", "pythonic"])
def test_what_a_template_began_to_think_is_thinking(name):
    text = {"hermes": call("f"), "llama": '{"name": "f"}', "pythonic": "[f()]"}[name]
    parser = PARSERS[name]
    before = BEFORE + "<think>\n"
    assert parser(f"hm {text}", True, before) == []
    assert parser(f"{text}</think>no", True, before) == []
    assert [c.name for c in parser(f"hm</think>{text}", True, before)] == ["f"]
    assert [c.name for c in parser(text, True, f"{BEFORE}<think>a</think>")] == ["f"]


def test_thinking_inside_of_a_call_is_text_and_a_call_inside_of_thinking_is_none():
    body = {"name": "a", "arguments": {"x": 1, "z": "<think>keep</think>q </tool_call> <think>"}}
    text = f"<tool_call>\n{json.dumps(body)}\n</tool_call>"
    assert hermes_calls(text, True) == [ToolCall("a", body["arguments"])]
    assert hermes_calls(f"<think>{text}</think>no", True) == []
    assert hermes_calls(f"<think>hm</think>{text}", True) == [ToolCall("a", body["arguments"])]
    wrapped = "<tool_call><function=f><parameter=x>\n<think>a</think>\n</parameter></function>"
    assert xml_calls(f"{wrapped}</tool_call>", True) == [ToolCall("f", {"x": "<think>a</think>"})]


@pytest.mark.parametrize(
    "name, text",
    [
        ("xml", "<tool_call><function=f><parameter=x>1</function></tool_call>"),
        ("xml", "<tool_call><function=f>"),
        ("hermes", "<tool_call>x</tool_call>"),
        ("hermes", '<tool_call>{"name": 3}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", "<tool_call>{'name': 'f'}</tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1e400}}</tool_call>'),
        ("glm", "<tool_call></tool_call>"),
        ("glm", "<tool_call>f\n<arg_key>x</arg_key></tool_call>"),
        ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{1}<｜tool▁call▁end｜>"),
        ("lfm", "<|tool_call_start|>[f(1)]<|tool_call_end|>"),
        ("lfm", "<|tool_call_start|>[__import__('os').system('x')]<|tool_call_end|>"),
        ("gemma", "<|tool_call>call:f{x:<tool_call|>"),
        ("gemma", "<|tool_call>call:f{x:1,,}<tool_call|>"),
        ("gemma", f"<|tool_call>call:f{'{x:' * 5000}"),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>{x"),
        ("mistral", "[TOOL_CALLS] [1]"),
        ("mistral", "[TOOL_CALLS]f"),
        ("llama", LLAMA_CALL[:-1]),
        ("llama", f"{LLAMA_CALL}; hello"),
        ("llama", '{"name": "f", "parameters": 3}'),
        ("pythonic", "[f(1)]"),
        ("pythonic", "[f(x=1+1)]"),
        ("pythonic", "[f(x=__import__('os'))]"),
        ("pythonic", "[f(x=1)"),
        ("pythonic", "[f(**{})]"),
        ("pythonic", "[f(x=g())]"),
    ],
)
def test_what_opens_a_call_and_is_none_is_malformed(name, text):
    with pytest.raises(MalformedCallError):
        PARSERS[name](text, True)


def test_a_call_that_its_turn_did_not_end_is_malformed():
    with pytest.raises(MalformedCallError):
        hermes_calls(call("f").removesuffix("</tool_call>"), False)


# transformers' own description of how Qwen writes calls; the anchor finds opened thinking.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {
            "open": "<think>",
            "close_pattern": r"</think>\s*",
            "content": "text",
        },
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}


def test_a_tokenizers_own_response_template_is_followed():
    tokenizer = families.family_tokenizer("Gemma")  # of which no other parser is known
    tokenizer.response_template = RESPONSE_TEMPLATE
    parameters = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    schema = {"name": "f", "description": "", "parameters": parameters}
    parse = choose_parser("auto", tokenizer, ({"type": "function", "function": schema},))

    def read(text, before=BEFORE):
        return [(each.name, each.arguments) for each in parse(text, True, before)]

    one = call("f", x="7")
    assert read(one) == read(f"hm\n{one}\nmore") == [("f", {"x": 7})]
    assert read(f"{one}\n{call('g')}") == [("f", {"x": 7}), ("g", {})]
    assert read("no call") == read(f"<think>{one}</think>no") == []
    assert read(f"{one}</think>no", BEFORE + "<think>\n") == []
    assert read('<tool_call>\n{"name": "f"}\n</tool_call>') == [("f", {})]
    for body in (
        '{"name": "f"',
        "{'name': 'f'}",
        "[1]",
        "3",
        '{"name": "f", "arguments": "{}"}',
        '{"name": "f", "arguments": [1]}',
        '{"arguments": {}}',
        "[" * 5000,
    ):
        with pytest.raises(MalformedCallError):
            read(f"<tool_call>{body}</tool_call>")


@pytest.mark.parametrize("name", [*PARSERS, *WRITTEN])
def test_no_text_raises_anything_else(name):
    draw, parse = random.Random(5), PARSERS.get(name)
    parse = parse or choose_parser("auto", tokenizer_of(TURNS % WRITTEN[name]), ())
    pieces = ["<tool_call>", "</tool_call>", "<function=f>", "<parameter=x>", "</parameter>", "{"]
    pieces += ["</function>", "<arg_key>", "</arg_key>", "<arg_value>", "[", "]", "}", '"', ":"]
    pieces += ["call:f{", '<|"|>', "<|tool_call>", "<tool_call|>", "<think>", "</think>", "f(x=1)"]
    pieces += ["[TOOL_CALLS]", "to=functions.f<|message|>", "<|tool_call_start|>", "1", ",", "\n"]
    pieces += ["<TOOLCALL>", "<|tool_call|>", '{"name": "f", "arguments": {}}', '{"f": {}}', "```"]
    for _ in range(300):
        text = "".join(draw.choices(pieces, k=draw.randrange(12)))
        with contextlib.suppress(MalformedCallError):
            parse(text, draw.random() < 0.5)


@pytest.mark.full
def test_many_calls_take_time_in_proportion():
    text = '<tool_call>{"name": "f"}</tool_call>' * 20_000
    assert len(hermes_calls(text, True)) == 20_000
    for family in WRITTEN:
        tokenizer = tokenizer_of(TURNS % WRITTEN[family])
        parse, (_, turn) = choose_parser("auto", tokenizer, ()), turn_of(tokenizer, F)
        for place in (turn.index("{"), turn.rindex("}") + 1, turn.index("f")):
            with contextlib.suppress(MalformedCallError):
                parse(turn[:place] + "\n" * 300_000 + "!" + turn[place:], True)


SCHEMA = {
    "f": {
        "parameters": {
            "properties": {
                "l": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
                "o": {
                    "type": "object",
                    "properties": {"a": {"type": "string"}, "b": {"type": "number"}},
                    "required": ["a"],
                    "additionalProperties": False,
                },
                "e": {"type": "string", "enum": ["up", "down"]},
                "u": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "n": {"type": "number", "minimum": 0, "exclusiveMaximum": 10},
                "i": {"type": "integer"},
                "d": {"type": "object", "additionalProperties": {"type": "integer"}},
                "s": {"type": "string"},
                "b": {"type": "boolean"},
                "x": {},
            }
        }
    }
}


@pytest.mark.parametrize(
    "given, found",
    [
        ({"l": "[1, 2]"}, {"l": [1, 2]}),
        ({"l": [1, "2"]}, {"l": [1, 2]}),
        ({"o": {"a": "x", "b": 1}}, {"o": {"a": "x", "b": 1}}),
        ({"e": "up"}, {"e": "up"}),
        ({"u": None}, {"u": None}),
        ({"u": 3}, {"u": 3}),
        ({"n": 9.5}, {"n": 9.5}),
        ({"i": 1.0}, {"i": 1}),
        ({"d": {"k": 1}}, {"d": {"k": 1}}),
        # Texts are cast only where the schema asks.
        ({"i": "7", "s": "7", "b": "true", "n": 1}, {"i": 7, "s": "7", "b": True, "n": 1}),
        ({"x": [1, "a", None]}, {"x": [1, "a", None]}),
    ],
)
def test_arguments_are_read_by_the_whole_schema(given, found):
    assert check_call(ToolCall("f", given), SCHEMA) == found


@pytest.mark.parametrize(
    "given, message",
    [
        ({"l": ["no"]}, r"argument 'l' at \[0\]: must be integer: got 'no'"),
        ({"l": [1, 2, 3, 4]}, "breaks maxItems 3"),
        ({"o": {}}, "argument 'o' needs 'a'"),
        ({"o": {"a": "x", "c": 1}}, "must not have 'c'"),
        ({"o": {"a": "x", "b": "y"}}, r"at \.b: must be number"),
        ({"e": "left"}, r"must be one of \[\"up\", \"down\"\]: got 'left'"),
        ({"u": "x"}, "must be integer: got 'x' or must be null"),
        ({"n": -1}, "breaks minimum 0"),
        ({"n": 10}, "breaks exclusiveMaximum 10"),
        ({"n": float("nan")}, "finite number"),
        ({"i": 1.5}, "must be integer"),
        ({"i": True}, "must be integer"),
        ({"s": 7}, "must be string"),
        ({"b": 1}, "must be boolean"),
        *(({"x": each}, "f: the arguments are no JSON") for each in ({1, 2}, b"a", [{1}], 2j)),
        ({"d": {"k": "x"}}, r"at \.k: must be integer"),
    ],
)
def test_what_breaks_the_schema_at_any_level_is_named(given, message):
    with pytest.raises(MalformedCallError, match=message):
        check_call(ToolCall("f", given), SCHEMA)
