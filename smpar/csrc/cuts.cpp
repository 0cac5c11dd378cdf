#include "cuts.hpp"

#include <algorithm>

namespace smpar {
namespace {

constexpr double kFine = 1e-6;  // narrower pieces, relative to the smallest max(cost), are not halved

// Where cuts can be if no stage may cost more than `cap`.
struct Window {
    std::vector<std::vector<int>> ends;  // [stage][unit]: largest end of an affordable interval from it
    std::vector<int> first;              // [stages]: first unit from which the last so many may reach the end

    Window(const Lanes& lanes, double cap) : first(lanes.size() + 1) {
        const int stages = static_cast<int>(lanes.size()), n = static_cast<int>(lanes[0].end->size());
        for (int stage = 0; stage < stages; ++stage) {
            const Lane& lane = lanes[stage];
            if (stage > 0 && lane.band == lanes[stage - 1].band && lane.end == lanes[stage - 1].end) {
                ends.push_back(ends.back());
                continue;
            }
            ends.push_back(*lane.end);
            for (int unit = 0; unit < n; ++unit) {
                int& end = ends.back()[unit];
                while (end > unit && lane.band->cost(unit)[end] > cap) --end;
            }
        }
        first[0] = n;
        for (int k = 1; k <= stages; ++k) {
            first[k] = first[k - 1];
            for (int unit = first[k - 1] - 1; unit >= 0; --unit)
                if (ends[stages - k][unit] >= first[k - 1]) first[k] = unit;
        }
    }

    int size() const { return first[0]; }
    int stages() const { return static_cast<int>(ends.size()); }
};

using Table = std::vector<std::vector<double>>;  // [stages][unit]: the first so many stages end before unit

// Smallest possible max(cost).
double bottleneck(const Lanes& lanes, double cap) {
    const Window window(lanes, cap);
    const int n = window.size(), stages = window.stages();
    std::vector<double> now(n + 1, kInf), next(n + 1);
    now[0] = 0;
    for (int k = 1; k <= stages; ++k) {
        std::fill(next.begin(), next.end(), kInf);
        const int low = window.first[stages - k];
        for (int begin = window.first[stages - k + 1]; begin < n; ++begin) {
            if (now[begin] == kInf) continue;
            const double so_far = now[begin], *cost = lanes[k - 1].band->cost(begin);
            const int end = window.ends[k - 1][begin];
            for (int e = std::max(begin + 1, low); e <= end; ++e)
                next[e] = std::min(next[e], std::max(so_far, cost[e]));
        }
        std::swap(now, next);
    }
    return now[n];
}

// Smallest sum(total) of prefixes if no stage may cost more than `cap`.
Table least_sums(const Lanes& lanes, const Window& window, double cap) {
    const int n = window.size(), stages = window.stages();
    Table sums(stages + 1, std::vector<double>(n + 1, kInf));
    sums[0][0] = 0;
    for (int k = 1; k <= stages; ++k) {
        const Band& band = *lanes[k - 1].band;
        const int low = window.first[stages - k];
        const std::vector<double>& now = sums[k - 1];
        double* next = sums[k].data();
        for (int begin = window.first[stages - k + 1]; begin < n; ++begin) {
            if (now[begin] == kInf) continue;
            const double so_far = now[begin], *cost = band.cost(begin), *total = band.total(begin);
            const int end = window.ends[k - 1][begin];
            for (int e = std::max(begin + 1, low); e <= end; ++e) {
                const double sum = cost[e] <= cap ? so_far + total[e] : kInf;
                next[e] = std::min(next[e], sum);
            }
        }
    }
    return sums;
}

// The same of suffixes, [stages][unit]: the last so many stages from unit to the end. Only units that
// `window` and the prefixes reach are looked at.
Table least_suffix_sums(const Lanes& lanes, const Window& window, double cap, const Table& prefix) {
    const int n = window.size(), stages = window.stages();
    Table sums(stages + 1, std::vector<double>(n + 1, kInf));
    sums[0][n] = 0;
    for (int k = 1; k <= stages; ++k) {
        const Band& band = *lanes[stages - k].band;
        const double* rest = sums[k - 1].data();
        for (int begin = window.first[k]; begin <= n - k; ++begin) {
            if (prefix[stages - k][begin] == kInf) continue;
            const double *cost = band.cost(begin), *total = band.total(begin);
            const int end = window.ends[stages - k][begin];
            double least = kInf;
            for (int e = std::max(begin + 1, window.first[k - 1]); e <= end; ++e)
                least = std::min(least, cost[e] <= cap ? total[e] + rest[e] : kInf);
            sums[k][begin] = least;
        }
    }
    return sums;
}

// What a suffix of the chain may cost: a point of its Pareto frontier.
struct Point {
    double sum, max;
};

// Frontiers of all suffixes [begin, n) cut into the last `stages` stages, by growing max and falling sum. A
// max below `range.low` is raised to it: no optimum stays below, so none is changed, and far fewer points
// differ.
class Frontiers {
  public:
    Frontiers(const Lanes& lanes, double weight, const Range& range)
        : lanes_(lanes), range_(range), window_(lanes, range.high), weight_(weight) {
        const int n = window_.size(), all = window_.stages();
        const Table prefix = least_sums(lanes, window_, range.high);
        const Table suffix = least_suffix_sums(lanes, window_, range.high, prefix);
        of_.assign(all + 1, std::vector<std::vector<Point>>(n + 1));
        of_[0][n].push_back({0, range.low});
        for (int k = 1; k <= all; ++k) {
            for (int begin = window_.first[k]; begin <= n - k; ++begin) {
                const double before = prefix[all - k][begin];
                if (!(objective(before + suffix[k][begin], range.low) <= loosen(range.bound))) continue;
                if (weight == 0)  // only the least sum counts
                    of_[k][begin].push_back({suffix[k][begin], range.low});
                else
                    extend(k, begin, before, suffix[k - 1]);
            }
        }
    }

    // The lexicographically smallest cuts that reach the best objective, found by trying the first end of
    // each stage from which the frontier still reaches it.
    std::vector<int> cuts() const {
        const int stages = window_.stages();
        double best = kInf, max = 0;
        for (const Point& p : of_[stages][0]) best = std::min(best, objective(p.sum, p.max));
        std::vector<int> cuts{0};
        std::vector<double> totals;
        const auto reaches = [&](double total, double cost, const Point& p) {
            double sum = total + p.sum;
            for (auto it = totals.rbegin(); it != totals.rend(); ++it) sum = *it + sum;
            return objective(sum, std::max({max, cost, p.max})) == best;
        };
        for (int k = stages - 1; k > 0; --k) {
            const int begin = cuts.back(), stage = stages - k - 1;
            const double *cost = lanes_[stage].band->cost(begin), *total = lanes_[stage].band->total(begin);
            for (int e = begin + 1; e <= window_.ends[stage][begin]; ++e) {
                const std::vector<Point>& rest = of_[k][e];
                const auto hit = [&](const Point& p) { return reaches(total[e], cost[e], p); };
                if (std::none_of(rest.begin(), rest.end(), hit)) continue;
                cuts.push_back(e);
                totals.push_back(total[e]);
                max = std::max(max, cost[e]);
                break;
            }
        }
        return cuts;
    }

  private:
    double objective(double sum, double max) const { return sum + weight_ * max; }

    // Merges, for each end of the first of these stages, what follows it into the frontier so far.
    void extend(int stages, int begin, double prefix_sum, const std::vector<double>& least_rest) {
        const double limit = loosen(range_.bound) - prefix_sum;
        const int stage = window_.stages() - stages;
        const double *cost = lanes_[stage].band->cost(begin), *total = lanes_[stage].band->total(begin);
        std::vector<Point> best;
        for (int e = begin + 1; e <= window_.ends[stage][begin]; ++e) {
            const std::vector<Point>& rest = of_[stages - 1][e];
            if (rest.empty() || cost[e] > range_.high) continue;
            if (objective(total[e] + least_rest[e], std::max(range_.low, cost[e])) > limit) continue;
            added_.clear();
            // Where the first stage is the slowest, only the last of those points, with the least sum,
            // counts.
            auto from = std::upper_bound(rest.begin(), rest.end(), cost[e],
                                         [](double most, const Point& p) { return most < p.max; });
            if (from != rest.begin()) --from;
            for (; from != rest.end(); ++from) {
                const Point p{total[e] + from->sum, std::max(cost[e], from->max)};
                if (objective(p.sum, p.max) <= limit) added_.push_back(p);
            }
            if (!added_.empty()) merge(best);
        }
        of_[stages][begin] = std::move(best);
    }

    // Both lists grow in max and fall in sum, and so does the result.
    void merge(std::vector<Point>& best) {
        merged_.clear();
        auto a = best.cbegin(), b = added_.cbegin();
        double least = kInf;
        while (a != best.cend() || b != added_.cend()) {
            const bool from_a =
                b == added_.cend() ||
                (a != best.cend() && (a->max < b->max || (a->max == b->max && a->sum <= b->sum)));
            const Point& p = from_a ? *a++ : *b++;
            if (p.sum >= least) continue;
            least = p.sum;
            merged_.push_back(p);
        }
        std::swap(best, merged_);
    }

    const Lanes& lanes_;
    const Range range_;
    const Window window_;
    const double weight_;
    std::vector<std::vector<std::vector<Point>>> of_;
    std::vector<Point> added_, merged_;
};

}  // namespace

std::vector<Piece> halve(Piece whole, double weight, const double& bound, int rounds,
                         const std::function<double(double)>& least_sum) {
    std::vector<Piece> pieces{whole};
    const double fine = kFine * whole.low;
    for (int round = 0;; ++round) {
        for (Piece& p : pieces) p.high = std::min(p.high, loosen((bound - p.sum) / weight));
        const auto hopeless = [&](const Piece& p) { return p.high < p.low; };
        pieces.erase(std::remove_if(pieces.begin(), pieces.end(), hopeless), pieces.end());
        const auto widest =
            std::max_element(pieces.begin(), pieces.end(),
                             [](const Piece& a, const Piece& b) { return a.high - a.low < b.high - b.low; });
        if (round == rounds || widest->high - widest->low <= fine) return pieces;
        const double middle = widest->low + (widest->high - widest->low) / 2;
        const Piece left{widest->low, middle, least_sum(middle)};
        widest->low = middle;
        pieces.push_back(left);
    }
}

Range narrow(const Lanes& lanes, double weight, Range range, int rounds) {
    const auto least_sum = [&](double at) {
        const double sum = least_sums(lanes, Window(lanes, at), at).back().back();
        range.bound = std::min(range.bound, sum + weight * at);
        return sum;
    };
    if (weight == 0) {
        const double sum = least_sum(range.high);
        return {range.high, range.high, std::min(range.bound, sum)};
    }
    const double smallest = std::max(range.low, bottleneck(lanes, range.high));
    least_sum(smallest);
    const Piece whole{smallest, range.high, least_sum(range.high)};
    range.low = kInf;
    range.high = 0;
    for (const Piece& p : halve(whole, weight, range.bound, rounds, least_sum)) {
        range.low = std::min(range.low, p.low);
        range.high = std::max(range.high, p.high);
    }
    return range;
}

std::vector<int> best_cuts(const Lanes& lanes, double weight, const Range& range) {
    return Frontiers(lanes, weight, range).cuts();
}

}  // namespace smpar
