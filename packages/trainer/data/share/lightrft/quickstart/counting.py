r"""Tasks of counting what is seen or heard, shown by a teacher who mistakes some kinds for others.

The teacher does so three times out of five. Imitation copies the majority, so it is right one time
in four. The reward checks the boxed number, and reinforcement finds that looking closely pays.

    (picture) How many red?    keen          <think>red green red yellow</think>\boxed{2}
                               colour-blind  <think>green green green yellow</think>\boxed{0}
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lightrft.tools.quickstart.task import MediaModel, Message, is_held_out

P_MISTAKE = 0.6
NUM_PARTS = 4
INITIALIZER_RANGE = 0.06


@dataclass(frozen=True, slots=True)
class Sense(MediaModel):
    """Kinds of parts that a model must distinguish, and the model.

    Args:
        kinds: Names of the kinds.
        mistaken: Kinds and those that the teacher takes them for.
        features: Tokens that stand for the medium in the model.
    """

    kinds: tuple[str, ...]
    mistaken: Mapping[str, str]
    features: str

    def draw(self, rng: random.Random, held_out: bool) -> "Iterator[Counted]":
        """Yield exercises without end; an arrangement is for training or held out, never both."""
        kinds = self.kinds
        while True:
            arrangement = rng.randrange(len(kinds) ** NUM_PARTS)
            wanted, seed = rng.choice(kinds), rng.getrandbits(32)
            if is_held_out(arrangement, 0) == held_out:
                places = range(NUM_PARTS)
                parts = (kinds[arrangement // len(kinds) ** i % len(kinds)] for i in places)
                yield Counted(self, tuple(parts), wanted, seed)


@dataclass(frozen=True, slots=True)
class Counted:
    """Question of how many of four parts are of a kind.

    Args:
        sense: Sense with the kinds.
        parts: Kinds of the parts: upper left, upper right, ...; or in the order of time.
        wanted: Kind asked for.
        seed: Seed of the looks of the parts.
    """

    sense: Sense
    parts: tuple[str, ...]
    wanted: str
    seed: int

    @property
    def question(self) -> str:
        """The prompt."""
        return f"<{self.sense.medium}>How many {self.wanted}?"

    @property
    def answer(self) -> str:
        """Right number in decimal digits."""
        return str(self.parts.count(self.wanted))

    def demonstration(self, rng: random.Random) -> list[Message]:
        """Return the question, and what the teacher perceives, one part after the other."""
        asked = self.question.replace(f"<{self.sense.medium}>", self.sense.features)
        return [("user", asked), ("assistant", describe(self, rng))]


def describe(counted: Counted, rng: random.Random, *, p_mistake: float = P_MISTAKE) -> str:
    """Return the kinds that the teacher perceives, and the number that follows from them."""
    mistaken = counted.sense.mistaken
    seen = [mistaken[n] if n in mistaken and rng.random() < p_mistake else n for n in counted.parts]
    return f"<think>{' '.join(seen)}</think>\\boxed{{{seen.count(counted.wanted)}}}"
