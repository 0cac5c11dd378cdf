// Cuts of a chain into stages of which several share a rank.
#pragma once

#include <vector>

#include "chain.hpp"

namespace smpar {

struct SharedRanks {
    std::vector<std::vector<double>> cost, memory;  // [stage][unit]
    std::vector<Edge> edges;            // an edge costs seconds * rate + latency where it comes in
    std::vector<double> rate, latency;  // [stage]
    std::vector<Tie> ties;              // each rank beyond the first with a unit of it costs `seconds`
    std::vector<int> ranks;             // [stage]
    std::vector<double> limit;          // [rank]
    int microbatches;
    double evenness;  // part of the pace that the dearest stage sets, not the dearest rank
    long work;        // effort of the local search, in additions

    int size() const { return static_cast<int>(cost[0].size()); }
    int stages() const { return static_cast<int>(ranks.size()); }
};

struct RankedCuts {
    std::vector<int> cuts;
    double objective;
    double excess;  // bytes above the limits, of all ranks
};

// The best cuts as `smpar.planner.partition` defines them for shared ranks, or good ones: at least as good as
// the cuts in `start`. Cuts that keep the limits come before those that do not.
RankedCuts cut_ranked(const SharedRanks& problem, const std::vector<int>& start);

// Per stage, seconds and number of edges that come in from other ranks.
struct Incoming {
    std::vector<double> seconds, count;
};
Incoming incoming(const std::vector<Edge>& edges, const std::vector<int>& cuts, const std::vector<int>& ranks,
                  int size);

}  // namespace smpar
