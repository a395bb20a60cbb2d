"""What environments of verifiers need around them: words, and a server of NeMo Gym's resources."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

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


class Resources(BaseHTTPRequestHandler):
    """A tool that adds, and 1 for an answer that holds the sum."""

    def do_GET(self):
        self.answer({})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        match self.path:
            case "/seed_session":
                self.answer({})
            case "/add":
                self.answer(asked["x"] + asked["y"])
            case "/verify":
                made = asked["response"]["output"]
                said = made[-1]["content"][0]["text"]
                self.answer(asked | {"reward": float(asked["sum"] in said), "items": len(made)})

    def answer(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@contextmanager
def resources():
    """The address of such a server."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Resources) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


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
