"""Reachability of the Hugging Face hub. Standard library only."""

import os
import socket
import threading
import urllib.request
from functools import lru_cache
from urllib.parse import urlsplit

_SECONDS = 4.0
_PORTS = {"http": 80, "https": 443}


def is_hub_reachable() -> bool:
    """Return whether a connection to the hub, or to its proxy, can be opened within seconds.

    Libraries of the hub repeat a failed request for half a minute. If it does not answer, callers
    have them read their cache alone.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    scheme = endpoint.partition("://")[0]
    return answers(urllib.request.getproxies().get(scheme, endpoint))


@lru_cache
def answers(address: str) -> bool:
    """Return whether an address accepts connections; asked once in a process."""
    try:
        parts = urlsplit(address if "//" in address else f"//{address}")
        place = (parts.hostname or "", parts.port or _PORTS.get(parts.scheme, 443))
    except ValueError:
        return False
    opened = threading.Event()

    if not place[0]:
        return False

    def connect() -> None:
        try:
            socket.create_connection(place, timeout=_SECONDS).close()
        except (OSError, UnicodeError):
            return
        opened.set()

    # A thread, because looking up a name has no timeout.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_SECONDS)
    return opened.is_set()
