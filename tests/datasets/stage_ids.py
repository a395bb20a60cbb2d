"""Token ids that each stage gives one conversation: equal everywhere, or refused everywhere."""

from tests.datasets.row_files import written

from lightrft.config import TrainConfig
from lightrft.datasets import DataError, load_prompts
from lightrft.datasets.chat_ids import ChatIds
from lightrft.datasets.messages import read_messages, read_tools
from lightrft.datasets.preference_rows import load_preferences
from lightrft.datasets.supervised_rows import load_supervised
from lightrft.rollout.environments.specs import ToolTokenizer

ASK = {"role": "user", "content": "hello"}
SYSTEM = {"role": "system", "content": "ok."}
ANSWER = {"role": "assistant", "content": "all"}
WORSE = {"role": "assistant", "content": "hell"}
RESULT = {"role": "tool", "content": "20", "name": "weather", "tool_call_id": "call00001"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells it.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Where."}},
            "required": ["city"],
        },
    },
}


def calling(arguments):
    function = {"name": "weather", "arguments": arguments}
    call = {"id": "call00001", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


# Name -> forms of one prompt, which have the same ids, and its tools.
PROMPTS = {
    "plain": ([[ASK], [{"from": "human", "value": "hello"}]], []),
    "parts": ([[ASK], [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]], []),
    "system": ([[SYSTEM, ASK]], []),
    "history": ([[ASK, ANSWER, ASK]], []),
    "thinking": (
        [
            [ASK, {**ANSWER, "reasoning_content": "hm"}, ASK],
            [ASK, {**ANSWER, "thinking": "hm", "reasoning_content": None}, ASK],
        ],
        [],
    ),
    "tools": ([[ASK]], [TOOL]),
    "calls": (
        [
            [ASK, calling({"city": "all"}), RESULT],
            [ASK, calling('{"city": "all"}'), RESULT],
            [ASK, {**calling('{"city": "all"}'), "content": None, "refusal": None}, RESULT],
        ],
        [TOOL],
    ),
}


def outcomes(folder, tokenizer, prompt, tools):
    """By stage the ids of a prompt, with an answer behind it where the stage has one, or None."""
    columns = {
        "input": prompt,
        "messages": [*prompt, ANSWER],
        "prompt": prompt,
        "chosen": [ANSWER],
        "rejected": [WORSE],
        "tools": tools,
    }
    path = written(folder, [columns])
    asks = TrainConfig(apply_chat_template=True, prompt_max_len=9999)
    answers = TrainConfig(train_on="last_assistant", max_row_tokens=9999)
    given = {"max_samples": 1, "split": "train"}
    talk = read_messages(columns, "input").messages

    def agents():
        # Agents ask with tools of their own, and their messages hold one text each.
        chat = ChatIds(tokenizer)
        own = [{**each, "content": _text(each["content"])} for each in talk]
        return chat.prompt(own, read_tools(columns)).token_ids

    stages = {
        "train": lambda: load_prompts(path, tokenizer, asks)[0].token_ids,
        "environments": lambda: (
            load_prompts(path, ToolTokenizer(tokenizer, tools), asks)[0].token_ids
        ),
        "agents": agents,
        "sft": lambda: load_supervised(path, tokenizer, answers, **given).rows[0].token_ids,
        "prefer": lambda: (
            load_preferences(path, tokenizer, answers, **given).rows[0].chosen.token_ids
        ),
    }
    found = {}
    for stage, ids in stages.items():
        try:
            found[stage] = tuple(map(int, ids()))
        except DataError:
            found[stage] = None
    return found


def _text(content):
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def require_alike(folder, tokenizer, name):
    """The ids of a prompt in every form, after a look at every stage; None where it is refused."""
    forms, tools = PROMPTS[name]
    found = [outcomes(folder, tokenizer, form, tools) for form in forms]
    prompts = {each["train"] for each in found}
    assert len(prompts) == 1, prompts
    (prompt,) = prompts
    # Environments and agents bring tools of their own, and refuse a template without at the start.
    others = {each[stage] for each in found for stage in ("environments", "agents")}
    assert others == {prompt} or prompt is None, others
    rows = {each[stage] for each in found for stage in ("sft", "prefer")}
    assert len(rows) == 1, rows
    (row,) = rows
    if prompt is None:
        assert row is None
    elif row is not None:
        assert row[: len(prompt)] == prompt
    return prompt
