"""Several workers of one task, for calls from several threads."""

import queue

from lightrft.rewards.process import WorkerProcess, WorkerTask


class WorkerPool:
    """Workers that are started when they are needed; the first one serves calls one by one.

    Args:
        task: What each runs.
        size: Calls at once.
        name: Shown with what they print.
    """

    def __init__(self, task: WorkerTask, *, size: int, name: str) -> None:
        self.workers = [WorkerProcess(task, name=name) for _ in range(size)]
        # Last in, first out: a second worker starts only while the first one is busy.
        self._idle: queue.LifoQueue[WorkerProcess] = queue.LifoQueue()
        for worker in reversed(self.workers):
            self._idle.put(worker)

    def start(self) -> object:
        """Starts the first worker: what its handler says of itself; see `WorkerProcess.start`."""
        return self.workers[0].start()

    def call(self, request: object, *, seconds: float) -> object:
        """The answer of an idle worker, which is waited for; see `WorkerProcess.call`."""
        worker = self._idle.get()
        try:
            return worker.call(request, seconds=seconds)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Ends all workers; may be called twice."""
        for worker in self.workers:
            worker.close()
