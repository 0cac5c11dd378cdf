// Cuts of a chain into stages of which each rank holds several.
#pragma once

#include <optional>

#include "chain.hpp"
#include "partition.hpp"

namespace smpar {

// With `goal.evenness` e the pace is (1 - e) * max over ranks + e * v * max over stages of c; with e = 0:
// Minimises sum(c) / v + (microbatches - 1 / v) * max over ranks of the sum of c of its stages + ties, where
// v is stages per rank. `start`: cuts to be no worse than, where they keep within the memory limit. The
// result is an optimum if a branch and bound ends within its budget, else the best of a local search; the
// same on every machine. Nothing if no cuts within the memory limit were found.
std::optional<Partition> partition_ranked(const Chain& chain, const Costs& costs, const Goal& goal,
                                          const std::vector<int>& start);

}  // namespace smpar
