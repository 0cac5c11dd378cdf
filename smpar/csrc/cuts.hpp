// The kernel of all exact cuts: given what any interval of a chain costs on any stage, the best cuts.
#pragma once

#include <cstddef>
#include <functional>
#include <limits>
#include <vector>

namespace smpar {

inline constexpr double kInf = std::numeric_limits<double>::infinity();

// Rounding allowance of bounds. Bounds only decide what is not looked at, so the slack costs time, never
// a decision.
inline constexpr double kSlack = 1e-9;
inline double loosen(double x) { return x * (1 + kSlack); }

// The costs of the intervals [begin, begin + 1) to [begin, end[begin]), row by row.
struct Band {
    std::vector<double> costs, totals;  // a total may hold charges that set no pace; none: they are the costs
    std::vector<std::ptrdiff_t> offset;
    std::vector<int> end;

    const double* cost(int begin) const { return costs.data() + offset[begin] - begin - 1; }  // [end]
    const double* total(int begin) const {                                                    // [end]
        return (totals.empty() ? costs : totals).data() + offset[begin] - begin - 1;
    }
};

// A stage: what its intervals cost, and which of them to look at: those up to end[begin], at most the band's.
struct Lane {
    const Band* band;
    const std::vector<int>* end;
};
using Lanes = std::vector<Lane>;  // [stage]

// The range in which the max(cost) of every optimum lies, and an upper bound of the objective.
struct Range {
    double low, high, bound;
};

// A part of that range; `sum`: the least sum(total) if no stage costs more than `high`.
struct Piece {
    double low, high, sum;
};

// For max(cost) in a piece the objective is at least sum + weight * low: halves the widest piece, so many
// times, and drops those that cannot hold an optimum. `least_sum` may lower `bound` when it finds better
// cuts.
std::vector<Piece> halve(Piece whole, double weight, const double& bound, int rounds,
                         const std::function<double(double)>& least_sum);

// A smaller range. Looks `rounds` + 3 times at all intervals.
Range narrow(const Lanes& lanes, double weight, Range range, int rounds);

// The cuts that minimise sum(total) + weight * max(cost), the sum taken from the last stage to the first; of
// equals the lexicographically smallest. The range must hold the optimum.
std::vector<int> best_cuts(const Lanes& lanes, double weight, const Range& range);

}  // namespace smpar
