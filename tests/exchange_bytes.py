"""The bytes that an exchange of rows should move, which tests compare with those it moves."""

from dataclasses import dataclass

# Of `records.columns.COLUMNS` that all ranks exchange, which a test compares.
ROW_BYTES = 49
COMPONENT_BYTES = 8
# Framing of one rank's rows, of one sample's evidence and of each call in it, as measured.
MESSAGE_BYTES = 40
EVIDENCE_ROW_BYTES = 90
EVIDENCE_CALL_BYTES = 70
# What all ranks know of a group in flight.
GROUP_BYTES = 16


@dataclass(frozen=True, slots=True)
class StepSamples:
    """The samples of one step over all ranks.

    Args:
        count: Of them.
        prompt_tokens, response_tokens: Of one sample on average; the response with observations.
        observed_tokens: Tokens of observations among those of the response.
        num_turns: Calls of the engine for one response.
    """

    count: int
    prompt_tokens: float
    response_tokens: float
    observed_tokens: float = 0.0
    num_turns: float = 1.0

    @property
    def token_bytes(self):
        """Of one sample's ids and logprobs."""
        return 4 * (self.prompt_tokens + 2 * self.response_tokens)


@dataclass(frozen=True, slots=True)
class ExchangeBytes:
    """Bytes that one rank gets from the others in one step.

    Args:
        rows: Ids, rewards, lengths and masks of the samples of all ranks.
        tokens: Of the samples that it trains.
        evidence: Ledger and journal of these samples; 0 without the ledger gate.
    """

    rows: float
    tokens: float
    evidence: float

    @property
    def total(self):
        """All of them."""
        return self.rows + self.tokens + self.evidence


def predict_exchange(samples, *, world_size, sp_size=1, ledger_gate=True, num_open_groups=0.0):
    """The mean over ranks of what `exchange`, `deliver_rows` and `deliver_evidence` move.

    A sample is trained on a rank that has nothing to do with where it was sampled, so 1 of
    `world_size` need not move. Rewards have one component.

    Args:
        samples: Of the step.
        world_size: Ranks.
        sp_size: Ranks that train the same samples.
        ledger_gate: Whether evidence moves.
        num_open_groups: Of streaming rollouts, which tell all ranks of them three times.
    """
    moved = (world_size - 1) / world_size
    trained = samples.count * sp_size / world_size
    tokens = samples.token_bytes
    if samples.observed_tokens:
        tokens += samples.response_tokens / 8
    evidence = samples.token_bytes - 4 * samples.observed_tokens
    evidence += EVIDENCE_ROW_BYTES + EVIDENCE_CALL_BYTES * samples.num_turns
    rows = samples.count * (ROW_BYTES + COMPONENT_BYTES) + world_size * MESSAGE_BYTES
    return ExchangeBytes(
        rows=moved * (rows + 3 * GROUP_BYTES * num_open_groups),
        tokens=moved * trained * tokens,
        evidence=moved * trained * evidence if ledger_gate else 0.0,
    )
