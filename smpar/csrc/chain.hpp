// A chain of units and the cost of giving an interval of it to one stage.
#pragma once

#include <vector>

#include "cuts.hpp"

namespace smpar {

struct Edge {
    int source;
    std::vector<int> targets;
    double seconds;
};

struct Tie {
    std::vector<int> units;
    double seconds;
};

struct Chain {
    std::vector<double> time, memory;
    std::vector<Edge> edges;
    std::vector<Tie> ties;
    int size() const { return static_cast<int>(time.size()); }
};

struct Goal {
    int stages;
    int microbatches;
    double memory_weight;
    double memory_limit;     // bytes per rank, infinity for none
    std::vector<int> ranks;  // of stages; empty if each has its own
    double evenness = 0;     // part of the pace that the dearest stage sets, not the dearest rank
};

// Additions happen in one order, that of the Python twin, so that both round alike: units from left to
// right, edges and ties by the unit at which they enter the interval, then by index.
struct Interval {
    double time, memory;  // seconds per microbatch, bytes
    double cost;          // share of the whole chain's time and memory, weighted
    double total;         // cost plus the charge of tied parameters
};

// One use of a tensor (or of a tied parameter): charged when an interval reaches it and holds neither the
// source nor a use nearer to the interval's growing end.
struct Use {
    int source, neighbour;
    double amount;
    bool enters(int begin) const { return source < begin && neighbour < begin; }  // growing to the right
};
using Uses = std::vector<std::vector<Use>>;  // [unit]

// Sorts a tensor's uses in by unit; those before its source are left out without `from_right`.
void add_uses(Uses& from_left, Uses* from_right, int source, std::vector<int> targets, double amount);

// Indexes a chain by unit: what enters an interval when it grows over a unit.
class Costs {
  public:
    Costs(const Chain& chain, const Goal& goal);

    int size() const { return static_cast<int>(time_.size()); }
    double total_time() const { return total_time_; }
    double total_memory() const { return total_memory_; }
    bool has_backward() const { return has_backward_; }

    // Cost without edges: it only grows with the interval, which is what allows to stop looking.
    double plain(double time, double memory) const;
    double tie_charge(double seconds) const;
    Interval of(int begin, int end) const;
    // Seconds of edges that come into [begin, end) from units at or after `end`.
    double backward(int begin, int end) const;
    double backward_at(int unit, int end) const;

    // Walks the intervals [begin, begin + 1), [begin, begin + 2), ...
    struct Walk {
        const Costs& costs;
        int begin, end;
        double time = 0, forward = 0, tie = 0, memory = 0;
        Walk(const Costs& costs, int begin) : costs(costs), begin(begin), end(begin) {}
        void grow();
    };

  private:
    std::vector<double> time_, memory_;
    Uses forward_, backward_, ties_;
    double weight_, total_time_ = 0, total_memory_ = 0;
    bool has_backward_ = false;
};

// The costs of all intervals whose plain cost is at most `cap` and whose memory fits.
Band band_of(const Costs& costs, double cap, double memory_limit);

}  // namespace smpar
