"""Uploads to the hub, which is a server of this test."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants

from lightrft.cli.main import main
from lightrft.tools.model_presets import write_tiny_model
from lightrft.utils import hub as reachable


class Hub(ThreadingHTTPServer):
    """Takes files of one repository; `status` is the answer to its creation."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.files, self.created, self.status = {}, [], 200
        self.address = f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        place = self.path.partition("?")[0]
        if place == "/api/repos/create":
            self.server.created.append(json.loads(body))
            self._reply(self.server.status, {"url": f"{self.server.address}/me/sums"})
        elif place == "/api/validate-yaml":
            self._reply(200, {"errors": [], "warnings": []})
        elif "/preupload/" in place:
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            self._reply(200, {"files": files})
        elif "/commit/" in place:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.server.files[line["value"]["path"]] = content
            url = f"{self.server.address}/me/sums/commit/1"
            self._reply(200, {"commitUrl": url, "commitOid": "1", "pullRequestUrl": None})
        else:
            self._reply(404, {})

    def do_GET(self):
        self._reply(404, {})

    def _reply(self, status, answer):
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", server.address)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_TOKEN", "hf_of_this_test")
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    reachable.answers.cache_clear()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    write_tiny_model(folder / "model", "tiny-qwen3", 1)
    (folder / "config.toml").write_text('pretrain = "owner/name"\n')
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward": 0.25}\n')
    return folder


def export(run, *options):
    return main(["export", str(run), str(run.parent / "out"), *options])


@pytest.mark.parametrize("options, is_private", [([], True), (["--public"], False)])
def test_the_exported_files_are_uploaded(hub, run, capsys, options, is_private):
    assert export(run, "--push_to_hub", "me/sums", *options) == 0
    assert "uploaded: http://127.0.0.1" in capsys.readouterr().out
    out = run.parent / "out"
    assert {name: (out / name).read_bytes() for name in hub.files} == hub.files
    assert {"README.md", "model.safetensors", "config.json"} <= hub.files.keys()
    (created,) = hub.created
    assert (created["name"], created["organization"]) == ("sums", "me")
    assert (created["visibility"] == "private") == is_private


@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_of_the_hub_comes_before_the_export(hub, run, capsys, status):
    hub.status = status
    assert export(run, "--push_to_hub", "me/sums") == 3
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "me/sums cannot be written" in err
    assert "hf_of_this_test" not in err
    assert not (run.parent / "out").exists()
