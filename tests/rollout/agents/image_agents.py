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


async def by_other_clients(base_url, api_key, row):
    """One conversation over the three protocols, by the packages that people have."""
    import anthropic
    import openai

    picture, late = squares(3, (84, 84)), squares(4)
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
    talk = [said("Look.", picture)]
    answer = await client.chat.completions.create(model="policy", messages=talk)
    text = answer.choices[0].message.content
    items = [{"type": "input_text", "text": "Look."}]
    items.append({"type": "input_image", "image_url": address_of(picture), "detail": "auto"})
    further = [{"type": "input_image", "image_url": address_of(late), "detail": "auto"}]
    said_so_far = [{"role": "user", "content": items}, {"role": "assistant", "content": text}]
    asked = [*said_so_far, {"role": "user", "content": further}]
    response = await client.responses.create(model="policy", input=asked)

    def block(image):
        data = base64.b64encode(bytes_of(image)).decode()
        source = {"type": "base64", "media_type": "image/png", "data": data}
        return {"type": "image", "source": source}

    other = anthropic.AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key)
    own = [{"type": "text", "text": "Look."}, block(picture)]
    messages = [
        {"role": "user", "content": own},
        {"role": "assistant", "content": text},
        {"role": "user", "content": [block(late)]},
        {"role": "assistant", "content": response.output_text},
        {"role": "user", "content": "The end."},
    ]
    await other.messages.create(model="policy", max_tokens=8, messages=messages)
    return 1.0
