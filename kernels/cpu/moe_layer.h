// One MoE layer of one step in one call: groups the router's choices by expert, plans, computes experts where their
// bytes are (slots, pinned memory or mapped files), and adds them up. experts.cpp includes this file;
// kernels/native.py has the twin of MoeLayer.
//
// Nothing is changed before it is known that the call can finish its part: the caller may read from disk, or verify
// bytes, and call again.
#pragma once
#include <ctime>
#include "planner.h"

enum Outcome : int {
    DONE = 0,
    FETCH = 1,       // planned; some experts have to be fetched into slots first, and nothing is computed or counted
    VERIFY = 2,      // nothing is planned: bytes of some misses in files were never verified
    LOST = 3,        // done, but a page of a mapped file could not be read
    BAD_EXPERT = 4,  // nothing is planned: `bad_expert` is no expert of the model
    BAD_ROOM = 5,    // nothing is planned: scratch is too small
};

struct MoeLayer {
    // The layer's routing.
    i64 layer, tokens, top_k;
    i64 wide_ids;                          // ids are int64, else int32
    const void* ids;                       // [tokens, top_k]; negative where another rank has the expert
    const float* weights;                  // [tokens, top_k]
    const uint16_t* x;                     // [tokens, hidden]
    uint16_t* into;                        // [tokens, hidden]
    const int8_t* marks;                   // [tokens]: 1 for tokens of prompts, 2 for heavy hitters; or null
    uint8_t* actions;                      // [tokens, top_k], written if not null
    const int8_t* versions;                // [experts], versions that the policy has chosen, ABSENT to skip; or null
    i64 observed;                          // tokens belong to requests; otherwise nothing is counted or learnt
    i64 weights_on_input;                  // weights multiply the experts' inputs
    i64 threads;                           // most threads of the call
    // The rank's settings.
    planner::CacheTable table;
    i64 evicts, admits, executes, renormalizes, plans_only;
    i64 form[3];                           // matrices of a version begin at layer.matrices[3 * form]
    i64 slice_bytes[3];
    i64* in_memory_until;                  // [layers, experts, 3] ns of CLOCK_MONOTONIC; 0 for bytes that were never
                                           // verified, TO_CHECK for those that the caller must verify, ON_DISK_NOW for
                                           // those not found in memory, INT64_MAX for ever
    i64 lost_pages;                        // of mapped files, when files were opened
    i64* uses;                             // [2, layers, experts]: uses and squared gates are added, or null
    Layer kernel;                          // its memory for inputs and activations has so many floats:
    float* scratch;
    i64 scratch_floats, piece_positions;   // positions that are computed at a time
    uint16_t* pair_rows;                   // [pair_capacity, hidden]
    i64 pair_capacity;
    // The plan.
    i64 count;                             // number of computed experts
    int32_t* experts;                      // [experts]
    int8_t* wanted;                        // [experts]
    i64* places;                           // [slices, count]
    i64 bad_expert;
    i64 planned;                           // the operator's call returned FETCH; Python goes on from there
};

namespace {

constexpr i64 TO_CHECK = -2, ON_DISK_NOW = -1;
constexpr i64 GATE_UNIT = 1 << 20, MEMORY_SECONDS = 1, PRODUCTS_OF_A_THREAD = 1 << 20;

struct Work {  // memory of one thread, reused in every step
    planner::Scratch planning;
    planner::Phase prompts, others;
    std::vector<i64> count, uses, next, used, rows, rows_of, pairs;
    std::vector<int32_t> chosen;
    std::vector<char> high, present;
    std::vector<float> weights;
    std::vector<uint16_t> scaled;
    std::vector<Item> items, part;
};

i64 now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return i64(time.tv_sec) * 1000000000 + time.tv_nsec;
}

// Find the rank's number of each pair's expert, -1 for another rank's, and how many tokens chose each; false for an
// invalid id.
bool read_choices(MoeLayer& m, Work& w) {
    const i64 n = m.tokens * m.top_k, experts = m.table.experts;
    w.chosen.resize(n);
    w.count.assign(experts, 0);
    w.uses.assign(experts, 0);
    for (i64 p = 0; p < n; p++) {
        const i64 id = m.wide_ids ? ((const i64*)m.ids)[p] : ((const int32_t*)m.ids)[p];
        if (id >= experts || id < -1) {
            m.bad_expert = id;
            return false;
        }
        w.chosen[p] = id < 0 ? -1 : int32_t(id);
        if (id >= 0) w.count[id]++, w.uses[id] += planner::usable(m.weights[p]);
    }
    return true;
}

// Choose LOW or HIGH for each used expert (DyMoE 4.2 and 4.3); new thresholds are returned, not yet stored in the
// table.
void choose_versions(const MoeLayer& m, Work& w, i64 thresholds[2]) {
    const planner::CacheTable& t = m.table;
    const i64 experts = t.experts, n = m.tokens * m.top_k;
    const int32_t* critical = t.critical + m.layer * (experts + 1);
    thresholds[0] = t.prompt_threshold[0], thresholds[1] = t.threshold[0];
    w.high.assign(experts, 0);
    if (m.versions) {
        for (i64 e = 0; e < experts; e++) w.high[e] = m.versions[e] == planner::HIGH;
        return;
    }
    if (t.threshold[1] < 0) {  // the same version for all, so importance does not matter
        i64 active = 0;
        for (i64 e = 0; e < experts; e++) active += w.count[e] > 0;
        bool all = true, none = true;
        for (i64 i = 1; i <= active; i++) all &= critical[i] >= i, none &= critical[i] == 0;
        if (none) return;
        if (all) {
            w.high.assign(experts, 1);
            return;
        }
    }
    w.others.clear(experts);
    if (m.marks) w.prompts.clear(experts);
    for (i64 p = 0; p < n; p++) {
        const int32_t e = w.chosen[p];
        if (e < 0) continue;
        const int8_t mark = m.marks ? m.marks[p / m.top_k] : 0;
        planner::Phase& phase = mark ? w.prompts : w.others;
        const i64 units = planner::units(m.weights[p]);
        phase.uses[e]++;
        phase.every[e] += units;
        phase.hits[e] += mark == 2 && planner::usable(m.weights[p]);
        if (mark != 1) phase.sums[e] += units;
    }
    if (m.marks) thresholds[0] = planner::mark_high(t, m.layer, w.prompts, t.prompt_threshold, w.used, w.high);
    thresholds[1] = planner::mark_high(t, m.layer, w.others, t.threshold, w.used, w.high);
}

enum Memory { IN_MEMORY, ON_DISK, UNCHECKED };

// Return whether the slices of a version can be read without waiting for a disk.
Memory in_memory(const MoeLayer& m, i64 expert, int8_t version, i64& now) {
    const planner::CacheTable& t = m.table;
    if (m.in_memory_until == nullptr || lost_pages != m.lost_pages) return ON_DISK;
    Memory found = IN_MEMORY;
    for (i64 part = t.slices == 2 ? i64(planner::LOW) : version; part <= version; part++) {
        const i64 at = (m.layer * t.experts + expert) * 3 + part;
        i64& until = m.in_memory_until[at];
        if (until == 0 || until == TO_CHECK) {
            until = TO_CHECK;
            found = UNCHECKED;
            continue;
        }
        if (until == INT64_MAX) continue;
        if (now == 0) now = now_ns();
        if (until > now) continue;
        if (until == ON_DISK_NOW || !dymoe_resident(uintptr_t(t.source[at]), m.slice_bytes[part])) {
            until = ON_DISK_NOW;  // for the whole step: the caller may have to verify others first
            return ON_DISK;
        }
        until = now + MEMORY_SECONDS * 1000000000;
    }
    return found;
}

// Forget which planned experts were on disk: bytes that the disk delivers are verified anew, in a later step.
void end_memory_check(const MoeLayer& m) {
    if (m.in_memory_until == nullptr) return;
    for (i64 i = 0; i < m.count; i++) {
        i64* until = m.in_memory_until + (m.layer * m.table.experts + m.experts[i]) * 3;
        for (i64 part = 0; part < 3; part++)
            if (until[part] == ON_DISK_NOW) until[part] = 0;
    }
}

bool served(const planner::CacheTable& t, int8_t held, int8_t wanted) {
    if (t.slices == 2) return held >= wanted;
    return *t.reuse_high ? held >= wanted : held == wanted;
}

// Return the version that a hit computes.
int8_t version_of_hit(const planner::CacheTable& t, int8_t held, int8_t wanted) {
    if (t.slices == 1) return held;
    return wanted == planner::LOW && !*t.reuse_high ? wanted : held;
}

void add_uses(const MoeLayer& m, const Work& w) {
    const i64 experts = m.table.experts;
    i64 *uses = m.uses + m.layer * experts, *gates = uses + m.table.layers * experts;
    for (i64 e = 0; e < experts; e++) uses[e] += w.uses[e];
    for (i64 token = 0; token < m.tokens; token++) {
        const float* weights = m.weights + token * m.top_k;
        double total = 0;
        bool counts = true;
        for (i64 k = 0; k < m.top_k; k++) total += weights[k], counts &= planner::usable(weights[k]);
        if (!counts) continue;
        if (total < 1e-9) total = 1e-9;
        for (i64 k = 0; k < m.top_k; k++) {
            const int32_t e = w.chosen[token * m.top_k + k];
            const double share = weights[k] / total;
            if (e >= 0) gates[e] += i64(share * share * GATE_UNIT);
        }
    }
}

void write_actions(const MoeLayer& m, Work& w) {
    const planner::CacheTable& t = m.table;
    std::vector<uint8_t> action(t.experts, planner::ACTION_SKIP);
    for (i64 i = 0; i < m.count; i++) {
        const int32_t e = m.experts[i];
        bool executed = false, streamed = false, hit = true;
        for (i64 slice = 0; slice < t.slices; slice++) {
            const i64 place = m.places[slice * m.count + i];
            executed |= place == planner::EXECUTE, streamed |= place == planner::STREAM, hit &= place == planner::HIT;
        }
        const bool low = m.wanted[i] == planner::LOW && !(hit && t.held[m.layer * t.experts + e] == planner::HIGH);
        action[e] = (executed ? planner::ACTION_EXECUTE : hit ? planner::ACTION_HIT : streamed ? planner::ACTION_STREAM : planner::ACTION_ADMIT) +
                    (low ? planner::LOW_VERSION : 0);
    }
    for (i64 p = 0; p < m.tokens * m.top_k; p++) m.actions[p] = w.chosen[p] < 0 ? uint8_t(planner::ACTION_SKIP) : action[w.chosen[p]];
}

// Return where an expert's matrices are: in its slots, or in host memory.
Item item_of(const MoeLayer& m, i64 expert, int8_t version, bool executed) {
    const planner::CacheTable& t = m.table;
    Item item = {};
    item.form = m.form[version];
    const i64 first = t.slices == 2 ? i64(planner::LOW) : version;
    for (i64 part = first; part <= version; part++) {
        const i64 slice = t.slices == 2 ? part - 1 : 0;
        const i64 begin = executed ? t.source[(m.layer * t.experts + expert) * 3 + part]
                                   : t.pool[part] + t.slot[(slice * t.layers + m.layer) * t.experts + expert] * t.slot_bytes[part];
        for (int projection = 0; projection < 3; projection++)
            (part == first ? item.sections : item.residual)[projection] = begin + t.offsets[3 * part + projection];
    }
    return item;
}

void run_pieces(MoeLayer& m, Work& w, int isa, Parallel parallel) {
    Layer& k = m.kernel;
    const i64 size = portable::Row::floats(k.width);
    float* activations = m.scratch + size * k.tokens;
    k.phase = READ;
    size_t next = 0;
    i64 done = 0;  // number of computed positions of items[next]
    while (next < w.items.size()) {
        w.part.clear();
        const i64 begin = w.items[next].first + done;
        i64 room = m.piece_positions, end = begin;
        for (; next < w.items.size() && room > 0; next++, done = 0) {
            Item item = w.items[next];
            item.first += done;
            item.count = std::min(item.count - done, room);
            w.part.push_back(item);
            end = item.first + item.count;
            room -= item.count;
            if (done + item.count < w.items[next].count) {
                done += item.count;
                break;
            }
        }
        k.items = i64(w.part.size()), k.item = w.part.data();
        k.inputs = m.scratch, k.activations = activations - size * begin;
        k.threads = std::min(m.threads, 1 + 3 * (end - begin) * k.hidden * k.inter / PRODUCTS_OF_A_THREAD);
        k.last = DOWN;
        dymoe_experts(&k, isa, parallel);
        k.phase = GATE_UP;
    }
}

// Return weights of pairs whose expert is computed, scaled to keep a token's sum if requested (DyMoE's skipped
// experts).
const float* weights_of(const MoeLayer& m, Work& w, bool complete) {
    const i64 n = m.tokens * m.top_k;
    if (!m.weights_on_input && (complete || !m.renormalizes)) return m.weights;
    w.weights.assign(n, 1.0f);
    if (!m.weights_on_input) memcpy(w.weights.data(), m.weights, n * sizeof(float));
    if (complete || !m.renormalizes) return w.weights.data();
    for (i64 token = 0; token < m.tokens; token++) {
        float here = 0, stays = 0;
        float* weights = w.weights.data() + token * m.top_k;
        for (i64 k = 0; k < m.top_k; k++) {
            const i64 p = token * m.top_k + k;
            if (w.chosen[p] < 0) continue;
            here += weights[k];
            if (w.present[p]) stays += weights[k];
        }
        const float scale = stays > 0 ? here / stays : 1.0f;
        for (i64 k = 0; k < m.top_k; k++) weights[k] *= scale;
    }
    return w.weights.data();
}

// Write the experts' inputs when the router's weights multiply them: a row for each pair, rounded to the dtype.
void scale_inputs(const MoeLayer& m, Work& w) {
    const i64 hidden = m.kernel.hidden, dtype = m.kernel.dtype;
    w.scaled.resize(m.tokens * m.top_k * hidden);
    for (i64 p = 0; p < m.tokens * m.top_k; p++)
        scale_row(m.x + p / m.top_k * hidden, m.weights[p], hidden, dtype, w.scaled.data() + p * hidden);
}

}  // namespace

API int dymoe_moe_layer(MoeLayer* call, int isa, Parallel parallel) {
    static thread_local Work w;
    MoeLayer& m = *call;
    planner::CacheTable& t = m.table;
    Layer& k = m.kernel;
    const i64 n = m.tokens * m.top_k, at = m.layer * t.experts;
    if (!read_choices(m, w)) return BAD_EXPERT;
    const i64 inputs = m.weights_on_input ? n : m.tokens, size = portable::Row::floats(k.width);
    if (!m.plans_only && (size * (inputs + std::min(n, m.piece_positions)) > m.scratch_floats || n > m.pair_capacity)) return BAD_ROOM;

    // Which experts are computed, in which version, and whether they can be executed in place.
    i64 thresholds[2], now = 0, skipped[3] = {0, 0, 0};
    bool unchecked = false;
    choose_versions(m, w, thresholds);
    m.count = 0;
    w.rows.clear();
    for (i64 e = 0; e < t.experts; e++) {
        if (w.count[e] == 0) continue;
        const int8_t wanted = w.high[e] ? planner::HIGH : planner::LOW;
        if (t.bits[3 * wanted + 1] == 0 || (m.versions && m.versions[e] == planner::ABSENT)) {
            skipped[wanted]++;
            continue;
        }
        i64 rows = w.count[e];
        if (m.executes && !served(t, t.held[at + e], wanted)) {
            const Memory where = in_memory(m, e, wanted, now);
            unchecked |= where == UNCHECKED;
            if (where == ON_DISK) rows = planner::NEVER_FETCHED;
        }
        m.experts[m.count] = int32_t(e), m.wanted[m.count] = wanted;
        w.rows.push_back(rows);
        m.count++;
    }

    if (unchecked) return VERIFY;
    end_memory_check(m);

    // From here on the step is counted.
    t.prompt_threshold[0] = thresholds[0], t.threshold[0] = thresholds[1];
    if (m.uses && m.observed) add_uses(m, w);
    const planner::Plan plan{m.count, m.experts, m.wanted, m.executes ? w.rows.data() : nullptr, w.uses.data(), m.places, m.admits != 0};
    planner::record_uses(t, m.layer, plan, m.evicts);
    planner::decide(t, m.layer, plan, w.planning);
    if (m.actions) write_actions(m, w);
    bool fetches = false;
    for (i64 i = 0; i < t.slices * m.count; i++) fetches |= m.places[i] != planner::HIT && m.places[i] != planner::EXECUTE;
    if (fetches || m.plans_only) return FETCH;

    // Everything is in memory: positions of each expert, and where its bytes are.
    i64 none[planner::COUNTERS];
    i64* counters = m.observed ? t.counters + m.layer * planner::COUNTERS : none;
    w.items.clear();
    w.next.assign(t.experts, -1);
    i64 position = 0, executed = 0;
    for (i64 i = 0; i < m.count; i++) {
        const int32_t e = m.experts[i];
        const bool on_cpu = m.places[i] == planner::EXECUTE || m.places[(t.slices - 1) * m.count + i] == planner::EXECUTE;
        const int8_t version = on_cpu ? m.wanted[i] : version_of_hit(t, t.held[at + e], m.wanted[i]);
        w.items.push_back(item_of(m, e, version, on_cpu));
        w.items.back().first = w.next[e] = position;
        w.items.back().count = w.count[e];
        position += w.count[e];
        executed += on_cpu;
        counters[m.wanted[i] == planner::HIGH ? planner::NEEDED_HIGH : planner::NEEDED_LOW]++;
        counters[planner::REUSES] += !on_cpu && version != m.wanted[i];
    }
    counters[planner::STEPS]++;
    counters[planner::NEEDED_HIGH] += skipped[planner::HIGH], counters[planner::NEEDED_LOW] += skipped[planner::LOW];
    counters[planner::SKIPPED] += skipped[planner::LOW] + skipped[planner::HIGH];
    counters[planner::HITS] += m.count - executed, counters[planner::CPU_EXECUTED] += executed;
    w.rows_of.resize(position), w.pairs.resize(position);
    w.present.assign(n, 0);
    for (i64 p = 0; p < n; p++) {
        const int32_t e = w.chosen[p];
        if (e < 0 || w.next[e] < 0) continue;
        const i64 to = w.next[e]++;
        w.rows_of[to] = m.weights_on_input ? p : p / m.top_k, w.pairs[to] = p;
        w.present[p] = 1;
    }
    const bool complete = position == n;

    k.tokens = inputs, k.positions = position, k.out_rows = n;
    k.x = m.x, k.out = m.pair_rows, k.rows = w.rows_of.data(), k.pairs = w.pairs.data();
    if (m.weights_on_input) {
        scale_inputs(m, w);
        k.x = w.scaled.data();
    }
    run_pieces(m, w, isa, parallel);
    const i64 threads = m.tokens * k.hidden > 1 << 14 ? m.threads : 1;
    Sum sum{m.tokens, m.top_k, k.hidden, k.dtype, m.pair_rows, weights_of(m, w, complete), m.into, complete ? nullptr : w.present.data(), threads, 0};
    dymoe_weighted_sum(&sum, isa, parallel);
    return executed && lost_pages != m.lost_pages ? LOST : DONE;
}
