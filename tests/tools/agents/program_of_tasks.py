"""A program that does what the model says, in a shell."""

import json
import os
import subprocess
import sys
import urllib.request

base_url = sys.argv[1]
with open(sys.argv[2]) as file:
    row = json.load(file)
request = urllib.request.Request(
    f"{base_url}/chat/completions",
    json.dumps({"model": "policy", "messages": row["prompt"]}).encode(),
    {
        "content-type": "application/json",
        "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
    },
)
with urllib.request.urlopen(request) as answer:
    said = json.load(answer)["choices"][0]["message"]["content"]
sys.exit(subprocess.run(["bash", "-c", said], check=False).returncode)
