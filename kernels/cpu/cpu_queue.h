// Misses of a device-planned step, computed by the CPU from host memory, without driver calls in between.
//
// A ring of entries is in memory that both sides map. The device fills the entry of the next number and then writes
// that number to `posted`; the host's poller computes the entry's rows and then advances `answered`; the device waits
// for it before it reads them. `answered` is twice a number, plus one if a watchdog gave the entry up: it changes only
// by compare-and-exchange, so an answer that comes too late has no effect. kernels/cpu_queue.py has the twins of these
// structures, and describes an entry.
#include <time.h>

struct alignas(128) Word { i64 value; };

struct QueueControl {
    Word posted, answered, stop;                // written by the device; by poller and watchdog; by the host
    i64 depth, entry_bytes, items, ids, weights, x, out; // number of entries, bytes of each, and offsets in it
    i64 top_k, hidden;
    i64 busy_ns, rows;                          // work that the poller has done so far
};

struct Entry { i64 number, layer, tokens, count, began_ns, ended_ns, on_input; };
struct Call { i64 expert, tag, sections[3], residual[3]; };
struct Form { i64 tag, number; };

static i64 nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

#include "team.h"

// Spin briefly; with nothing to do for longer, sleep up to a millisecond at a time.
static void rest(i64 times) {
    if (times < 4000) {
#if defined(__x86_64__)
        _mm_pause();
#endif
        return;
    }
    const i64 naps = (times - 4000) / 256;
    timespec nap = {0, naps < 5 ? 20000ll << naps : 1000000ll};
    nanosleep(&nap, nullptr);
}

// Answer entries until `stop`. Each layer has `versions` forms, which give the matrices for its experts with a tag. An
// entry has at most `tokens` tokens; the layer's scratch has a row for each pair of them. With `spin_ns`, threads of its
// own spin for so long after each answer, and take the place of `parallel`.
API void dymoe_answer(
    QueueControl* control, Layer* layer, const Form* forms, i64 versions, i64 tokens, int isa, Parallel parallel, i64 spin_ns) {
    Team team(spin_ns ? std::max<i64>(layer->threads - 1, 0) : 0, spin_ns);
    team_of_thread = &team;
    if (spin_ns) parallel = run_team;
    i64 since = nanoseconds();
    std::vector<i64> rows, pairs;
    std::vector<Item> items;
    std::vector<uint16_t> scaled;
    layer->hidden = control->hidden;
    for (i64 idle = 0; !__atomic_load_n(&control->stop.value, __ATOMIC_ACQUIRE);) {
        i64 answered = __atomic_load_n(&control->answered.value, __ATOMIC_ACQUIRE);
        const i64 number = answered / 2 + 1;
        if (__atomic_load_n(&control->posted.value, __ATOMIC_ACQUIRE) < number) {
            if (spin_ns && nanoseconds() - since < spin_ns) pause_briefly();
            else rest(idle++);
            continue;
        }
        idle = 0;
        char* at = (char*)control + sizeof(QueueControl) + number % control->depth * control->entry_bytes;
        Entry* entry = (Entry*)at;
        const Call* calls = (const Call*)(at + control->items);
        const int32_t* ids = (const int32_t*)(at + control->ids);
        const Form* of_layer = forms + entry->layer * versions;
        const i64 began = nanoseconds();
        bool good = entry->number == number && entry->tokens <= tokens;
        rows.clear(), pairs.clear(), items.clear();
        for (i64 c = 0; good && c < entry->count; c++) {
            const Call& call = calls[c];
            Item item = {{call.sections[0], call.sections[1], call.sections[2]}, {call.residual[0], call.residual[1], call.residual[2]}, -1, (i64)rows.size(), 0};
            for (i64 v = 0; v < versions; v++) if (of_layer[v].tag == call.tag) item.form = of_layer[v].number;
            for (i64 pair = 0; pair < entry->tokens * control->top_k; pair++)
                if (ids[pair] == call.expert) rows.push_back(pair / control->top_k), pairs.push_back(pair);
            item.count = (i64)rows.size() - item.first;
            good = item.form >= 0;
            items.push_back(item);
        }
        if (!good) {  // not answered, so the watchdog gives it up
            rest(idle = 1 << 12);
            continue;
        }
        layer->tokens = entry->tokens, layer->items = items.size(), layer->positions = rows.size();
        layer->out_rows = entry->tokens * control->top_k;
        layer->x = (const uint16_t*)(at + control->x), layer->out = (uint16_t*)(at + control->out);
        if (entry->on_input) {  // weights multiply the inputs, so each position has a row of its own
            const float* weights = (const float*)(at + control->weights);
            scaled.resize(rows.size() * control->hidden);
            for (size_t n = 0; n < rows.size(); n++) {
                scale_row(layer->x + rows[n] * control->hidden, weights[pairs[n]], control->hidden, layer->dtype, scaled.data() + n * control->hidden);
                rows[n] = (i64)n;
            }
            layer->x = scaled.data(), layer->tokens = (i64)rows.size();
        }
        layer->item = items.data(), layer->rows = rows.data(), layer->pairs = pairs.data();
        layer->phase = READ, layer->last = DOWN;
        dymoe_experts(layer, isa, parallel);
        entry->began_ns = began, entry->ended_ns = since = nanoseconds();
        control->busy_ns += entry->ended_ns - began, control->rows += rows.size();
        __atomic_compare_exchange_n(&control->answered.value, &answered, 2 * number, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED);
    }
}

// Give up the posted entry that was not answered; return its number, or 0 if it was answered just now.
API i64 dymoe_give_up(QueueControl* control) {
    i64 answered = __atomic_load_n(&control->answered.value, __ATOMIC_ACQUIRE), number = answered / 2 + 1;
    if (__atomic_load_n(&control->posted.value, __ATOMIC_ACQUIRE) < number) return 0;
    return __atomic_compare_exchange_n(&control->answered.value, &answered, 2 * number + 1, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED) ? number : 0;
}

// Wait, as the device does, until an entry is answered or given up; return 1 in the latter case.
API int dymoe_await(QueueControl* control, i64 number) {
    i64 answered;
    for (i64 times = 0; (answered = __atomic_load_n(&control->answered.value, __ATOMIC_ACQUIRE)) < 2 * number;) rest(times++);
    return answered == 2 * number + 1;
}

// Make a number visible after everything written before, as a device does by a system-wide release store.
API void dymoe_post(QueueControl* control, i64 number) { __atomic_store_n(&control->posted.value, number, __ATOMIC_RELEASE); }

// Wait until an entry is posted; 0 if the queue is stopped before.
API int dymoe_await_posted(QueueControl* control, i64 number) {
    for (i64 times = 0; __atomic_load_n(&control->posted.value, __ATOMIC_ACQUIRE) < number;) {
        if (__atomic_load_n(&control->stop.value, __ATOMIC_ACQUIRE)) return 0;
        rest(times++);
    }
    return 1;
}

// Answer an entry whose contents are complete.
API void dymoe_answered(QueueControl* control, i64 number) { __atomic_store_n(&control->answered.value, 2 * number, __ATOMIC_RELEASE); }
