#include "chain.hpp"

#include <algorithm>

namespace smpar {

void add_uses(Uses& from_left, Uses* from_right, int source, std::vector<int> targets, double amount) {
    std::sort(targets.begin(), targets.end());
    targets.erase(std::unique(targets.begin(), targets.end()), targets.end());
    const int n = static_cast<int>(targets.size()), size = static_cast<int>(from_left.size());
    for (int i = 0; i < n; ++i) {
        if (targets[i] > source)
            from_left[targets[i]].push_back({source, i > 0 ? targets[i - 1] : -1, amount});
        if (from_right && targets[i] < source)
            (*from_right)[targets[i]].push_back({source, i + 1 < n ? targets[i + 1] : size, amount});
    }
}

Costs::Costs(const Chain& chain, const Goal& goal)
    : time_(chain.time), memory_(chain.memory), weight_(goal.memory_weight) {
    for (double t : time_) total_time_ += t;
    for (double m : memory_) total_memory_ += m;
    forward_.resize(time_.size());
    backward_.resize(time_.size());
    ties_.resize(time_.size());
    for (const Edge& e : chain.edges) add_uses(forward_, &backward_, e.source, e.targets, e.seconds);
    for (const Tie& t : chain.ties)
        if (!t.units.empty())
            add_uses(ties_, nullptr, *std::min_element(t.units.begin(), t.units.end()), t.units, t.seconds);
    for (const auto& uses : backward_) has_backward_ = has_backward_ || !uses.empty();
}

double Costs::plain(double time, double memory) const {
    const double by_time = total_time_ > 0 ? (1.0 - weight_) * time / total_time_ : 0.0;
    const double by_memory = total_memory_ > 0 ? weight_ * memory / total_memory_ : 0.0;
    return by_time + by_memory;
}

double Costs::tie_charge(double seconds) const {
    return total_time_ > 0 ? (1.0 - weight_) * seconds / total_time_ : 0.0;
}

void Costs::Walk::grow() {
    const int unit = end++;
    time += costs.time_[unit];
    memory += costs.memory_[unit];
    for (const Use& u : costs.forward_[unit])
        if (u.enters(begin)) forward += u.amount;
    for (const Use& u : costs.ties_[unit])
        if (u.enters(begin)) tie += u.amount;
}

// Seconds that growing [unit + 1, end) to the left over `unit` adds; kept apart from `backward` for Band.
double Costs::backward_at(int unit, int end) const {
    double sum = 0;
    for (const Use& u : backward_[unit])
        if (u.source >= end && u.neighbour >= end) sum += u.amount;
    return sum;
}

double Costs::backward(int begin, int end) const {
    double sum = 0;
    if (has_backward_)
        for (int unit = end - 1; unit >= begin; --unit) sum += backward_at(unit, end);
    return sum;
}

Interval Costs::of(int begin, int end) const {
    Walk walk(*this, begin);
    while (walk.end < end) walk.grow();
    const double time = walk.time + walk.forward + backward(begin, end);
    const double cost = plain(time, walk.memory);
    return {time, walk.memory, cost, cost + tie_charge(walk.tie)};
}

Band band_of(const Costs& costs, double cap, double memory_limit) {
    const int n = costs.size();
    Band band;
    std::vector<double> time, memory, tie;
    for (int begin = 0; begin < n; ++begin) {
        band.offset.push_back(static_cast<std::ptrdiff_t>(time.size()));
        Costs::Walk walk(costs, begin);
        while (walk.end < n) {
            walk.grow();
            if (walk.memory > memory_limit || costs.plain(walk.time, walk.memory) > cap) {
                --walk.end;
                break;
            }
            time.push_back(walk.time + walk.forward);
            memory.push_back(walk.memory);
            tie.push_back(walk.tie);
        }
        band.end.push_back(walk.end);
    }
    if (costs.has_backward()) {
        for (int end = 1; end <= n; ++end) {
            double sum = 0;
            for (int begin = end - 1; begin >= 0 && band.end[begin] >= end; --begin) {
                sum += costs.backward_at(begin, end);
                time[band.offset[begin] + end - begin - 1] += sum;
            }
        }
    }
    band.costs.resize(time.size());
    band.totals.resize(time.size());
    for (std::size_t i = 0; i < time.size(); ++i) {
        band.costs[i] = costs.plain(time[i], memory[i]);
        band.totals[i] = band.costs[i] + costs.tie_charge(tie[i]);
    }
    return band;
}

}  // namespace smpar
