"""Which media belong to which prompt; tests/contracts has the two forms and the placeholders."""

import pytest

from lightrft.strategy.engine.generation import has_media
from lightrft.strategy.strategy_base import StrategyBase


def build(prompts, images=None, images_num=None, videos=None, videos_num=None):
    # Published under this name by seed 004.
    return StrategyBase._build_multimodal_inputs(prompts, images, images_num, videos, videos_num)


def media(inputs, kind="image"):
    return [item.get("multi_modal_data", {}).get(kind) for item in inputs]


@pytest.mark.parametrize(
    "images, counts, expected",
    [
        (["a", "b", "c"], [0, 1, 2], [None, ["a"], ["b", "c"]]),
        ([("a", "b"), ("c",), ()], [2, 1, 0], [["a", "b"], ["c"], None]),
        ([("a", "b"), ("c",), ()], None, [["a", "b"], ["c"], None]),
        (["a", "b", "c"], None, [["a"], ["b"], ["c"]]),
        (["a", None, "c"], None, [["a"], None, ["c"]]),
        (["a", None, "c"], [1, 0, 1], [["a"], None, ["c"]]),
        ([["a"], None, [None]], None, [["a"], None, None]),
        ([["a"], None, "c"], [1, 0, 1], [["a"], None, ["c"]]),
        ([None, None, None], None, [None, None, None]),
        (None, None, [None, None, None]),
        (None, [0, 0, 0], [None, None, None]),
    ],
)
def test_images_reach_their_prompts(images, counts, expected):
    assert media(build(["p", "q", "r"], images, counts)) == expected
    assert media(build(["p", "q", "r"], None, None, images, counts), "video") == expected


@pytest.mark.parametrize(
    "images, counts, message",
    [
        (["a", "b", "c"], [1, 1], r"sum\(images_num\) = 2 entries, got 3"),
        (["a"], [1, 1], "= 2 entries, got 1"),
        ([["a", "b"], ["c"]], [1, 1], "prompt 0 has 2 but images_num says 1"),
        ([["a"]], None, "got 1 entries for 2 prompts"),
        (["a", "b"], [2], "got 1 for 2 prompts"),
        (None, [1, 0], "but none were given"),
    ],
)
def test_counts_that_do_not_fit_are_errors(images, counts, message):
    with pytest.raises(ValueError, match=message):
        build(["p", "q"], images, counts)


def test_has_media_looks_into_lists():
    assert has_media([None, ["a"]])
    assert not has_media([None, [None], []])
    assert not has_media(None)
