// A chain with split backwards on a simulated clock; the twin of smpar/schedule/filling.py, which explains
// it.
#pragma once

#include <vector>

#include "orders.hpp"

namespace smpar {

struct Rule {
    std::vector<int> ahead;
    bool turn;
    double patience;
    double delay = 0;
};

struct Filled {
    Order order;
    double end;  // where messages take no time
};

// Mean seconds of forwards and whole backwards.
double mean_task(const Pipeline& pipeline);

// It may stop as soon as the end is certain to be after `limit`; then there is no order.
Filled fill(const Pipeline& pipeline, int microbatches, const Rule& rule, double limit);

}  // namespace smpar
