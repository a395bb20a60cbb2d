"""Agents that show pictures; run in worker processes by the tests."""

import base64

from tests.rollout.agents.agent_cases import Client
from tests.rollout.image_environments import bytes_of, squares


def address_of(picture):
    return f"data:image/png;base64,{base64.b64encode(bytes_of(picture)).decode()}"


def shown(picture):
    return {"type": "image_url", "image_url": {"url": address_of(picture)}}


def said(*parts):
    own = [{"type": "text", "text": p} if isinstance(p, str) else shown(p) for p in parts]
    return {"role": "user", "content": own}


async def album(base_url, api_key, row):
    """A picture in the first message and others later, and once others of the same sizes."""
    first, other = 10 * row["number"], 10 * row["number"] + 5
    async with Client(base_url, api_key) as client:
        talk = row["prompt"]
        if isinstance(talk[-1]["content"], str):  # the row has no picture
            talk = [said(squares(first, (84, 84)), talk[-1]["content"])]
        talk.append(await client.ask(talk))
        talk.append(said("And <image> this?", squares(first + 1, (84, 56))))
        talk.append(await client.ask(talk))
        talk.append(said(squares(first + 2), "or that", squares(first + 3), "?"))
        await client.ask(talk)
        # The same words and sizes.
        again = [*talk[:-3], said("And <image> this?", squares(other, (84, 56)))]
        await client.ask(again)
    return 1.0
