#include "partition.hpp"

#include <algorithm>

#include "ranked.hpp"

namespace smpar {
namespace {

constexpr int kRounds = 12;         // of narrowing, before frontiers are built
constexpr long kWork = 60'000'000;  // additions of the local search: less than a tenth of a second

// Fills stages greedily up to `cap`; empty if more than `stages` are needed, else exactly `stages` cuts.
std::vector<int> fill(const Costs& costs, const Goal& goal, double cap) {
    std::vector<int> cuts;
    const int n = costs.size();
    for (int begin = 0; begin < n;) {
        if (static_cast<int>(cuts.size()) == goal.stages) return {};
        Costs::Walk walk(costs, begin);
        cuts.push_back(begin);
        while (walk.end < n) {
            walk.grow();
            if (walk.memory > goal.memory_limit || costs.plain(walk.time, walk.memory) > cap) {
                --walk.end;
                break;
            }
        }
        if (walk.end == begin) return {};
        begin = walk.end;
    }
    for (int unit = 1; unit < n && static_cast<int>(cuts.size()) < goal.stages; ++unit) {
        auto at = std::lower_bound(cuts.begin(), cuts.end(), unit);
        if (at == cuts.end() || *at != unit) cuts.insert(at, unit);
    }
    return cuts;
}

Partition measure(const Costs& costs, const Goal& goal, std::vector<int> cuts) {
    Partition result{std::move(cuts), 0, {}, {}};
    const int stages = static_cast<int>(result.cuts.size());
    double sum = 0, max = 0;
    result.stage_time.resize(stages);
    result.stage_memory.resize(stages);
    for (int k = stages - 1; k >= 0; --k) {
        const int end = k + 1 < stages ? result.cuts[k + 1] : costs.size();
        const Interval interval = costs.of(result.cuts[k], end);
        sum = interval.total + sum;
        max = std::max(max, interval.cost);
        result.stage_time[k] = interval.time;
        result.stage_memory[k] = interval.memory;
    }
    result.objective = sum + (goal.microbatches - 1.0) * max;
    return result;
}

// A good start: balanced by plain cost, by bisection.
Partition balanced(const Costs& costs, const Goal& goal, std::vector<int> any) {
    double low = 0, high = 2;
    for (int i = 0; i < 50; ++i) {
        const double middle = (low + high) / 2;
        std::vector<int> cuts = fill(costs, goal, middle);
        if (cuts.empty()) {
            low = middle;
        } else {
            high = middle;
            any = std::move(cuts);
        }
    }
    return measure(costs, goal, std::move(any));
}

// The exact cuts where each stage has a rank of its own.
std::optional<Partition> partition_stages(const Costs& costs, const Goal& goal) {
    std::vector<int> any = fill(costs, goal, kInf);
    if (any.empty()) return std::nullopt;
    const Partition start = balanced(costs, goal, std::move(any));
    // The other stages cost something too, hence the division only of what a solution may add to them.
    const double least = costs.plain(costs.total_time(), costs.total_memory()) * (1 - kSlack);
    const double cap = goal.microbatches > 1
                           ? loosen(std::max(0.0, start.objective - least) / (goal.microbatches - 1.0))
                           : loosen(start.objective);
    const Band band = band_of(costs, loosen(cap), goal.memory_limit);
    const Lanes lanes(goal.stages, Lane{&band, &band.end});
    const double weight = goal.microbatches - 1.0;
    const Range range = narrow(lanes, weight, {0, loosen(cap), loosen(start.objective)}, kRounds);
    return measure(costs, goal, best_cuts(lanes, weight, range));
}

// Cuts where ranks are shared, at least as good as those in `start`, unless nothing is found that fits.
std::optional<Partition> partition_ranked(const Chain& chain, const Costs& costs, const Goal& goal,
                                          const std::vector<int>& start) {
    const auto stages = static_cast<std::size_t>(goal.stages);
    std::vector<double> cost;
    for (int unit = 0; unit < chain.size(); ++unit)
        cost.push_back(costs.plain(chain.time[unit], chain.memory[unit]));
    SharedRanks shared{{stages, cost},
                       {stages, chain.memory},
                       chain.edges,
                       std::vector<double>(stages, costs.plain(1, 0)),
                       std::vector<double>(stages, 0),
                       chain.ties,
                       goal.ranks,
                       {},
                       goal.microbatches,
                       goal.evenness,
                       kWork};
    for (Tie& t : shared.ties) t.seconds = costs.tie_charge(t.seconds);
    shared.limit.assign(1 + *std::max_element(goal.ranks.begin(), goal.ranks.end()), goal.memory_limit);
    const RankedCuts found = cut_ranked(shared, start);
    if (found.excess > 0) return std::nullopt;
    Partition result{found.cuts, found.objective, {}, {}};
    const Incoming into = incoming(chain.edges, found.cuts, goal.ranks, chain.size());
    for (int k = 0; k < goal.stages; ++k) {
        double time = 0, memory = 0;
        for (int unit = found.cuts[k]; unit < (k + 1 < goal.stages ? found.cuts[k + 1] : chain.size());
             ++unit) {
            time += chain.time[unit];
            memory += chain.memory[unit];
        }
        result.stage_time.push_back(time + into.seconds[k]);
        result.stage_memory.push_back(memory);
    }
    return result;
}

}  // namespace

std::optional<Partition> partition(const Chain& chain, const Goal& goal) {
    const Costs costs(chain, goal);
    if (goal.ranks.empty()) return partition_stages(costs, goal);
    Goal free = goal;  // a limit per rank forbids cuts that one per stage allows, and the other way round
    free.memory_limit = kInf;
    auto found = partition_ranked(chain, costs, goal, partition_stages(costs, free)->cuts);
    if (found) return found;
    free.memory_weight = 1;  // so tight that the cuts which spread memory best have to be the start
    free.microbatches = std::numeric_limits<int>::max();
    const Costs bytes(chain, free);
    const auto spread = partition_ranked(chain, bytes, free, partition_stages(bytes, free)->cuts);
    return partition_ranked(chain, costs, goal, spread->cuts);
}

}  // namespace smpar
