// Bytes of a file that the page cache has are copied by all threads, piece by piece: one core copies less than memory gives.
#include <cerrno>
#include <sys/uio.h>

struct Reading {
    int file, flags;
    char* into;
    i64 offset, nbytes, next, end;
    int error;
};

constexpr i64 PIECE = 128 << 10;

static void read_pieces(void* argument) {
    Reading* reading = static_cast<Reading*>(argument);
    for (i64 at; (at = __atomic_fetch_add(&reading->next, PIECE, __ATOMIC_RELAXED)) < reading->nbytes;) {
        for (const i64 end = std::min(at + PIECE, reading->nbytes); at < end;) {
            const iovec piece{reading->into + at, size_t(end - at)};
            const ssize_t count = preadv2(reading->file, &piece, 1, reading->offset + at, reading->flags);
            if (count > 0) at += count;
            else if (count == 0 || errno != EINTR) {  // pieces behind this one do not count
                if (count < 0) __atomic_store_n(&reading->error, errno, __ATOMIC_RELAXED);
                for (i64 known = __atomic_load_n(&reading->end, __ATOMIC_RELAXED);
                     at < known && !__atomic_compare_exchange_n(&reading->end, &known, at, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);) {}
                return;
            }
        }
    }
}

// preadv2 of nbytes into memory; returns how many the file had, or -errno.
API i64 dymoe_read(int file, char* into, i64 offset, i64 nbytes, int flags, int threads, Parallel parallel) {
    Reading reading{file, flags, into, offset, nbytes, 0, nbytes, 0};
    run(read_pieces, &reading, std::min(i64(threads), 1 + nbytes / PIECE), parallel);
    return reading.error ? -i64(reading.error) : reading.end;
}
