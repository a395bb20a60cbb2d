"""Scores of a reward for responses whose prompts do not matter."""


def results_of(reward, responses, labels=None, **columns):
    """Return the results of responses of one prompt, without labels unless they are said."""
    count = len(responses)
    return reward.score(["p"] * count, list(responses), labels or [None] * count, columns)


def numbers_of(reward, responses, labels=None, **columns):
    """Return the rewards of responses; None where they are undecided."""
    found = results_of(reward, responses, labels, **columns)
    return [None if result is None else result.reward for result in found]
