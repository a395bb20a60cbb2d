"""Faults: ranks that share a stream with images take their parts of it in wrong ways.

Each has the signature of `lightrft.models.vision.forward.cut_tokens`, in whose place it is put.
"""

from contextlib import contextmanager

import torch

from lightrft.engines.media.families import language_model
from lightrft.models.vision import forward

# Private: a planted fault has to stand in the very place.
right_cut = forward.cut_tokens


@contextmanager
def before(module, change):
    """Changes the keyword arguments of a module's calls."""

    def hook(module, args, given):
        return args, {**given, **change(given)}

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def ids_before_merge(trunk, own):
    """The ids are cut, and features of all images are looked for between them."""

    def cut(given):
        places = given["position_ids"]
        return {"input_ids": given["input_ids"][:, own], "position_ids": places[..., own]}

    return before(trunk, cut)


@contextmanager
def first_features(trunk, own):
    """The ids are cut first, and every rank takes the first of the features for its own."""
    seen = []

    def keep(given):
        ids = given["input_ids"]
        seen.append(ids == trunk.config.image_token_id)
        return {}

    def mix(given):
        is_image, embeds = seen[-1], given["inputs_embeds"]
        taken = torch.zeros_like(is_image)
        taken[:, own] = is_image[:, own]
        features = embeds[is_image][: int(taken.sum())]
        return {"inputs_embeds": embeds.masked_scatter(taken[..., None], features)}

    with before(trunk, keep), before(language_model(trunk), mix), right_cut(trunk, own):
        yield


def positions_from_zero(trunk, own):
    """Every rank counts positions as the first does."""
    length = own.stop - own.start

    def cut(given):
        places = given["position_ids"].clone()
        places[..., own] = places[..., :length]
        return {"position_ids": places}

    return _then_right(trunk, own, cut)


def inner_features_whole(trunk, own):
    """Features of inner layers are not cut."""
    return _inner_features(trunk, own, lambda features, inside: features)


def inner_features_first(trunk, own):
    """Every rank takes the first features of inner layers."""
    return _inner_features(trunk, own, lambda features, inside: features[:inside])


def inner_features_dropped(trunk, own):
    """Features of inner layers reach no rank."""

    def drop(given):
        return {"visual_pos_masks": None, "deepstack_visual_embeds": None}

    return _then_right(trunk, own, drop)


@contextmanager
def _then_right(trunk, own, change):
    with before(language_model(trunk), change), right_cut(trunk, own):
        yield


@contextmanager
def _inner_features(trunk, own, take):
    """Gives each inner layer what `take` makes of all its features and the number of its own."""
    kept = []

    def keep(given):
        kept.append(given["deepstack_visual_embeds"])
        return {}

    def restore(given):
        if kept[-1] is None:  # rows of text
            return {}
        inside = int(given["visual_pos_masks"].sum())
        return {"deepstack_visual_embeds": [take(each, inside) for each in kept[-1]]}

    module = language_model(trunk)
    with before(module, keep), right_cut(trunk, own), before(module, restore):
        yield


# Those that no check of shapes can see.
SILENT = {
    "tiny-qwen2.5-vl": (first_features, positions_from_zero),
    "tiny-qwen3-vl": (first_features, inner_features_first, inner_features_dropped),
    "tiny-gemma3": (first_features,),
}
LOUD = {
    "tiny-qwen2.5-vl": (ids_before_merge,),
    "tiny-qwen3-vl": (ids_before_merge, inner_features_whole),
}
