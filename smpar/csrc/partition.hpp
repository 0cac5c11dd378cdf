// Exact cuts of a chain into stages.
#pragma once

#include <optional>
#include <vector>

#include "chain.hpp"

namespace smpar {

struct Partition {
    std::vector<int> cuts;  // first unit of each stage
    double objective;
    std::vector<double> stage_time, stage_memory;
};

// Minimises sum(total) + (microbatches - 1) * max(cost) over all cuts into exactly `goal.stages` non-empty
// intervals, the sum taken from the last stage to the first; of equal cuts the lexicographically smallest.
// With `goal.ranks`, see `partition_ranked`. Nothing if no cuts keep within the memory limit. Expects checked
// numbers and stages <= units.
std::optional<Partition> partition(const Chain& chain, const Goal& goal);

}  // namespace smpar
