# ruff: noqa: RUF001
"""Chat templates of present families in our own words, with calls and thinking."""

from dataclasses import dataclass

from tests.datasets.chat_families import GLM_MARKS, WORDS, tokenizer_of
from tests.rollout.test_call_formats import GEMMA as GEMMA_CALL

# Expressions of templates: k is a call, m a message, at.q the place of the last question, and
# at.said that of the last answer without calls.
SINCE_QUESTION = "loop.index0 > at.q"
JSON_CALL = "'{\"name\": \"' + k.name + '\", \"X\": ' + k.arguments | tojson + '}'"
PAIRS = "{%- for n, v in k.arguments.items() %}{{- X }}{%- endfor %}"
TEXT = "(v if v is string else v | tojson)"


@dataclass(frozen=True)
class Form:
    """A template's texts around turns, calls and thinking.

    Args:
        special: Special tokens; the first is the end of sequence.
        user, result, system: Expressions of messages.
        answer: Header of an answer.
        end, last, call_end: End of an answer, of the last one, and of one with calls.
        call: Template of one call.
        calls: Text around all calls.
        think: Text around thinking.
        thinks: Expression: whether a message's thinking is written.
        asked, bare: Text behind the header in prompts, and in answers without thinking.
        said: Text before an answer.
        after: Text behind an end.
        continues: Results continue the turn with their calls.
    """

    special: tuple[str, ...]
    user: str
    result: str
    answer: str
    end: str
    call: str
    system: str = ""
    begin: str = ""
    last: str = ""
    call_end: str = ""
    calls: tuple[str, str] = ("", "")
    think: tuple[str, str] = ("<think>\n", "\n</think>\n\n")
    thinks: str = SINCE_QUESTION
    asked: str = ""
    bare: str = ""
    said: str = ""
    after: str = ""
    continues: bool = False

    def template(self):
        last = f"({self.last or self.end!r} if loop.last else {self.end!r})"
        follows = "messages[loop.index0 - 1].role == 'tool'" if self.continues else "false"
        asks = "messages[-1].role != 'tool'" if self.continues else "true"
        ended = f"({self.call_end or self.end!r} if m.tool_calls else {last}) + {self.after!r}"
        if self.continues:  # an end before results is the first token of them
            waits = "loop.last or messages[loop.index0 + 1].role != 'tool'"
            ended = f"(({self.call_end!r} if {waits} else '') if m.tool_calls else {ended})"
        return (
            f"{{{{- {self.begin!r} }}}}{{%- set at = namespace(q=-1, said=-1) %}}"
            "{%- for m in messages %}{%- if m.role == 'user' %}{%- set at.q = loop.index0 %}"
            "{%- elif m.role == 'assistant' and not m.tool_calls %}"
            "{%- set at.said = loop.index0 %}{%- endif %}{%- endfor %}"
            "{%- if tools %}{{- tools | tojson }}{%- endif %}"
            f"{{%- for m in messages %}}{{%- if m.role == 'user' %}}{{{{- {self.user} }}}}"
            f"{{%- elif m.role == 'system' %}}{{{{- {self.system or self.user} }}}}"
            f"{{%- elif m.role == 'tool' %}}{{{{- {self.result} }}}}{{%- else %}}"
            f"{{{{- '' if {follows} else {self.answer!r} }}}}"
            f"{{%- if m.reasoning_content and ({self.thinks}) %}}"
            f"{{{{- {self.think[0]!r} + m.reasoning_content + {self.think[1]!r} }}}}"
            f"{{%- else %}}{{{{- {self.bare!r} }}}}{{%- endif %}}"
            f"{{{{- ('' if m.tool_calls else {self.said!r}) + m.content }}}}"
            f"{{%- if m.tool_calls %}}{{{{- {self.calls[0]!r} }}}}"
            "{%- for x in m.tool_calls %}{%- set k = x.function %}"
            f"{self.call}{{%- endfor %}}{{{{- {self.calls[1]!r} }}}}{{%- endif %}}"
            f"{{{{- {ended} }}}}{{%- endif %}}{{%- endfor %}}"
            f"{{%- if add_generation_prompt and ({asks}) %}}"
            f"{{{{- {self.answer + self.asked!r} }}}}{{%- endif %}}"
        )

    def tokenizer(self, template=""):
        eos, *_ = self.special
        ends = (None, eos)
        return tokenizer_of(template or self.template(), ends, self.special, pre_tokenizer=WORDS)


def chatml(role, start="<|im_start|>", middle="\n", end="<|im_end|>\n"):
    return f"{start + role + middle!r} + m.content + {end!r}"


def grouped(before, each, after):
    """Results of one turn in one message."""
    first = "(loop.first or messages[loop.index0 - 1].role != 'tool')"
    last = "(loop.last or messages[loop.index0 + 1].role != 'tool')"
    return f"({before!r} if {first} else '') + {each} + ({after!r} if {last} else '')"


IM = ("<|im_end|>", "<|im_start|>")
RESPONSE = "'\\n<tool_response>\\n' + m.content + '\\n</tool_response>'"
XML = (
    "{{- '\\n<tool_call>\\n<function=' + k.name + '>\\n' }}"
    + PAIRS.replace("X", f"'<parameter=' + n + '>\\n' + {TEXT} + '\\n</parameter>\\n'")
    + "{{- '</function>\\n</tool_call>' }}"
)
GLM = (
    "{{- '<tool_call>' + k.name }}"
    + PAIRS.replace("X", f"'<arg_key>' + n + '</arg_key><arg_value>' + {TEXT} + '</arg_value>'")
    + "{{- '</tool_call>' }}"
)
QWEN = Form(
    IM,
    chatml("user"),
    grouped("<|im_start|>user", RESPONSE, "<|im_end|>\n"),
    "<|im_start|>assistant\n",
    "<|im_end|>",
    XML,
    asked="<think>\n",
    bare="<think>\n\n</think>\n\n",
    after="\n",
)
GEMMA = Form(
    (
        "<eos>",
        "<|turn>",
        "<turn|>",
        "<|tool_call>",
        "<tool_call|>",
        "<|tool_response>",
        "<tool_response|>",
        "<|channel>",
        "<channel|>",
        '<|"|>',
    ),
    chatml("user", "<|turn>", end="<turn|>\n"),
    "'<|tool_response>response:' + m.name + '{value:<|\"|>' + m.content + "
    "'<|\"|>}<tool_response|>'",
    "<|turn>model\n",
    "<turn|>",
    "{%- set f = k %}" + GEMMA_CALL,
    call_end="<|tool_response>",
    think=("<|channel>thought\n", "\n<channel|>"),
    after="\n",
    continues=True,
)
DSML = "\uff5cDSML\uff5c"
DEEPSEEK = ("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
COHERE_END = "<|END_OF_TURN_TOKEN|>"
COHERE = ("THINKING", "ACTION", "RESPONSE", "TOOL_RESULT")
FAMILIES = {
    "Qwen3.5": QWEN,
    "Nemotron 3": Form(
        IM,
        QWEN.user,
        QWEN.result,
        QWEN.answer,
        "<|im_end|>",
        XML,
        asked="<think>\n",
        think=("<think>\n", "\n</think>\n"),
        after="\n",
    ),
    "Gemma 4": GEMMA,
    "GLM-4.5": Form(
        ("<|endoftext|>", *GLM_MARKS),
        "'<|user|>\\n' + m.content",
        grouped("<|observation|>", RESPONSE, ""),
        "<|assistant|>",
        "",
        GLM,
        system="'<|system|>\\n' + m.content",
        begin="[gMASK]<sop>",
        think=("\n<think>", "</think>\n"),
        bare="\n<think></think>\n",
    ),
    "gpt-oss": Form(
        ("<|return|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"),
        chatml("user", "<|start|>", "<|message|>", "<|end|>"),
        "'<|start|>functions.' + m.name + ' to=assistant<|channel|>commentary<|message|>' + "
        "m.content | tojson + '<|end|>'",
        "<|start|>assistant",
        "<|end|>",
        "{%- if loop.first %}{{- ' to=functions.' + k.name + '<|channel|>commentary json"
        "<|message|>' + k.arguments | tojson }}{%- endif %}",
        last="<|return|>",
        call_end="<|call|>",
        think=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        thinks="loop.index0 > at.said if m.tool_calls else loop.last",
        said="<|channel|>final<|message|>",
    ),
    "Kimi-K2": Form(
        ("<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
        chatml("user", "<|im_user|>", "<|im_middle|>", "<|im_end|>"),
        "'<|im_system|>tool<|im_middle|>## Return of ' + m.tool_call_id + '\\n' + m.content + "
        "'<|im_end|>'",
        "<|im_assistant|>assistant<|im_middle|>",
        "<|im_end|>",
        "{{- '<|tool_call_begin|>functions.' + k.name + ':' + loop.index0 | string + "
        "'<|tool_call_argument_begin|>' + k.arguments | tojson + '<|tool_call_end|>' }}",
        calls=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        think=("<think>", "</think>"),
        bare="<think></think>",
    ),
    "MiniMax-M2": Form(
        ("[e~[", "]~b]"),
        chatml("user", "]~b]", end="[e~[\n"),
        grouped("]~b]tool", "'\\n<response>' + m.content + '</response>'", "[e~[\n"),
        "]~b]ai\n",
        "[e~[",
        "{{- '<invoke name=\"' + k.name + '\">\\n' }}"
        + PAIRS.replace("X", f"'<parameter name=\"' + n + '\">' + {TEXT} + '</parameter>\\n'")
        + "{{- '</invoke>\\n' }}",
        calls=("\n<minimax:tool_call>\n", "</minimax:tool_call>"),
        asked="<think>\n",
        after="\n",
    ),
    "DeepSeek V3.1": Form(
        DEEPSEEK,
        "'<｜User｜>' + m.content",
        "'<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>'",
        "<｜Assistant｜>",
        DEEPSEEK[0],
        "{{- '<｜tool▁call▁begin｜>' + k.name + '<｜tool▁sep｜>' + k.arguments | tojson + "
        "'<｜tool▁call▁end｜>' }}",
        begin=DEEPSEEK[1],
        calls=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        asked="<think>",
        think=("<think>", "</think>"),
        bare="<think></think>",
    ),
    "DeepSeek V4": Form(
        DEEPSEEK,
        "'<｜User｜>' + m.content",
        grouped("<｜User｜>", "'<tool_result>' + m.content + '</tool_result>'", ""),
        "<｜Assistant｜>",
        DEEPSEEK[0],
        f"{{{{- '<{DSML}invoke name=\"' + k.name + '\">\\n' }}}}"
        + PAIRS.replace(
            "X",
            f"'<{DSML}parameter name=\"' + n + '\" string=\"' + (v is string) | string | lower + "
            f"'\">' + {TEXT} + '</{DSML}parameter>\\n'",
        )
        + f"{{{{- '</{DSML}invoke>\\n' }}}}",
        begin=DEEPSEEK[1],
        calls=(f"\n\n<{DSML}tool_calls>\n", f"</{DSML}tool_calls>"),
        asked="<think>",
        think=("<think>", "</think>"),
        bare="<think></think>",
    ),
    "Llama 4": Form(
        ("<|eot|>", "<|header_start|>", "<|header_end|>", "<|python_start|>", "<|python_end|>"),
        chatml("user", "<|header_start|>", "<|header_end|>\n\n", "<|eot|>"),
        "'<|header_start|>ipython<|header_end|>\\n\\n' + m.content | tojson + '<|eot|>'",
        "<|header_start|>assistant<|header_end|>\n\n",
        "<|eot|>",
        "{{- " + JSON_CALL.replace("X", "parameters") + " }}",
        calls=("<|python_start|><|python_end|>", ""),
        think=("<think>\n", "\n</think>\n"),
    ),
    "Granite 4": Form(
        ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"),
        chatml("user", "<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>\n"),
        grouped("<|start_of_role|>user<|end_of_role|>", RESPONSE, "<|end_of_text|>\n"),
        "<|start_of_role|>assistant<|end_of_role|>",
        "<|end_of_text|>",
        "{{- '<tool_call>\\n' + "
        + JSON_CALL.replace("X", "arguments")
        + " + '\\n</tool_call>\\n' }}",
        after="\n",
    ),
    "Command A": Form(
        (
            COHERE_END,
            *(f"<|START_{word}|>" for word in COHERE),
            *(f"<|END_{word}|>" for word in COHERE),
        ),
        chatml("<|USER_TOKEN|>", "<|START_OF_TURN_TOKEN|>", "", COHERE_END),
        grouped(
            "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><|START_TOOL_RESULT|>[",
            "(', ' if messages[loop.index0 - 1].role == 'tool' else '') + '{\"results\": {\"0\": '"
            " + m.content | tojson + '}}'",
            f"]<|END_TOOL_RESULT|>{COHERE_END}",
        ),
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        f"<|END_RESPONSE|>{COHERE_END}",
        "{{- (', ' if not loop.first else '') + '{\"tool_call_id\": \"' + loop.index0 | string + "
        '\'", "tool_name": \' + k.name | tojson + \', "parameters": \' + k.arguments | tojson '
        "+ '}' }}",
        call_end=COHERE_END,
        calls=("<|START_ACTION|>[", "]<|END_ACTION|>"),
        think=("<|START_THINKING|>", "<|END_THINKING|>"),
        said="<|START_RESPONSE|>",
    ),
    "LFM2": Form(
        (*IM, "<|startoftext|>", "<|tool_call_start|>", "<|tool_call_end|>"),
        QWEN.user,
        chatml("tool"),
        QWEN.answer,
        "<|im_end|>",
        "{{- (', ' if not loop.first else '') + k.name + '(' }}"
        + PAIRS.replace("X", "n + '=' + v | tojson + (', ' if not loop.last else '')")
        + "{{- ')' }}",
        begin="<|startoftext|>",
        calls=("<|tool_call_start|>[", "]<|tool_call_end|>"),
        after="\n",
    ),
}
