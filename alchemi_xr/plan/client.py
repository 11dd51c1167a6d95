"""Where a graph runs: threads of this process, or any Dask cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from alchemi_xr.errors import ConfigError
from alchemi_xr.plan.graph import Graph, Key

__all__ = ["Runner", "open_runner"]

Report = Callable[[Any, Any], None]


class Runner:
    """Runs graphs and reports each asked-for key as it is finished.

    Parameters
    ----------
    client : distributed.Client, optional
        None means threads of this process.
    threads : int
        Threads that run tasks, over all workers.
    threads_per_worker : int
    memory : int, optional
        Bytes that one worker may use.
    closing : list of callables
        What to close at the end, last first.
    """

    def __init__(
        self,
        client: Any = None,
        *,
        threads: int,
        threads_per_worker: int,
        memory: int | None = None,
        closing: Sequence[Callable[[], object]] = (),
    ) -> None:
        self.client = client
        self.threads = threads
        self.threads_per_worker = threads_per_worker
        self.memory = memory
        self._closing = list(closing)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Shut down what was started for this run, and only that."""
        while self._closing:
            self._closing.pop()()

    def run(self, graph: Graph, keys: Sequence[Key], report: Report) -> None:
        """Compute the keys; ``report(key, result)`` is called in this thread for each.

        The first task that fails raises its own exception here; what waits is
        dropped.
        """
        if not keys:
            return
        if self.client is None:
            self._run_threads(graph, keys, report)
        else:
            self._run_cluster(graph, keys, report)

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """The function of every item, in order, in parallel on a cluster."""
        if self.client is None or len(items) < 2:
            return [function(item) for item in items]
        futures = self.client.map(function, items, pure=False)
        return list(self.client.gather(futures))

    def _run_threads(self, graph: Graph, keys: Sequence[Key], report: Report) -> None:
        from dask.callbacks import Callback
        from dask.threaded import get

        wanted = set(keys)

        def finished(key: Any, result: Any, *_: Any) -> None:
            if key in wanted:
                report(key, result)

        with Callback(posttask=finished):
            get(graph, list(keys), num_workers=self.threads)

    def _run_cluster(self, graph: Graph, keys: Sequence[Key], report: Report) -> None:
        from distributed import as_completed

        futures = self.client.get(graph, list(keys), sync=False)
        names = {future.key: key for future, key in zip(futures, keys, strict=True)}
        try:
            for future in as_completed(futures, loop=self.client.loop):
                report(names[future.key], future.result())
                future.release()
        finally:
            self.client.cancel([f for f in futures if not f.done()])


def open_runner(client: Any = None, *, threads: int | None = None) -> Runner:
    """A runner for any way to name one.

    Parameters
    ----------
    client : None, int, str, LocalCluster or Client
        None: threads of this process. An int: a LocalCluster of so many
        worker processes, closed at the end. A string: the address of a
        scheduler, or ``"threads"`` or ``"sync"``. A cluster or client is used
        as it is and left open.
    threads : int, optional
        Number of threads where this process runs the tasks.

    Raises
    ------
    ConfigError
        It is none of these.
    """
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int)):
        raise ConfigError("threads", "not a number", found=threads, expected="an int")
    if threads is not None and threads < 1:
        raise ConfigError("threads", "at least 1 runs the tasks", found=threads)
    if isinstance(client, bool):
        raise ConfigError("client", "a client is not a bool", found=client)
    if client is None or client == "threads":
        count = threads or len(os.sched_getaffinity(0))
        return Runner(threads=count, threads_per_worker=count)
    if client == "sync":
        return Runner(threads=1, threads_per_worker=1)
    if isinstance(client, int):
        if client < 1:
            raise ConfigError("client", "a number of workers is at least 1", found=client)
        return _own_cluster(client)
    from distributed import Client

    if isinstance(client, str):
        try:
            # Not as the default of this process: one that found nobody would stay it,
            # and every Dask computation of the caller would then wait for ever.
            connected = Client(client, timeout=10, set_as_default=False)
        except (OSError, ValueError) as error:
            raise ConfigError(
                "client",
                f"no scheduler answers at {client!r} ({error})",
                mend="give the address that the scheduler prints, or a number of workers",
            ) from error
        return _of_client(connected, [connected.close])
    if isinstance(client, Client):
        return _of_client(client, [])
    if hasattr(client, "scheduler_address"):
        connected = Client(client, set_as_default=False)
        return _of_client(connected, [connected.close])
    raise ConfigError(
        "client",
        "not a way to name a Dask client",
        found=type(client).__name__,
        expected="None, a number of workers, an address, a cluster or a Client",
    )


def _own_cluster(workers: int) -> Runner:
    from distributed import Client, LocalCluster

    cluster = LocalCluster(
        n_workers=workers,
        threads_per_worker=1,
        processes=True,
        dashboard_address=":0",
        silence_logs=40,
    )
    client = Client(cluster, set_as_default=False)
    return _of_client(client, [cluster.close, client.close])


def _of_client(client: Any, closing: list[Callable[[], object]]) -> Runner:
    # A cluster that scales up from nothing has no worker yet: wait for one.
    client.wait_for_workers(1, timeout=60)
    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    threads = [int(w["nthreads"]) for w in workers]
    limits = [int(w["memory_limit"]) for w in workers if w.get("memory_limit")]
    return Runner(
        client,
        threads=sum(threads),
        threads_per_worker=max(threads),
        memory=min(limits) if limits else None,
        closing=closing,
    )
