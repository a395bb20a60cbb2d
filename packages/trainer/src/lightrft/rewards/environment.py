"""What a reward worker sees of the trainer's environment. Standard library only."""

import os
import re
from collections.abc import Collection, Mapping

# A variable is kept back if one of its words, between underscores, is one of these ...
_WORDS = frozenset(
    {
        "key",
        "keys",
        "apikey",
        "token",
        "tokens",
        "secret",
        "secrets",
        "password",
        "passwd",
        "pass",
        "pat",
        "auth",
        "credential",
        "credentials",
        "cookie",
    }
)
# ... or ends so, as WANDB_APIKEY2 or MYTOKEN do, or if its value is an address with a password.
_ENDINGS = re.compile(r"(apikey|token|secret|password|passwd)\d*$")
_HAS_PASSWORD = re.compile(r"://[^/\s]*@")


def worker_environment(
    passed: Collection[str] = (), source: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The variables of the environment without secrets.

    Args:
        passed: Names that are given all the same.
        source: None takes the environment of this process.
    """
    source = os.environ if source is None else source
    return {
        name: value
        for name, value in source.items()
        if name in passed or not (names_a_secret(name) or _HAS_PASSWORD.search(value))
    }


def names_a_secret(name: str) -> bool:
    """Whether the name of a variable says that its value is a secret."""
    lower = name.lower()
    return not _WORDS.isdisjoint(lower.split("_")) or bool(_ENDINGS.search(lower))
