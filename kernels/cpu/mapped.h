// Guards mapped files, from which experts are computed in the page cache. A page that its disk cannot deliver, or that
// was truncated, would kill the process with SIGBUS; instead it reads as zeros, and is counted.

#include <csignal>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static const uintptr_t PAGE = uintptr_t(sysconf(_SC_PAGESIZE));  // 4096, or 16384 or 65536 on some ARM systems
static constexpr int MOST_MAPPINGS = 1024;

static struct { uintptr_t begin, end; } mappings[MOST_MAPPINGS];
static int guarded;              // number of mappings in use
static struct sigaction others;  // earlier handler of the signal
static int passing;              // thread that passes a signal on, or 0
static i64 lost_pages;

// Passes on a signal that is not ours, and stays installed. A handler installed after us may pass it back, as
// faulthandler does, to its predecessor: then the system's default action remains.
static void pass_on(int signal, siginfo_t* info, void* context) {
    const int self = int(syscall(SYS_gettid));
    const bool sent = info->si_code <= 0, again = __atomic_load_n(&passing, __ATOMIC_RELAXED) == self;
    const struct sigaction next = others;
    const bool asks = next.sa_flags & SA_SIGINFO;
    if (!again && !asks && next.sa_handler == SIG_IGN && sent) return;
    if (!again && (asks || (next.sa_handler != SIG_DFL && next.sa_handler != SIG_IGN))) {
        __atomic_store_n(&passing, self, __ATOMIC_RELAXED);
        if (asks) next.sa_sigaction(signal, info, context);
        else next.sa_handler(signal);
        __atomic_store_n(&passing, 0, __ATOMIC_RELAXED);
        return;
    }
    struct sigaction end = {};
    end.sa_handler = SIG_DFL;
    sigaction(SIGBUS, &end, nullptr);
    if (sent) raise(SIGBUS);  // a fault repeats by itself
}

static void on_lost_page(int signal, siginfo_t* info, void* context) {
    const uintptr_t at = uintptr_t(info->si_addr) & ~(PAGE - 1);
    if (info->si_code > 0)  // a fault; a signal that was sent has no address
        for (const auto& one : mappings)
            if (at >= one.begin && at < one.end &&
                mmap(reinterpret_cast<void*>(at), PAGE, PROT_READ, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED) {
                __atomic_add_fetch(&lost_pages, 1, __ATOMIC_RELAXED);
                return;
            }
    pass_on(signal, info, context);
}

// Called before mapped files are read: reinstalls our handler before any that was installed meanwhile.
static void keep_guard() {
    if (__atomic_load_n(&guarded, __ATOMIC_RELAXED) == 0) return;
    struct sigaction now;
    sigaction(SIGBUS, nullptr, &now);
    if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_lost_page) return;
    others = now;
    struct sigaction ours = {};
    ours.sa_sigaction = on_lost_page;
    ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigaction(SIGBUS, &ours, nullptr);
}

// Guards a mapping; returns its number, or -1 if there are too many. Without a mapping, removes the guard of `number`.
API int dymoe_guard(uintptr_t begin, i64 nbytes, int number) {
    if (nbytes == 0) {
        mappings[number].begin = 0;
        __atomic_store_n(&mappings[number].end, uintptr_t(0), __ATOMIC_RELEASE);
        __atomic_sub_fetch(&guarded, 1, __ATOMIC_RELAXED);
        return number;
    }
    for (number = 0; number < MOST_MAPPINGS; number++) {
        uintptr_t free = 0;  // until the end is written, the guard matches no address
        if (__atomic_compare_exchange_n(&mappings[number].end, &free, uintptr_t(1), false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
            mappings[number].begin = begin;
            __atomic_store_n(&mappings[number].end, begin + uintptr_t(nbytes), __ATOMIC_RELEASE);
            __atomic_add_fetch(&guarded, 1, __ATOMIC_RELAXED);
            keep_guard();
            return number;
        }
    }
    return -1;
}

API i64 dymoe_lost_pages() { return __atomic_load_n(&lost_pages, __ATOMIC_RELAXED); }

// Whether all of a part of a mapping is in memory: 1, or 0 if not, or if the system does not say.
API int dymoe_resident(uintptr_t begin, i64 nbytes) {
    unsigned char pages[256];
    keep_guard();
    for (uintptr_t at = begin & ~(PAGE - 1); at < begin + uintptr_t(nbytes); at += sizeof pages * PAGE) {
        const uintptr_t count = std::min(sizeof pages, (begin + uintptr_t(nbytes) - at + PAGE - 1) / PAGE);
        if (mincore(reinterpret_cast<void*>(at), count * PAGE, pages)) return 0;
        for (uintptr_t n = 0; n < count; n++)
            if (!(pages[n] & 1)) return 0;
    }
    return 1;
}
