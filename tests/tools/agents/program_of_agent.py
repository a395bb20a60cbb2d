"""A program that owns its loop, of the standard library; its row says what it does."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

base_url = sys.argv[1]
with open(sys.argv[2]) as file:
    row = json.load(file)


def asked(talk):
    return urllib.request.Request(
        f"{base_url}/chat/completions",
        json.dumps({"model": "policy", "messages": talk}).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {key}"},
    )


def ask(talk):
    with urllib.request.urlopen(asked(talk)) as answer:
        return json.load(answer)["choices"][0]["message"]


def reaches(family, address):
    try:
        socket.socket(family).connect(address)
    except OSError:
        return 0
    return 1


key = os.environ["OPENAI_API_KEY"]
assert os.environ["OPENAI_BASE_URL"] == base_url
talk = list(row["prompt"])
for _ in range(row.get("turns", 1)):
    talk += [ask(talk), {"role": "user", "content": f"And {row.get('target')}?"}]
match row.get("then"):
    case "fail":
        sys.exit("it went wrong")
    case "flood":
        while True:
            print("x" * 1000)
    case "stay":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        time.sleep(1000)
    case "close":  # its sending side, once it has asked
        request = asked(talk)
        head = "".join(f"{name}: {value}\r\n" for name, value in request.header_items())
        host, port = request.host.split(":")
        with socket.create_connection((host, int(port))) as line:
            line.sendall(f"POST {request.selector} HTTP/1.1\r\nhost: {request.host}\r\n".encode())
            line.sendall(f"{head}content-length: {len(request.data)}\r\n\r\n".encode())
            line.sendall(request.data)
            line.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: line.recv(65536), b""))
        print(float(b"HTTP/1.1 200" in answer))
    case "chat":
        print("I have done it.")
    case "look":
        tcp = reaches(socket.AF_INET, ("127.0.0.1", row["port"]))
        unix = reaches(socket.AF_UNIX, "\0" + row["name"])
        links = {name for _, name in socket.if_nameindex()} - {"lo"}
        seen = os.path.exists(row["file"])
        found = {"tcp": tcp, "unix": unix, "links": len(links), "files": seen}
        print(json.dumps({"reward": 1, **found}))
    case _:
        print("thinking ...")
        print(len(talk[1]["content"]) / 100)
