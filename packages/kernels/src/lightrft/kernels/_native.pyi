from collections.abc import Sequence

interface_version: int
has_cuda: bool
device_tile_elements: int

def copy_segments(
    segments: Sequence[tuple[int, int, int, int, int]], bf16_nan: int, num_threads: int
) -> None: ...
def launch_segments(
    segments: int, tile_segments: int, num_tiles: int, hashes: int, device: int, stream: int
) -> None: ...
def hash_range(pointer: int, numel: int, itemsize: int, start: int, num_threads: int) -> int: ...
