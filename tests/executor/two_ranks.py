"""Two ranks in one process that ask each other."""

import threading


def on_two_ranks(run):
    """What ``run(rank, agree)`` returns on each, and how often they asked.

    ``agree`` gives the least of what both say, and refuses ranks that do not say as much.
    """
    barrier, said, found, asked = threading.Barrier(2), [[], []], [None, None], []

    def agree(rank, numbers):
        said[rank] = list(numbers)
        barrier.wait(10)
        assert len(said[0]) == len(said[1]), "ranks do not speak of the same moves"
        least = [min(pair) for pair in zip(*said, strict=True)]
        barrier.wait(10)
        if rank == 0:
            asked.append(len(least))
        return least

    def start(rank):
        try:
            found[rank] = run(rank, lambda numbers: agree(rank, numbers))
        except BaseException:
            barrier.abort()  # the other one need not wait any longer
            raise

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return *found, len(asked)
