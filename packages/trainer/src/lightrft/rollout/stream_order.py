"""Order in which the groups of streaming rollouts are trained on."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class GroupFacts:
    """Facts of a group in flight that all ranks know.

    Args:
        request_id: Number of its prompt in the run.
        begun, complete: Rounds of its first and of its last token; 0 is not yet.
        num_tokens: Sampled so far.
        num_forgotten: Sampled beside them, by episodes that then started over.
    """

    request_id: int
    begun: int
    complete: int
    num_tokens: int
    num_forgotten: int = 0


def groups_to_train(
    groups: Sequence[GroupFacts], num_wanted: int, *, round_number: int, max_staleness: int
) -> list[GroupFacts]:
    """The groups that a round trains on, in the order of (complete, request id), open ones last.

    Those that are not complete have to be waited for. Every group is trained within
    `max_staleness` rounds after it has begun, as long as at most (max_staleness + 1) num_wanted
    groups are in flight: of the n that are due within j rounds, n - j num_wanted are taken now.

    Args:
        groups: That have begun.
        num_wanted: Groups that a step trains on.
        round_number, max_staleness: This round, and how many may pass.
    """
    by_age = sorted(groups, key=lambda each: (each.begun, each.request_id))
    num_due = [
        sum(each.begun + max_staleness <= round_number + later for each in by_age)
        - later * num_wanted
        for later in range(max_staleness + 1)
    ]
    required = by_age[: max(0, *num_due)]
    taken = {each.request_id for each in required}
    rest = [each for each in by_age if each.request_id not in taken]
    whole = sorted((each for each in rest if each.complete), key=in_order)
    still_open = [each for each in rest if not each.complete]
    return sorted([*required, *whole, *still_open][:num_wanted], key=in_order)


def in_order(group: GroupFacts) -> tuple[bool, int, int]:
    """The key by which groups are trained in order."""
    return not group.complete, group.complete, group.request_id
