# ruff: noqa: RUF001
"""Chat templates of ten families in our own words, and home-made tokenizers for them.

The tokenizers are byte-level with merges across every boundary a template has: two newlines, a
full stop and a newline, a word's letters.
"""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# Splits at words and newlines, as the tokenizers of most families do.
WORDS = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(Regex(r"\s*[\r\n]+| ?[^\s]+|\s+"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)

MERGES = [
    ("Ċ", "Ċ"),
    (".", "Ċ"),
    ("h", "e"),
    ("l", "l"),
    ("he", "ll"),
    ("hell", "o"),
    ("o", "k"),
    (">", "Ċ"),
    ("Ċ", "<"),
    ("Ġ", "a"),
]

CHATML = """\
{%- if messages[0].role == 'system' or DEFAULT or tools %}{{- '<|im_start|>system\\n' + \
(messages[0].content if messages[0].role == 'system' else DEFAULT) }}\
{%- if tools %}{{- '\\n\\n# Tools\\n<tools>' }}{%- for x in tools %}{{- '\\n' + (x | tojson) }}\
{%- endfor %}{{- '\\n</tools>' }}{%- endif %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(q=messages|length-1, on=true) %}{%- for m in messages[::-1] %}\
{%- if ns.on and m.role == 'user' %}{%- set ns.on = false %}\
{%- set ns.q = messages|length-1-loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}{%- if m.role == 'tool' %}\
{%- if loop.first or messages[loop.index0-1].role != 'tool' %}{{- '<|im_start|>RESULT' }}\
{%- endif %}{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}\
{%- if loop.last or messages[loop.index0+1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- elif not (m.role == 'system' and loop.first) %}{%- set c = m.content or '' %}THINKING\
{{- '<|im_start|>' + m.role + '\\n' + c }}{%- for k in m.tool_calls or [] %}\
{{- '\\n<tool_call>\\n' + ({'name': k.function.name, 'arguments': k.function.arguments} | tojson) \
+ '\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
THINKING = """\
{%- if m.role == 'assistant' %}{%- set r = '' %}{%- if '</think>' in c %}\
{%- set r = c.split('</think>')[0].split('<think>')[-1] %}\
{%- set c = c.split('</think>')[-1].lstrip('\\n') %}{%- endif %}\
{%- if loop.index0 > ns.q and (loop.last or r) %}\
{%- set c = '<think>\\n' + r.strip('\\n') + '\\n</think>\\n\\n' + c %}{%- endif %}{%- endif %}"""


def chatml(default="", *, result="user", thinking=""):
    text = CHATML.replace("DEFAULT", repr(default)).replace("RESULT", result)
    return text.replace("THINKING", thinking)


LLAMA = """\
{%- set ms = messages[1:] if messages[0].role == 'system' else messages %}{{- bos_token + \
'<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\n\
Today Date: 26 Jul 2024\\n\\n' + (messages[0].content|trim if messages[0].role == 'system' else '')\
 + '<|eot_id|>' }}{%- set ns = namespace(tools=tools) %}{%- for m in ms %}\
{%- if m.role == 'tool' %}\
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (m.content | tojson) + '<|eot_id|>' }}\
{%- elif m.tool_calls %}{%- if m.tool_calls|length != 1 %}\
{{- raise_exception('single call only') }}\
{%- endif %}{%- set k = m.tool_calls[0].function %}\
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + k.name + '", "parameters": ' \
+ (k.arguments | tojson) + '}<|eot_id|>' }}{%- else %}\
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + (ns.tools | tojson + '\\n\\n' if \
ns.tools and m.role == 'user' else '') + (m.content|trim) + '<|eot_id|>' }}\
{%- if m.role == 'user' %}{%- set ns.tools = none %}{%- endif %}{%- endif %}{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\
{%- endif %}"""
MISTRAL = """\
{%- set sys = messages[0].content if messages[0].role == 'system' else '' %}\
{%- set ms = messages[1:] if sys else messages %}\
{%- set users = ms | selectattr('role', 'equalto', 'user') | list %}{{- bos_token }}\
{%- for m in ms %}{%- if m.role == 'user' %}{%- if tools and m == users[-1] %}\
{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}\
{{- '[INST] ' + (sys + '\\n\\n' if sys and loop.last else '') + m.content + '[/INST]' }}\
{%- elif m.role == 'tool' %}{%- if m.tool_call_id|length != 9 %}\
{{- raise_exception('call ids have 9 characters') }}{%- endif %}\
{{- '[TOOL_RESULTS] {"content": ' + (m.content | tojson) + ', "call_id": "' + m.tool_call_id + \
'"}[/TOOL_RESULTS]' }}{%- elif m.tool_calls %}{{- '[TOOL_CALLS] [' }}{%- for k in m.tool_calls %}\
{{- ({'name': k.function.name, 'arguments': k.function.arguments, 'id': k.id} | tojson) + \
(']' + eos_token if loop.last else ', ') }}{%- endfor %}{%- else %}\
{{- ' ' + m.content + eos_token }}{%- endif %}{%- endfor %}"""
GEMMA = """\
{{- bos_token }}{%- set p = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' \
%}{%- set ms = messages[1:] if p else messages %}{%- for m in ms %}\
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
{{- raise_exception('roles must alternate') }}\
{%- endif %}{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + \
(p if loop.first else '') + (m.content|trim) + '<end_of_turn>\\n' }}{%- endfor %}\
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""
PHI3 = """\
{%- for m in messages %}{%- if m.role in ['system', 'user', 'assistant'] %}\
{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{%- endif %}{%- endfor %}\
{{- '<|assistant|>\\n' if add_generation_prompt else eos_token }}"""
DEEPSEEK = """\
{{- bos_token }}{%- for m in messages %}{%- if m.role == 'system' %}{{- m.content }}\
{%- elif m.role == 'user' %}{{- '<｜User｜>' + m.content }}{%- elif m.role == 'tool' %}\
{%- if messages[loop.index0-1].role != 'tool' %}{{- '<｜tool▁outputs▁begin｜>' }}{%- endif %}\
{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}\
{%- if loop.last or messages[loop.index0+1].role != 'tool' %}{{- '<｜tool▁outputs▁end｜>' }}\
{%- endif %}{%- elif m.tool_calls %}{{- '<｜Assistant｜><｜tool▁calls▁begin｜>' }}\
{%- for k in m.tool_calls %}{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + k.function.name + \
'\\n```json\\n' + (k.function.arguments | tojson) + '\\n```<｜tool▁call▁end｜>' }}{%- endfor %}\
{{- '<｜tool▁calls▁end｜>' + eos_token }}{%- else %}\
{{- '<｜Assistant｜>' + m.content.split('</think>')[-1] + eos_token }}{%- endif %}{%- endfor %}\
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{- '<｜Assistant｜><think>\\n' }}\
{%- endif %}"""
GLM4 = """\
{{- '[gMASK]<sop>' }}{%- if tools %}{{- '<|system|>\\n' + (tools | tojson) }}{%- endif %}\
{%- for m in messages %}{%- if m.role == 'tool' %}{{- '<|observation|>\\n' + m.content }}\
{%- elif m.tool_calls %}{%- for k in m.tool_calls %}\
{{- '<|assistant|>' + k.function.name + '\\n' + (k.function.arguments | tojson) }}{%- endfor %}\
{%- else %}{{- '<|' + m.role + '|>\\n' + m.content }}{%- endif %}{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""

IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
GLM_MARKS = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
DEEPSEEK_MARKS = tuple(
    f"<｜{name}｜>"
    for name in (
        "begin▁of▁sentence",
        "end▁of▁sentence",
        "User",
        "Assistant",
        "tool▁calls▁begin",
        "tool▁calls▁end",
        "tool▁call▁begin",
        "tool▁call▁end",
        "tool▁sep",
        "tool▁outputs▁begin",
        "tool▁outputs▁end",
        "tool▁output▁begin",
        "tool▁output▁end",
    )
)
QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
# Family -> template, special tokens (of which the first three are bos, eos and the end of a turn).
FAMILIES = {
    "Qwen2.5": (chatml(QWEN), (None, "<|im_end|>", "<|im_end|>"), IM),
    "Qwen3": (chatml(thinking=THINKING), (None, "<|im_end|>", "<|im_end|>"), IM),
    "SmolLM2": (
        chatml("You are a helpful AI assistant named SmolLM, trained by Hugging Face"),
        (None, "<|im_end|>", "<|im_end|>"),
        IM,
    ),
    "Hermes": (
        chatml(result="tool"),
        ("<|begin_of_text|>", "<|im_end|>", "<|im_end|>"),
        (*IM, "<|begin_of_text|>"),
    ),
    "Llama 3": (
        LLAMA,
        ("<|begin_of_text|>", "<|eot_id|>", "<|eot_id|>"),
        (
            "<|begin_of_text|>",
            "<|eot_id|>",
            "<|eom_id|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
        ),
    ),
    "Mistral": (
        MISTRAL,
        ("<s>", "</s>", "</s>"),
        (
            "<s>",
            "</s>",
            "[INST]",
            "[/INST]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_CALLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
        ),
    ),
    "Gemma": (
        GEMMA,
        ("<bos>", "<eos>", "<end_of_turn>"),
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    ),
    "Phi": (
        PHI3,
        (None, "<|endoftext|>", "<|end|>"),
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
    ),
    "DeepSeek": (
        DEEPSEEK,
        (DEEPSEEK_MARKS[0], DEEPSEEK_MARKS[1], DEEPSEEK_MARKS[1]),
        DEEPSEEK_MARKS,
    ),
    "GLM": (GLM4, (None, "<|endoftext|>", None), (*GLM_MARKS, "<|endoftext|>")),
}


def family_tokenizer(name, *, pre_tokenizer=None):
    """A tokenizer with the template and the special tokens of a family."""
    return tokenizer_of(*FAMILIES[name], pre_tokenizer=pre_tokenizer)


def tokenizer_of(template, ends, special, *, pre_tokenizer=None):
    """A tokenizer with a template and special tokens; `ends` begins with bos and eos."""
    bos, eos, *_ = ends
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, *("".join(m) for m in MERGES)])}
    tokenizer = Tokenizer(models.BPE(vocab, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    named = {"eos_token": eos} | ({"bos_token": bos} if bos else {})
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        additional_special_tokens=[t for t in special if t not in (bos, eos)],
        **named,
    )
    wrapped.chat_template = template
    return wrapped
