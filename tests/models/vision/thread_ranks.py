"""Ranks that are threads of this process, for exchanges of small tensors."""

import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg


def run_on_threads(work, world_size, *, timeout_seconds=60):
    """What `work(rank)` returns on each rank.

    Raises:
        Exception: What the first of the ranks raised; the others are told to end.
    """
    results, errors = [None] * world_size, []
    isolate = torch._C._distributed_c10d._set_thread_isolation_mode

    def carry_out(rank, store):
        try:
            dist.init_process_group(
                "threaded",
                rank=rank,
                world_size=world_size,
                store=store,
                timeout=timedelta(seconds=timeout_seconds),
            )
            results[rank] = work(rank)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - raised by the caller's thread
            errors.append(error)
            multi_threaded_pg.ProcessLocalGroup.exception_handle(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    multi_threaded_pg._install_threaded_pg()
    isolate(True)
    try:
        store = dist.HashStore()
        threads = [
            threading.Thread(target=carry_out, args=(rank, store), daemon=True)
            for rank in range(world_size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout_seconds)
        if any(thread.is_alive() for thread in threads):
            raise TimeoutError(f"threads did not end within {timeout_seconds} s: {errors}")
    finally:
        isolate(False)
        multi_threaded_pg._uninstall_threaded_pg()
        multi_threaded_pg.ProcessLocalGroup.reset()
    if errors:
        raise next((e for e in errors if not isinstance(e, SystemExit)), errors[0])
    return results
