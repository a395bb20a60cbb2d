"""The decode loop waits for the device once a step, and once more for rows that end."""

import torch
from tests.host_waits import HostWaits

from lightrft.engines.hf.decode import StopRule, decode, stop_token_table
from lightrft.engines.types import SamplingParams


class Counting:
    """Rows whose next token is one more than the last; row r begins with r."""

    can_drop_rows = True

    def __init__(self, num_rows, vocab):
        self.tokens = torch.arange(num_rows)
        self.vocab = vocab
        self.waits = []
        self.watch = None

    def routes(self):
        return []

    def logits(self):
        if self.watch is not None:
            self.waits.append(len(self.watch.names))
        return (self.tokens[:, None] == torch.arange(self.vocab)).float() * 1e4

    def start(self):
        return self.logits()

    def advance(self, tokens):
        self.tokens = tokens + 1
        return self.logits()

    def keep(self, rows):
        self.tokens = self.tokens[rows]


def test_a_step_of_the_decode_loop_waits_once():
    num_rows, vocab = 6, 32
    forward = Counting(num_rows, vocab)
    rule = StopRule(stop_token_table([10], vocab, device=torch.device("cpu")), (), 0)
    found = []
    with HostWaits() as watch:
        forward.watch = watch
        keys, limits = torch.arange(num_rows), [99, 99, 99, 4, 99, 99]
        for rows in decode(
            forward, keys=keys, limits=limits, params=SamplingParams(max_tokens=99), rule=rule
        ):
            # The last two are of what is on the host.
            assert watch.names[-4:] == ["tolist", "cpu", "tolist", "tolist"]
            found += [(row.row, row.token_ids, row.is_stopped) for row in rows]
            watch.names[:] = ["reading"] * forward.waits[-1]
    # 5 stops at its 6th token, 0 at its 11th; 3 reaches its limit.
    expected = [(3, 4, False), (5, 6, True), (4, 7, True), (2, 9, True), (1, 10, True)]
    expected.append((0, 11, True))
    assert [(r, len(t), s) for r, t, s in found] == expected
    assert all(tokens == list(range(row, row + len(tokens))) for row, tokens, _ in found)
    # Rows that ended were read once more, which is left out here.
    steps = [b - a for a, b in zip(forward.waits, forward.waits[1:], strict=False)]
    assert max(steps) <= 1, steps
