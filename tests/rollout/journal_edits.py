"""Events of journals, and journals of other events with the right checksums."""

import json
import zlib

from lightrft.rollout.environments.journal_reading import event_line


def events_of(text):
    """Without their checksums."""
    found = [json.loads(line) for line in text.splitlines()]
    for event in found:
        del event["check"]
    return found


def lines_of(events):
    """A journal of these events, or of texts that stand for events."""
    lines, check = [], 0
    for event in events:
        if isinstance(event, dict):
            line, check = event_line(event, check)
        else:
            text = event.removesuffix("}").encode()
            check = zlib.crc32(text, check)
            line = text + b', "check": "%08x"}\n' % check
        lines.append(line)
    return b"".join(lines).decode()
