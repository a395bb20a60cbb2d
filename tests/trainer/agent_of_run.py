"""An agent that appends, branches, rewrites and calls in parallel; the same in every world."""

import asyncio

import httpx


async def run(base_url, api_key, row):
    headers = {"authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(headers=headers, timeout=None, trust_env=False) as client:

        async def ask(talk, **options):
            body = {"model": "policy", "messages": talk, **options}
            answer = await client.post(f"{base_url}/chat/completions", json=body)
            return answer.raise_for_status().json()["choices"][0]["message"]

        talk = list(row["prompt"])
        first = await ask(talk)
        user = {"role": "user", "content": "more"}
        kinds = row["sample_seed"] % 3
        talk += [first, user]
        second = await ask(talk)
        if kinds:
            await asyncio.gather(*(ask([*talk, second, {**user, "content": c}]) for c in "abc"))
        if kinds == 2:
            talk[1] = {"role": "assistant", "content": "rewritten"}
        last = await ask([*talk[:2], {**user, "content": "the end"}])
    return {"reward": sum(map(ord, last["content"])) % 7 / 7, "kind": float(kinds)}
