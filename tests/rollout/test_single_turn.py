from types import SimpleNamespace

import pytest

from lightrft.config import ConfigError
from lightrft.datasets.types import Prompt
from lightrft.engines.media.media import Media
from lightrft.engines.types import Completion
from lightrft.rollout.single_turn import RolloutGroups, build_requests
from lightrft.rollout.source import own_positions


class Rank:
    """One of several ranks."""

    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size


class LetterDecoder:
    def decode(self, token_ids, *, skip_special_tokens):
        assert skip_special_tokens
        return "".join(chr(97 + t) for t in token_ids if t != 25)


def prompt(i):
    return Prompt(id=i, text=f"p{i}", token_ids=(i, i + 1), label=str(i))


def completion(request_id, index, tokens=(0, 25), finish="stop"):
    return Completion(
        request_id, index, (1,), tuple(tokens), (-1.0,) * len(tokens), "temperature", finish
    )


def pair(prompts, completions, *, request_ids, group_ids, group_size=2):
    groups = RolloutGroups(
        prompts, request_ids, group_ids=group_ids, group_size=group_size, decoder=LetterDecoder()
    )
    return groups.in_order(completions)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_positions_of_all_ranks_cover_the_batch_in_sampler_order(world_size):
    dealt = {
        position: (rank, local)
        for rank in range(world_size)
        for local, position in enumerate(own_positions(Rank(rank, world_size), 8))
    }
    assert sorted(dealt) == list(range(8))
    for position, (rank, local) in dealt.items():
        # What an interleaving sampler hands to that rank at that place.
        assert list(range(8))[rank::world_size][local] == position


def test_each_prompt_gets_the_completions_of_its_request():
    prompts = [prompt(0), prompt(1)]
    completions = [completion(40, 0, (3,)), completion(40, 1), completion(42, 0), completion(42, 1)]
    rollouts = pair(prompts, completions, request_ids=[40, 42], group_ids=[4, 6])
    assert [r.prompt.label for r in rollouts] == ["0", "0", "1", "1"]
    assert [r.sample_id for r in rollouts] == [8, 9, 12, 13]
    assert [r.group_id for r in rollouts] == [4, 4, 6, 6]
    assert [r.response_text for r in rollouts] == ["d", "a", "a", "a"]


@pytest.mark.parametrize(
    "completions",
    [
        [completion(1, 0), completion(0, 0)],
        [completion(0, 0)],
        [completion(0, 0), completion(1, 1)],
    ],
)
def test_completions_in_another_order_or_number_are_refused(completions):
    with pytest.raises(RuntimeError, match="first difference at"):
        pair(
            [prompt(0), prompt(1)], completions, request_ids=[0, 1], group_ids=[0, 1], group_size=1
        )


def test_an_aborted_completion_is_an_error():
    with pytest.raises(RuntimeError, match=r"aborted 1 completions \(requests \[7\]\)"):
        pair(
            [prompt(0)],
            [completion(7, 0, finish="abort")],
            request_ids=[7],
            group_ids=[0],
            group_size=1,
        )


def test_requests_carry_ids_text_and_images():
    class Encoder:
        reads_media = True

        def kept(self, text, media):
            return SimpleNamespace(token_ids=(1,), text=text, media=media)

        def kept_all(self, prompts):
            return [self.kept(*each) for each in prompts]

    image = object()
    row = Prompt(id=0, text="look", token_ids=(1,), media=Media({"image": (image,)}))
    (request,) = build_requests([row], [12], Encoder())
    assert (request.request_id, request.prompt_text) == (12, "look")
    assert request.multi_modal.images == (image,)
    assert (request.encoded.text, request.encoded.media) == ("look", row.media)
    with pytest.raises(ConfigError, match="the trainer needs the model's processor"):
        build_requests([row], [12])
