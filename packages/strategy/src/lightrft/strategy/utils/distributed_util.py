"""Groups of ranks, and the gathering of their prompts."""

from typing import TypeVar

from lightrft.strategy.distributed.collectives import Group, gather_objects
from lightrft.strategy.distributed.process_groups import create_sub_group as create_sub_group

T = TypeVar("T")


def gather_inputs_object_for_inference(input_data: list[T], group: Group) -> list[T]:
    """Return the items of all ranks of a group, in rank order. Collective."""
    return [item for part in gather_objects(input_data, group) for item in part]
