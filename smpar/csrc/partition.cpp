#include "partition.hpp"

#include <algorithm>

#include "ranked.hpp"

namespace smpar {
namespace {

// Rounding allowance of bounds. Bounds only decide what is not looked at, so the slack costs time, never
// a decision.
constexpr double kSlack = 1e-9;

// Effort spent on narrowing the range of max(cost) before frontiers are built.
constexpr int kRounds = 12;
constexpr double kFine = 1e-6;

double loosen(double x) { return x * (1 + kSlack); }

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

// Where cuts can be if no stage may cost more than `cap`.
struct Window {
    std::vector<int> end;    // [unit]: largest end of an affordable interval from it
    std::vector<int> first;  // [stages]: first unit from which so many stages may reach the end

    Window(const Band& band, double cap, int stages) : end(band.size()), first(stages + 1) {
        const int n = band.size();
        for (int unit = 0; unit < n; ++unit) {
            end[unit] = band.end(unit);
            while (end[unit] > unit && band.cost(unit)[end[unit]] > cap) --end[unit];
        }
        first[0] = n;
        for (int k = 1; k <= stages; ++k) {
            first[k] = first[k - 1];
            for (int unit = first[k - 1] - 1; unit >= 0; --unit)
                if (end[unit] >= first[k - 1]) first[k] = unit;
        }
    }
};

using Table = std::vector<std::vector<double>>;  // [stages][unit]: the first so many stages end before unit

// Smallest possible max(cost).
double bottleneck(const Band& band, double cap, int stages) {
    const int n = band.size();
    const Window window(band, cap, stages);
    std::vector<double> now(n + 1, kInf), next(n + 1);
    now[0] = 0;
    for (int k = 1; k <= stages; ++k) {
        std::fill(next.begin(), next.end(), kInf);
        const int low = window.first[stages - k];
        for (int begin = window.first[stages - k + 1]; begin < n; ++begin) {
            if (now[begin] == kInf) continue;
            const double so_far = now[begin], *cost = band.cost(begin);
            const int end = window.end[begin];
            for (int e = std::max(begin + 1, low); e <= end; ++e)
                next[e] = std::min(next[e], std::max(so_far, cost[e]));
        }
        std::swap(now, next);
    }
    return now[n];
}

// Smallest sum(total) of prefixes if no stage may cost more than `cap`.
Table least_sums(const Band& band, const Window& window, double cap, int stages) {
    const int n = band.size();
    Table sums(stages + 1, std::vector<double>(n + 1, kInf));
    sums[0][0] = 0;
    for (int k = 1; k <= stages; ++k) {
        const int low = window.first[stages - k];
        const std::vector<double>& now = sums[k - 1];
        double* next = sums[k].data();
        for (int begin = window.first[stages - k + 1]; begin < n; ++begin) {
            if (now[begin] == kInf) continue;
            const double so_far = now[begin], *cost = band.cost(begin), *total = band.total(begin);
            const int end = window.end[begin];
            for (int e = std::max(begin + 1, low); e <= end; ++e) {
                const double sum = cost[e] <= cap ? so_far + total[e] : kInf;
                next[e] = std::min(next[e], sum);
            }
        }
    }
    return sums;
}

// The same of suffixes, [stages][unit]: so many stages from unit to the end. Only units that `window` and the
// prefixes reach are looked at.
Table least_suffix_sums(const Band& band, const Window& window, double cap, int stages, const Table& prefix) {
    const int n = band.size();
    Table sums(stages + 1, std::vector<double>(n + 1, kInf));
    sums[0][n] = 0;
    for (int k = 1; k <= stages; ++k) {
        const double* rest = sums[k - 1].data();
        for (int begin = window.first[k]; begin <= n - k; ++begin) {
            if (prefix[stages - k][begin] == kInf) continue;
            const double *cost = band.cost(begin), *total = band.total(begin);
            const int end = window.end[begin];
            double least = kInf;
            for (int e = std::max(begin + 1, window.first[k - 1]); e <= end; ++e)
                least = std::min(least, cost[e] <= cap ? total[e] + rest[e] : kInf);
            sums[k][begin] = least;
        }
    }
    return sums;
}

// The range in which the max(cost) of every optimum lies, and an upper bound of the objective.
struct Range {
    double low, high, bound;
};

// For max(cost) in [low, high] the objective is at least least_sum(high) + (m - 1) * low: halve the widest
// piece of the range, and drop pieces that cannot hold an optimum.
Range narrow(const Band& band, double cap, const Goal& goal, double bound) {
    struct Piece {
        double low, high, sum_at_high;
    };
    const double weight = goal.microbatches - 1.0;
    const auto least_sum = [&](double at) {
        return least_sums(band, Window(band, at, goal.stages), at, goal.stages)[goal.stages][band.size()];
    };
    if (weight == 0) return {cap, cap, std::min(bound, least_sum(cap))};
    const double smallest = bottleneck(band, cap, goal.stages);
    bound = std::min(bound, least_sum(smallest) + weight * smallest);
    std::vector<Piece> pieces{{smallest, cap, least_sum(cap)}};
    for (int round = 0;; ++round) {
        for (Piece& p : pieces) p.high = std::min(p.high, loosen((bound - p.sum_at_high) / weight));
        const auto hopeless = [&](const Piece& p) { return p.high < p.low; };
        pieces.erase(std::remove_if(pieces.begin(), pieces.end(), hopeless), pieces.end());
        const auto widest =
            std::max_element(pieces.begin(), pieces.end(),
                             [](const Piece& a, const Piece& b) { return a.high - a.low < b.high - b.low; });
        if (round == kRounds || widest->high - widest->low <= kFine * smallest) break;
        const double middle = widest->low + (widest->high - widest->low) / 2;
        const Piece left{widest->low, middle, least_sum(middle)};
        bound = std::min(bound, left.sum_at_high + weight * middle);
        widest->low = middle;
        pieces.push_back(left);
    }
    Range range{kInf, 0, bound};
    for (const Piece& p : pieces) {
        range.low = std::min(range.low, p.low);
        range.high = std::max(range.high, p.high);
    }
    return range;
}

// What a suffix of the chain may cost: a point of its Pareto frontier.
struct Point {
    double sum, max;
};

// Frontiers of all suffixes [begin, n) cut into `stages` stages, by growing max and falling sum. A max below
// `range.low` is raised to it: no optimum stays below, so none is changed, and far fewer points differ.
class Frontiers {
  public:
    Frontiers(const Band& band, const Range& range, const Goal& goal)
        : band_(band),
          range_(range),
          window_(band, range.high, goal.stages),
          weight_(goal.microbatches - 1.0) {
        const int n = band.size();
        const Table prefix = least_sums(band, window_, range.high, goal.stages);
        const Table suffix = least_suffix_sums(band, window_, range.high, goal.stages, prefix);
        of_.assign(goal.stages + 1, std::vector<std::vector<Point>>(n + 1));
        of_[0][n].push_back({0, range.low});
        for (int k = 1; k <= goal.stages; ++k) {
            for (int begin = window_.first[k]; begin <= n - k; ++begin) {
                const double before = prefix[goal.stages - k][begin];
                if (objective(before + suffix[k][begin], range.low) <= loosen(range.bound))
                    extend(k, begin, before);
            }
        }
    }

    const std::vector<Point>& of(int stages, int begin) const { return of_[stages][begin]; }
    int end(int begin) const { return window_.end[begin]; }
    double objective(double sum, double max) const { return sum + weight_ * max; }

  private:
    // Merges, for each end of the first stage, what follows it into the frontier so far.
    void extend(int stages, int begin, double prefix_sum) {
        const double limit = loosen(range_.bound) - prefix_sum;
        const double *cost = band_.cost(begin), *total = band_.total(begin);
        std::vector<Point> best;
        for (int e = begin + 1; e <= window_.end[begin]; ++e) {
            const std::vector<Point>& rest = of_[stages - 1][e];
            if (cost[e] > range_.high || rest.empty()) continue;
            added_.clear();
            for (std::size_t i = 0; i < rest.size(); ++i) {
                // The first stage is the slowest up to there: of those only the last, with the least sum,
                // counts.
                if (i + 1 < rest.size() && rest[i + 1].max <= cost[e]) continue;
                const Point p{total[e] + rest[i].sum, std::max(cost[e], rest[i].max)};
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

    const Band& band_;
    const Range range_;
    const Window window_;
    const double weight_;
    std::vector<std::vector<std::vector<Point>>> of_;
    std::vector<Point> added_, merged_;
};

// The lexicographically smallest cuts that reach the best objective, found by trying the first end of each
// stage from which the frontier still reaches it.
std::vector<int> read_cuts(const Band& band, const Frontiers& frontiers, int stages) {
    double best = kInf;
    for (const Point& p : frontiers.of(stages, 0)) best = std::min(best, frontiers.objective(p.sum, p.max));
    std::vector<int> cuts{0};
    std::vector<double> totals;
    double max = 0;
    const auto reaches = [&](double total, double cost, const Point& p) {
        double sum = total + p.sum;
        for (auto it = totals.rbegin(); it != totals.rend(); ++it) sum = *it + sum;
        return frontiers.objective(sum, std::max({max, cost, p.max})) == best;
    };
    for (int k = stages - 1; k > 0; --k) {
        const int begin = cuts.back();
        const double *cost = band.cost(begin), *total = band.total(begin);
        for (int e = begin + 1; e <= frontiers.end(begin); ++e) {
            const std::vector<Point>& rest = frontiers.of(k, e);
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
    const Band band(costs, loosen(cap), goal.memory_limit);
    const Range range = narrow(band, loosen(cap), goal, loosen(start.objective));
    return measure(costs, goal, read_cuts(band, Frontiers(band, range, goal), goal.stages));
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
