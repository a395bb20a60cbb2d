"""Agents that are written with the packages people have; their row is a sum."""


def paid(row, said):
    """For the number, and a little by length, so that answers differ in what they get."""
    right = str(row["target"]) in said
    return {"reward": right + len(said) % 10 / 10, "right": right}


async def with_openai(base_url, api_key, row):
    """Two turns over a stream, and one without."""
    from openai import AsyncOpenAI

    talk = list(row["prompt"])
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        stream = await client.chat.completions.create(model="policy", messages=talk, stream=True)
        said = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        talk += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": "Say the number alone."},
        ]
        answer = await client.chat.completions.create(model="policy", messages=talk)
    return paid(row, answer.choices[0].message.content)


async def with_anthropic(base_url, api_key, row):
    """Two turns, the second of which rewrites the first."""
    from anthropic import AsyncAnthropic

    address = base_url.removesuffix("/v1")
    async with AsyncAnthropic(base_url=address, api_key=api_key) as client:
        said = ""
        for asked in (row["prompt"][-1]["content"], f"What is {row['target'] - 2} + 2?"):
            talk = [{"role": "user", "content": asked}]
            answer = await client.messages.create(
                model="policy", messages=talk, max_tokens=24, system="Be short."
            )
            said = answer.content[0].text if answer.content else ""
    return paid(row, said)


def with_smolagents(base_url, api_key, row):
    """An agent that writes code, which the model seldom does."""
    from smolagents import CodeAgent, OpenAIModel

    model = OpenAIModel("policy", api_base=base_url, api_key=api_key)
    agent = CodeAgent([], model, max_steps=2, verbosity_level=-1)
    said = str(agent.run(row["prompt"][-1]["content"]))
    return paid(row, said)
