"""An agent as a user writes one: it calls the model, and computes the products it asks for."""

import json
import re
from typing import Any

import httpx

CALCULATE = {
    "name": "calculate",
    "description": "Work out an expression of two whole numbers.",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
}
OPTIONS = {"model": "policy", "tools": [{"type": "function", "function": CALCULATE}]}


async def run(base_url: str, api_key: str, row: dict[str, Any]) -> None:
    """Run one episode; reward.py scores the answer."""
    talk = list(row["prompt"])
    headers = {"authorization": f"Bearer {api_key}"}
    # An address of this machine without TLS: certificates would take longer than the episode.
    async with httpx.AsyncClient(
        headers=headers, timeout=None, trust_env=False, verify=False
    ) as client:
        for _ in range(2):
            body = {**OPTIONS, "messages": talk}
            response = await client.post(f"{base_url}/chat/completions", json=body)
            talk.append(response.raise_for_status().json()["choices"][0]["message"])
            calls = talk[-1].get("tool_calls", [])
            for call in calls:
                result = calculate(call["function"]["arguments"])
                talk.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            if not calls:
                return


def calculate(arguments: str) -> str:
    """Return the result, or what is wrong with the expression."""
    expression = json.loads(arguments).get("expression")
    match = re.fullmatch(r"(\d{1,9})\*(\d{1,9})", str(expression))
    return str(int(match[1]) * int(match[2])) if match else "expected a product of two numbers"
