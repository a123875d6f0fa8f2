// Files that are mapped, so that experts are computed out of the page cache. A page that its disk does not give, or that was
// cut off, would end the process with SIGBUS: it reads as zeros in place of that, and is counted.

#include <csignal>
#include <sys/mman.h>

static constexpr uintptr_t PAGE = 4096;
static constexpr int MOST_MAPPINGS = 1024;

static struct { uintptr_t begin, end; } mappings[MOST_MAPPINGS];
static struct sigaction others;
static i64 lost_pages;

static void on_lost_page(int, siginfo_t* info, void*) {
    const uintptr_t at = uintptr_t(info->si_addr) & ~(PAGE - 1);
    for (const auto& one : mappings)
        if (at >= one.begin && at < one.end &&
            mmap(reinterpret_cast<void*>(at), PAGE, PROT_READ, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED) {
            __atomic_add_fetch(&lost_pages, 1, __ATOMIC_RELAXED);
            return;
        }
    sigaction(SIGBUS, &others, nullptr);  // it comes again, to what was there before
}

// Guards a mapping until its number, which is returned, is given back as `number`; -1 if there are too many. Guards number
// without a mapping: gives it back.
API int dymoe_guard(uintptr_t begin, i64 nbytes, int number) {
    if (nbytes == 0) {
        mappings[number] = {0, 0};
        return number;
    }
    struct sigaction now;
    sigaction(SIGBUS, nullptr, &now);
    if (!(now.sa_flags & SA_SIGINFO) || now.sa_sigaction != on_lost_page) {
        others = now;
        struct sigaction ours = {};
        ours.sa_sigaction = on_lost_page;
        ours.sa_flags = SA_SIGINFO | SA_NODEFER;
        sigaction(SIGBUS, &ours, nullptr);
    }
    for (number = 0; number < MOST_MAPPINGS; number++)
        if (mappings[number].end == 0) {
            mappings[number] = {begin, begin + uintptr_t(nbytes)};
            return number;
        }
    return -1;
}

API i64 dymoe_lost_pages() { return __atomic_load_n(&lost_pages, __ATOMIC_RELAXED); }

// Whether all of a part of a mapping is in memory: 1, or 0 if not, or if the policy does not say.
API int dymoe_resident(uintptr_t begin, i64 nbytes) {
    unsigned char pages[256];
    for (uintptr_t at = begin & ~(PAGE - 1); at < begin + uintptr_t(nbytes); at += sizeof pages * PAGE) {
        const uintptr_t count = std::min(sizeof pages, (begin + uintptr_t(nbytes) - at + PAGE - 1) / PAGE);
        if (mincore(reinterpret_cast<void*>(at), count * PAGE, pages)) return 0;
        for (uintptr_t n = 0; n < count; n++)
            if (!(pages[n] & 1)) return 0;
    }
    return 1;
}
