// The named orders of chains, as smpar/schedule makes them, and the graph of a chain.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "simulate.hpp"

namespace smpar {

// One stage feeds the next; checked numbers. Boundary b is between stages b and b + 1.
struct Pipeline {
    std::vector<int> ranks;                           // of stages
    std::vector<double> forward, backward, weight;    // seconds of stages
    std::vector<std::int64_t> saved;                  // bytes of stages
    std::vector<double> wire_forward, wire_backward;  // seconds of boundaries
    std::vector<double> latency_forward, latency_backward;
    double host;
    bool training;

    int stages() const { return static_cast<int>(ranks.size()); }
    int size() const;  // number of ranks
    // Whether two ranks meet at a boundary, so that messages pass it.
    bool crosses(int boundary) const { return ranks[boundary] != ranks[boundary + 1]; }
};

Graph graph_of(const Pipeline& pipeline);

// The same without contention: a message takes `delay`.
Graph graph_of(const Pipeline& pipeline, double delay);

// `name`: gpipe, 1f1b, interleaved_1f1b, zb or zbv, which the stages' ranks must fit. Action for action what
// smpar.schedule.make_schedule makes; where that tries several orders on a clock, so does this.
Order named_order(const Pipeline& pipeline, const std::string& name, int microbatches);

}  // namespace smpar
