"""Few choices among all combinations of options, in which every pair of values occurs."""

import itertools
import random


def pairs_of(choice):
    """Every two options of a choice, with their values."""
    return set(itertools.combinations(choice.items(), 2))


def pairwise_cover(choices):
    """Few choices in which every pair of values that occurs at all occurs; greedy, seeded."""
    left = [(choice, pairs_of(choice)) for choice in choices]
    random.Random(0).shuffle(left)
    missing = set().union(*(pairs for _, pairs in left))
    cover = []
    while missing:
        left = [(choice, pairs & missing) for choice, pairs in left if pairs & missing]
        best, gained = max(left, key=lambda item: len(item[1]))
        missing -= gained
        cover.append(best)
    return cover
