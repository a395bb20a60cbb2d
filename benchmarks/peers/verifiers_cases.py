"""What environments of verifiers need around them: words, and a server of NeMo Gym's resources."""

import json

from tests.answering import answering

WORDS = ("crane", "slate")


def write_words(folder):
    """A folder of NLTK's with as few words as a game of Wordle can do with."""
    for part in ("corpora/words", "taggers/averaged_perceptron_tagger_eng"):
        (folder / part).mkdir(parents=True)
    for name in ("en", "en-basic"):
        (folder / "corpora" / "words" / name).write_text("\n".join(WORDS) + "\n")
    tagger = {"weights": {}, "tagdict": dict.fromkeys(WORDS, "NN"), "classes": ["NN"]}
    name = "averaged_perceptron_tagger_eng"
    for part, content in tagger.items():
        (folder / "taggers" / name / f"{name}.{part}.json").write_text(json.dumps(content))
    return folder


def answer(path, headers, body):
    """A tool that adds, and 1 for an answer that holds the sum."""
    asked = json.loads(body or b"{}")
    if path == "/add":
        return 200, asked["x"] + asked["y"]
    if path == "/verify":
        made = asked["response"]["output"]
        said = made[-1]["content"][0]["text"]
        return 200, asked | {"reward": float(asked["sum"] in said), "items": len(made)}
    return 200, {}


def resources():
    """The address of a server of resources."""
    return answering(answer)


def sums(*pairs, has_tool=True):
    """Rows of NeMo Gym: sums, to be made with a tool."""
    number = {"type": "integer"}
    tool = {
        "type": "function",
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"x": number, "y": number},
            "required": ["x", "y"],
        },
    }
    for x, y in pairs:
        asked = [{"role": "user", "content": f"What is {x} + {y}?"}]
        params = {"input": asked, "tools": [tool] if has_tool else []}
        yield {"responses_create_params": params, "sum": str(x + y)}
