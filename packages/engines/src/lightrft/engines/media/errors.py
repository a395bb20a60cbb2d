"""Error for media that cannot be read, and encoded bytes in the form of JSON."""

# Bytes of the shortest signature of a file.
_SIGNATURE_BYTES = 4


class MediaError(ValueError):
    """Error for a medium that cannot be read; the message says which, why, and what to do."""


def is_list_of_bytes(value: object) -> bool:
    """Return whether a value is a list of the encoded bytes of a file, as in JSON."""
    return (
        isinstance(value, list)
        and len(value) > _SIGNATURE_BYTES
        and all(isinstance(item, int) and 0 <= item < 256 for item in value)
    )
