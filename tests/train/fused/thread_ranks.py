"""Ranks of a context group as threads of one process."""

import threading

import torch


class Shared:
    """What the ranks of one process exchange."""

    def __init__(self, count):
        self.count, self.barrier, self.slots = count, threading.Barrier(count), [None] * count
        self.calls = [0] * count


class ThreadExchange:
    def __init__(self, shared, rank):
        self.shared, self.rank, self.count = shared, rank, shared.count

    def _all(self, mine):
        self.shared.calls[self.rank] += 1
        self.shared.slots[self.rank] = mine
        self.shared.barrier.wait(20)
        found = list(self.shared.slots)
        self.shared.barrier.wait(20)
        return found

    def gather(self, mine, out):
        out.copy_(torch.cat(self._all(mine.clone())))

    def scatter_sum(self, parts, out):
        out.copy_(sum(self._all(parts.clone())).unflatten(0, (self.count, -1))[self.rank])


def together(count, work):
    """work(exchange) of every rank → results; the ranks' shared state."""
    shared, results, errors = Shared(count), [None] * count, []

    def one(rank):
        try:
            results[rank] = work(ThreadExchange(shared, rank))
        except BaseException as e:
            errors.append(e)
            shared.barrier.abort()

    threads = [threading.Thread(target=one, args=(r,)) for r in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]
    return results, shared
