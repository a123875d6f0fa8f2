"""Two ranks in one process that agree with each other."""

import threading


def on_two_ranks(run):
    """Return the results of ``run(rank, agree)`` on two ranks, and the agreements.

    ``agree`` returns the minimum of both ranks' values, and fails if they differ in length. The third result is the
    number of agreements.
    """
    barrier, said, found, asked = threading.Barrier(2), [[], []], [None, None], []

    def agree(rank, numbers):
        said[rank] = list(numbers)
        barrier.wait(60)
        assert len(said[0]) == len(said[1]), "ranks do not speak of the same moves"
        least = [min(pair) for pair in zip(*said, strict=True)]
        barrier.wait(60)
        if rank == 0:
            asked.append(len(least))
        return least

    def start(rank):
        try:
            found[rank] = run(rank, lambda numbers: agree(rank, numbers))
        except BaseException:
            barrier.abort()  # the other rank need not wait any longer
            raise

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return *found, len(asked)
