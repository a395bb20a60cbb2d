from collections.abc import Sequence

interface_version: int
has_cuda: bool
device_tile_elements: int

def run_segments(
    segments: Sequence[tuple[int, int, int, int, int, int]],
    bf16_nan: int,
    num_threads: int,
    with_hash: bool,
) -> list[int]: ...
def launch_segments(
    segments: int, num_segments: int, num_tiles: int, hashes: int, device: int, stream: int
) -> None: ...
