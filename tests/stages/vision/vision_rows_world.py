"""Rows with and without images, read as a run reads them, and what the processor says of each."""

import torch
from PIL import Image
from tests.datasets.media_files import picture
from tests.datasets.row_files import written

from lightrft.config import TrainConfig
from lightrft.datasets.media import VisionPrompts
from lightrft.datasets.row_data import RowMediaReader
from lightrft.engines.media.families import placeholder_ids

# Image files by name, with their sizes.
SIZES = {"a": (84, 84), "b": (112, 56), "c": (56, 84)}


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


# One image; none; two of other sizes; images before two turns, equally answered; text alone.
CHATS = (
    ([user("<image>How many?"), assistant("three")], ["a"]),
    ([user("say it"), assistant("yes")], []),
    (
        [
            user([{"type": "image"}, {"type": "image"}, {"type": "text", "text": "same?"}]),
            assistant("no"),
        ],
        ["b", "c"],
    ),
    (
        [user("<image>one?"), assistant("yes"), user("and <image> here?"), assistant("yes")],
        ["c", "a"],
    ),
    ([user("hello"), assistant("there"), user("again"), assistant("no no no no")], None),
)


def write_rows(folder, rows, name="rows.jsonl"):
    for seed, (image, size) in enumerate(SIZES.items()):
        picture(*size, seed).save(folder / f"{image}.png")
    return written(folder, rows, name)


def chat_rows(chats=CHATS):
    return [
        {"messages": chat} | ({} if names is None else {"images": [f"{n}.png" for n in names]})
        for chat, names in chats
    ]


def reader_of(model, encoder):
    """What `read_vocabulary` gives, from a model in memory."""
    return RowMediaReader(VisionPrompts(encoder), placeholder_ids(model.config))


def load(loader, path, model, encoder, **changes):
    config = TrainConfig(**changes)
    tokenizer = encoder.processor.tokenizer
    reader = reader_of(model, encoder)
    return loader(path, tokenizer, config, max_samples=99, split="train", reader=reader)


def as_parts(chat):
    """Messages as parts, marks of images in texts included."""
    found = []
    for message in chat:
        content, parts = message["content"], []
        if isinstance(content, list):
            parts = content
        else:
            for place, piece in enumerate(content.split("<image>")):
                parts += [{"type": "image"}] * (place > 0)
                parts += [{"type": "text", "text": piece}] * bool(piece)
        found.append({**message, "content": parts})
    return found


def seen_alone(encoder, folder, chat, names):
    """Inputs of one conversation by the processor, and which of its tokens are of answers.

    Answers of other letters change those tokens, and the end of the turn stands behind them.
    """
    processor, chat = encoder.processor, as_parts(chat)
    images = [Image.open(folder / f"{name}.png") for name in names or ()]

    def inputs(messages):
        text = processor.apply_chat_template(messages, tokenize=False)
        if not images:
            # As prompts of text: some processors put a token of their own in front.
            return processor.tokenizer(text, add_special_tokens=False, return_tensors="pt")
        own = {"images": [images], "add_special_tokens": False, "return_tensors": "pt"}
        return processor(text=[text], **own)

    def altered(message):
        if message["role"] != "assistant":
            return message
        text = "".join("#" if letter != "#" else "%" for letter in message["content"][0]["text"])
        return assistant([{"type": "text", "text": text}])

    whole = inputs(chat)
    other = inputs([altered(message) for message in chat])["input_ids"][0]
    is_answer = (whole["input_ids"][0] != other).numpy()
    is_trained = is_answer.copy()
    is_trained[1:] |= is_answer[:-1]
    return {k: v for k, v in whole.items() if isinstance(v, torch.Tensor)}, is_trained
