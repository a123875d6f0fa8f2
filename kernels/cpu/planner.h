// The planner in C++: which experts one layer keeps, fetches or executes on the CPU in one step.
//
// vllm_dymoe/planner/rule.py is the specification and explains the terms; tests hold the two equal, bit for bit. Arrays
// belong to the caller. Everything is integer arithmetic.
#pragma once
#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>
#include "layer.h"

namespace planner {

enum Version : int8_t { ABSENT = 0, LOW = 1, HIGH = 2 };                  // of an expert: wanted, or held
enum Place : i64 { EXECUTE = -4, HIT = -3, STREAM = -2, FREE = -1 };      // from 0 on: the slot of that expert
enum Cost { LINK, FIRST_ROW, NEXT_ROW, MOST_ROWS, COSTS };
enum Action : uint8_t { ACTION_HIT, ACTION_ADMIT, ACTION_STREAM, ACTION_EXECUTE, ACTION_SKIP };
enum Counter {
    STEPS, NEEDED_HIGH, NEEDED_LOW, SKIPPED, HITS, REUSES, FETCHED_HIGH, FETCHED_LOW, STREAMED, PROMOTIONS, EVICTIONS,
    AHEAD, AHEAD_BYTES, AHEAD_USED, AHEAD_USED_BYTES, CPU_EXECUTED, LATE, CANCELLED, COUNTERS
};
constexpr i64 FIRST_IN = 0, COLDEST = 1;  // values of Eviction; 2 is the least recently used
constexpr int AGING = 4, GAIN = 10, LOW_VERSION = 8;
constexpr i64 USE = 1 << 16, NEVER_FETCHED = i64(1) << 40, STEP_RANGE = i64(1) << 40, MOST_THRESHOLD = i64(16) << 32;
constexpr float WEIGHT_UNIT = 0x1p40f, MOST_WEIGHT = 0x1p15f;

// The columns of planner/table.py that planning reads and writes; native.CacheTable is the twin.
struct CacheTable {
    i64 layers, experts, slices;
    int8_t* held;                          // [layers, experts], a Version
    const int32_t* slot;                   // [slices, layers, experts]
    i64 *score, *used_at;                  // [slices, layers, experts]
    i64* step;                             // [layers]
    const int32_t *quotas, *reuse_high;    // [layers, 3]; [1]
    i64* counters;                         // [layers, COUNTERS]
    const int32_t* critical;               // [layers, experts + 1]
    i64 *prompt_threshold, *threshold;     // [2] each
    const i64* cpu_costs;                  // [3, COSTS]
    const int32_t* bits;                   // [3, 3], of gate, up and down; 0 for a version that is skipped
    const i64 *offsets, *pool, *slot_bytes;  // [3, 3]; [3]; [3]
    const i64* source;                     // [layers, experts, 3]
};

// The experts that a step uses, and the planner's decisions about them.
struct Plan {
    i64 count;
    const int32_t* experts;                // [count], ascending
    const int8_t* wanted;                  // [count], LOW or HIGH
    const i64* rows;                       // [count], or null if nothing is executed on the CPU
    const i64* uses;                       // [experts], number of tokens with usable weights
    i64* places;                           // [slices, count], written
    bool admits;                           // misses may be kept; otherwise a migration writes the rows
};

// Memory of one thread, reused in every step.
struct Scratch {
    std::vector<char> hit, missing, wanting, kept, whole;
    std::vector<i64> link, host, order, victims;
};

inline i64 count_of(const std::vector<char>& flags) { return std::count(flags.begin(), flags.end(), char(1)); }

// Age the layer's scores by one step and count what the step uses; where the first to come leaves first, the last use is
// the step in which an expert came, and where the least recent does, scores forget all but the running step.
inline void record_uses(const CacheTable& table, i64 layer, const Plan& plan, i64 evicts) {
    const int aging = evicts == COLDEST ? AGING : 0;
    const i64 step = ++table.step[layer], experts = table.experts;
    for (i64 slice = 0; slice < table.slices; slice++) {
        const i64 at = (slice * table.layers + layer) * experts;
        i64 *score = table.score + at, *used_at = table.used_at + at;
        if (evicts != FIRST_IN)
            for (i64 e = 0; e < experts; e++) score[e] -= score[e] >> aging;
        for (i64 n = 0; n < plan.count; n++) {
            const int32_t e = plan.experts[n];
            if (evicts == FIRST_IN) {
                if (table.held[layer * experts + e] == ABSENT) used_at[e] = step;
            } else if (plan.uses[e] > 0 && (slice == 0 || plan.wanted[n] == HIGH)) {
                score[e] += USE;
                used_at[e] = step;
            }
        }
    }
}

// Give misses of one kind the free slots, and then those of colder experts. `kept` is overwritten.
inline void find_places(const Plan& plan, i64* place, const std::vector<char>& wanting, const std::vector<char>& missing,
                        std::vector<char>& kept, const i64* score, const i64* used_at, i64 quota, Scratch& s) {
    s.order.clear();
    for (i64 n = 0; n < plan.count; n++)
        if (missing[n]) s.order.push_back(n);
    if (s.order.empty()) return;
    const i64 free = std::min(std::max(i64(0), quota - count_of(kept)), i64(s.order.size()));
    for (i64 i = 0; i < free; i++) place[s.order[i]] = FREE;
    s.order.erase(s.order.begin(), s.order.begin() + free);
    if (s.order.empty()) return;
    if (count_of(wanting) > quota)  // the hottest first
        std::stable_sort(s.order.begin(), s.order.end(), [&](i64 a, i64 b) { return score[plan.experts[a]] > score[plan.experts[b]]; });
    for (i64 n = 0; n < plan.count; n++) kept[plan.experts[n]] = 0;
    s.victims.clear();
    for (size_t e = 0; e < kept.size(); e++)
        if (kept[e]) s.victims.push_back(i64(e));
    const auto age = [&](i64 e) { return i64(uint64_t(score[e]) * uint64_t(STEP_RANGE) + uint64_t(used_at[e])); };
    std::stable_sort(s.victims.begin(), s.victims.end(), [&](i64 a, i64 b) { return age(a) < age(b); });
    size_t next = 0;
    for (i64 n : s.order) {
        if (next == s.victims.size()) break;
        if (score[plan.experts[n]] >= score[s.victims[next]]) place[n] = s.victims[next++];
    }
}

// Choose the misses that the CPU executes: the coldest, as long as it finishes them before the link has brought the
// others. `s.hit` is [slices, count]; the result is in `to`, [count].
inline void choose_executed(const CacheTable& table, i64 layer, const Plan& plan, const int8_t* held, Scratch& s, std::vector<char>& to) {
    const i64 n = plan.count, nested = table.slices == 2;
    const i64* costs = table.cpu_costs;
    const int32_t* quotas = table.quotas + 3 * layer;
    to.assign(n, 0);
    s.link.assign(n, 0);
    for (i64 i = 0; i < n; i++) {
        const i64* cost = costs + COSTS * plan.wanted[i];
        to[i] = cost[FIRST_ROW] > 0 && plan.rows[i] <= cost[MOST_ROWS];
    }
    for (int version = LOW; version <= HIGH; version++) {
        i64 has = 0;
        for (i64 e = 0; e < table.experts; e++) has += version == LOW && nested ? held[e] != ABSENT : held[e] == version;
        i64 free = plan.admits ? std::max(i64(0), quotas[version] - has) : 0;
        for (i64 i = 0; i < n; i++) {
            const bool wants = (version == LOW && nested) || plan.wanted[i] == version;
            if (!wants || s.hit[(version == HIGH ? table.slices - 1 : 0) * n + i]) continue;
            s.link[i] += costs[COSTS * version + LINK];
            if (free-- > 0) to[i] = 0;  // a miss that finds a free slot is always fetched
        }
    }
    bool always = true;
    for (i64 i = 0; i < n; i++) {
        to[i] = to[i] && s.link[i] > 0;
        always &= !to[i] || s.link[i] >= NEVER_FETCHED;
    }
    if (always) return;
    s.order.clear();
    for (i64 i = 0; i < n; i++)
        if (to[i]) s.order.push_back(i);
    const i64* score = table.score + layer * table.experts;
    std::stable_sort(s.order.begin(), s.order.end(), [&](i64 a, i64 b) { return score[plan.experts[a]] < score[plan.experts[b]]; });
    i64 link = std::accumulate(s.link.begin(), s.link.end(), i64(0)), host = costs[LINK];
    to.assign(n, 0);
    for (i64 i : s.order) {
        const i64* cost = costs + COSTS * plan.wanted[i];
        host += cost[FIRST_ROW] + (plan.rows[i] - 1) * cost[NEXT_ROW];
        if (host >= link) break;
        link -= s.link[i];
        to[i] = 1;
    }
}

// Decide a Place for each expert of the plan and each of its slices. A slice that is not wanted counts as HIT.
inline void decide(const CacheTable& table, i64 layer, const Plan& plan, Scratch& s) {
    const i64 n = plan.count, experts = table.experts;
    const bool nested = table.slices == 2, reuse_high = *table.reuse_high != 0;
    const int8_t* held = table.held + layer * experts;
    const int32_t* quotas = table.quotas + 3 * layer;
    const auto score = [&](i64 slice) { return table.score + (slice * table.layers + layer) * experts; };
    const auto used_at = [&](i64 slice) { return table.used_at + (slice * table.layers + layer) * experts; };
    bool all_hit = true;
    s.hit.resize(table.slices * n);
    for (i64 i = 0; i < n; i++) {
        const int8_t has = held[plan.experts[i]], wants = plan.wanted[i];
        if (nested) {
            s.hit[i] = has != ABSENT;
            s.hit[n + i] = has == HIGH || wants == LOW;
            all_hit &= s.hit[i] && s.hit[n + i];
        } else {
            s.hit[i] = reuse_high ? has >= wants : has == wants;
            all_hit &= s.hit[i];
        }
    }
    for (i64 i = 0; i < table.slices * n; i++) plan.places[i] = s.hit[i] ? HIT : STREAM;
    if (all_hit) return;
    std::vector<char>& fetched = s.hit;  // from here on: misses that are fetched
    const i64* costs = table.cpu_costs;
    std::vector<char> executed;
    if (plan.rows != nullptr && (costs[FIRST_ROW] || costs[COSTS + FIRST_ROW] || costs[2 * COSTS + FIRST_ROW]))
        choose_executed(table, layer, plan, held, s, executed);
    for (char& flag : fetched) flag = !flag;
    for (i64 i = 0; i < i64(executed.size()); i++)
        if (executed[i])
            for (i64 slice = 0; slice < table.slices; slice++) plan.places[slice * n + i] = EXECUTE, fetched[slice * n + i] = 0;
    if (!plan.admits || std::find(fetched.begin(), fetched.end(), char(1)) == fetched.end()) return;
    s.kept.resize(experts);
    s.wanting.resize(n);
    s.missing.resize(n);
    if (!nested) {
        for (int version = HIGH; version >= LOW; version--) {
            for (i64 e = 0; e < experts; e++) s.kept[e] = held[e] == version;
            for (i64 i = 0; i < n; i++) {
                // Replaced by its other version.
                if (fetched[i] && plan.places[i] != STREAM) s.kept[plan.experts[i]] = 0;
                s.wanting[i] = plan.wanted[i] == version;
                s.missing[i] = s.wanting[i] && fetched[i];
            }
            find_places(plan, plan.places, s.wanting, s.missing, s.kept, score(0), used_at(0), quotas[version], s);
        }
        return;
    }
    for (i64 e = 0; e < experts; e++) s.kept[e] = held[e] != ABSENT;
    for (i64 i = 0; i < n; i++) s.wanting[i] = 1, s.missing[i] = fetched[i];
    find_places(plan, plan.places, s.wanting, s.missing, s.kept, score(0), used_at(0), quotas[LOW], s);
    for (i64 e = 0; e < experts; e++) s.kept[e] = held[e] == HIGH;
    for (i64 i = 0; i < n; i++)
        if (plan.places[i] >= 0) s.kept[plan.places[i]] = 0;  // an expert that loses its base loses both slices
    for (i64 i = 0; i < n; i++) {
        s.wanting[i] = plan.wanted[i] == HIGH;
        s.missing[i] = fetched[n + i] && plan.places[i] != STREAM;
    }
    find_places(plan, plan.places + n, s.wanting, s.missing, s.kept, score(1), used_at(1), quotas[HIGH], s);
}

// Importance of one phase's experts (DyMoE 4.2, Eqs. 1 to 3), indexed by the layer's experts.
struct Phase {
    std::vector<i64> uses, hits, sums, every;  // every: sums of all tokens, heavy hitters or not
    void clear(i64 experts) {
        for (auto* column : {&uses, &hits, &sums, &every}) column->assign(experts, 0);
    }
};

// NaN, infinite and absurdly large weights, which a single request can cause, are left out of statistics.
inline bool usable(float weight) { return weight > -MOST_WEIGHT && weight < MOST_WEIGHT; }

// Return a weight as an integer; a usable one adds one more unit, so a sum of 0 means that none was usable.
inline i64 units(float weight) { return usable(weight) ? i64(weight * WEIGHT_UNIT) + 1 : 0; }

// Mark the experts of a phase that are high: those above its threshold, or the critical number of most important ones.
// Returns the threshold's new value.
inline i64 mark_high(const CacheTable& table, i64 layer, const Phase& phase, const i64* threshold, std::vector<i64>& used, std::vector<char>& high) {
    used.clear();
    for (i64 e = 0; e < table.experts; e++)
        if (phase.uses[e] > 0) used.push_back(e);
    const i64 n = i64(used.size());
    if (n == 0) return threshold[0];
    i64 active = 0;  // experts with any usable weight
    for (i64 e : used) active += phase.every[e] != 0;
    if (table.threshold[1] >= 0) {
        i64 total = 0, largest = used[0], marked = 0;
        for (i64 e : used) {
            total += phase.sums[e] >> 20;
            if (phase.sums[e] > phase.sums[largest]) largest = e;
        }
        for (i64 e : used) {
            const bool above = (threshold[1] && e == largest) || ((phase.sums[e] >> 20) * active) << 16 > (threshold[0] >> 16) * total;
            marked += above && phase.every[e] != 0;
            high[e] |= above;
        }
        // Even the one that is always high is too many.
        if (active == 0 || active * threshold[1] < 1 << 16) return threshold[0];
        const i64 error = (marked << 16) / active - threshold[1];
        return std::min(std::max(threshold[0] + error * (i64(1) << GAIN), i64(0)), MOST_THRESHOLD);
    }
    i64 critical = table.critical[layer * (table.experts + 1) + active];
    if (critical >= active) critical = n;
    if (critical < n)
        std::sort(used.begin(), used.end(), [&](i64 a, i64 b) {
            if (phase.hits[a] != phase.hits[b]) return phase.hits[a] > phase.hits[b];
            return phase.sums[a] != phase.sums[b] ? phase.sums[a] > phase.sums[b] : a < b;
        });
    for (i64 i = 0; i < critical; i++) high[used[i]] = 1;
    return threshold[0];
}

}  // namespace planner
