#include "ranked.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>

namespace smpar {
namespace {

using Cuts = std::vector<int>;

// A budget is a count, not seconds, so that every rank and machine decides alike.
constexpr long kNodes = 400'000;  // intervals looked at by the branch and bound: some milliseconds
// Closer to perfect balance than this, a better cut cannot be told from noise of the costs.
constexpr double kEnough = 1e-3;
// Rounding allowance: of bounds, and of a memory limit that is met exactly.
constexpr double kSlack = 1e-12;
constexpr std::array<int, 10> kSteps{-1, 1, -2, 2, -3, 3, -5, 5, -8, 8};
constexpr std::size_t kPairSteps = 6;

// Sorts targets, so that uses by one stage are neighbours.
std::vector<Edge> in_order(std::vector<Edge> edges) {
    for (Edge& e : edges) std::sort(e.targets.begin(), e.targets.end());
    return edges;
}

// Adds to `loads` what comes in; expects edges in order.
void add_incoming(const std::vector<Edge>& edges, const std::vector<int>& stage_of,
                  const std::vector<int>& ranks, Incoming& into) {
    for (const Edge& e : edges) {
        const int home = ranks[stage_of[e.source]];
        int paid = -1;
        for (int target : e.targets) {
            const int stage = stage_of[target];
            if (stage == paid || ranks[stage] == home) continue;
            into.seconds[stage] += e.seconds;
            into.count[stage] += 1;
            paid = stage;
        }
    }
}

void number_stages(const std::vector<int>& cuts, std::vector<int>& stage_of) {
    for (std::size_t stage = 0; stage < cuts.size(); ++stage) {
        const auto end = stage + 1 < cuts.size() ? stage_of.begin() + cuts[stage + 1] : stage_of.end();
        std::fill(stage_of.begin() + cuts[stage], end, static_cast<int>(stage));
    }
}

struct Score {
    double excess;  // bytes above the limits, of all ranks
    double objective;
    bool operator<(const Score& other) const {
        return excess != other.excess ? excess < other.excess : objective < other.objective;
    }
};

class Search {
  public:
    explicit Search(const SharedRanks& problem)
        : in_(problem),
          edges_(in_order(problem.edges)),
          stages_(problem.stages()),
          size_(problem.size()),
          ranks_(static_cast<int>(problem.limit.size())),
          per_rank_(static_cast<double>(stages_) / ranks_),
          pace_(problem.microbatches - 1.0 / per_rank_),
          work_(problem.work) {
        const auto prefix = [&](const std::vector<double>& values) {
            std::vector<double> sums{0};
            for (double value : values) sums.push_back(sums.back() + value);
            return sums;
        };
        for (const auto& row : problem.cost) cost_before_.push_back(prefix(row));
        for (const auto& row : problem.memory) memory_before_.push_back(prefix(row));
        rest_.assign(stages_ + 1, std::vector<double>(size_ + 1));
        std::vector<double> least(size_, kInf);
        for (int stage = stages_ - 1; stage >= 0; --stage) {
            for (int unit = size_ - 1; unit >= 0; --unit) {
                least[unit] = std::min(least[unit], problem.cost[stage][unit]);
                rest_[stage][unit] = least[unit] + rest_[stage][unit + 1];
            }
        }
        uses_.resize(size_);
        for (const Edge& e : edges_) {
            add_uses(uses_, nullptr, e.source, e.targets, e.seconds);
            effort_ += 1 + static_cast<long>(e.targets.size());
        }
        for (const Tie& t : problem.ties) effort_ += static_cast<long>(t.units.size()) + ranks_;
        effort_ += size_ + 4 * stages_;
        stage_of_.resize(size_);
        rank_of_.resize(size_);
    }

    RankedCuts run(const Cuts& start) {
        consider(start);
        for (Cuts cuts : {start, even()}) {
            descend(cuts);
            consider(cuts);
        }
        if (!enumerate()) perturb();
        return {best_, best_score_.objective, best_score_.excess};
    }

  private:
    // Of the sum of all stages, the dearest rank and the dearest stage.
    double objective(double sum, double rank, double stage) const {
        return sum / per_rank_ + pace_ * ((1 - in_.evenness) * rank + in_.evenness * per_rank_ * stage);
    }

    double whole(int stage) const { return std::max(cost_before_[stage][size_], 1e-300); }

    // The cost if all `stages` could share the chain as they liked.
    double balanced(const std::vector<int>& stages) const {
        double speed = 0;
        for (int stage : stages) speed += 1 / whole(stage);
        return 1 / speed;
    }

    // Cuts at shares of the chain by speed, each stage at least one unit.
    Cuts even() const {
        std::vector<int> all(stages_);
        std::iota(all.begin(), all.end(), 0);
        const double each = balanced(all);
        double share = 0;
        Cuts cuts{0};
        for (int stage = 1; stage < stages_; ++stage) {
            share += each / whole(stage - 1);
            int unit = cuts.back() + 1;
            const int last = size_ - stages_ + stage;
            while (unit < last && cost_before_[stage][unit] < whole(stage) * share) ++unit;
            cuts.push_back(unit);
        }
        return cuts;
    }

    double tied() {
        double sum = 0;
        for (const Tie& t : in_.ties) {
            held_.assign(ranks_, 0);
            int holders = 0;
            for (int unit : t.units) holders += held_[in_.ranks[stage_of_[unit]]]++ == 0;
            sum += t.seconds * std::max(0, holders - 1);
        }
        return sum;
    }

    Score score(const Cuts& cuts) {
        work_ -= effort_;
        number_stages(cuts, stage_of_);
        into_.seconds.assign(stages_, 0);
        into_.count.assign(stages_, 0);
        add_incoming(edges_, stage_of_, in_.ranks, into_);
        rank_cost_.assign(ranks_, 0);
        rank_memory_.assign(ranks_, 0);
        double sum = 0, excess = 0, dearest = 0;
        for (int stage = 0; stage < stages_; ++stage) {
            const int begin = cuts[stage], end = stage + 1 < stages_ ? cuts[stage + 1] : size_,
                      rank = in_.ranks[stage];
            const double cost =
                cost_before_[stage][end] - cost_before_[stage][begin] +
                (into_.seconds[stage] * in_.rate[stage] + into_.count[stage] * in_.latency[stage]);
            rank_cost_[rank] += cost;
            rank_memory_[rank] += memory_before_[stage][end] - memory_before_[stage][begin];
            sum += cost;
            dearest = std::max(dearest, cost);
        }
        for (int rank = 0; rank < ranks_; ++rank)  // a limit that is met to rounding is met
            if (rank_memory_[rank] > in_.limit[rank] * (1 + kSlack))
                excess += rank_memory_[rank] - in_.limit[rank];
        const double max = *std::max_element(rank_cost_.begin(), rank_cost_.end());
        return {excess, objective(sum, max, dearest) + tied()};
    }

    void consider(const Cuts& cuts) {
        const Score found = score(cuts);
        if (!best_.empty() && !(found < best_score_)) return;
        best_ = cuts;
        best_score_ = found;
    }

    // Moves cuts first..last along the chain, if every stage keeps a unit.
    bool shift(Cuts& cuts, int first, int last, int by) const {
        const int next = last + 1 < stages_ ? cuts[last + 1] : size_;
        if (cuts[first] + by <= cuts[first - 1] || cuts[last] + by >= next) return false;
        for (int i = first; i <= last; ++i) cuts[i] += by;
        return true;
    }

    // Local search. Two moves: a run of cuts together, which hands units from one stage to any other through
    // those between; and two cuts, each its own way.
    void descend(Cuts& cuts) {
        Score now = score(cuts);
        Cuts tried;
        const auto keep = [&](bool possible) {
            if (!possible || work_ < 0) return false;
            const Score found = score(tried);
            if (!(found < now)) return false;
            now = found;
            cuts = tried;
            return true;
        };
        for (bool better = true; better && work_ >= 0;) {
            better = false;
            for (int i = 1; i < stages_; ++i) {
                for (int j = i; j < stages_; ++j) {
                    for (int by : kSteps) {
                        tried = cuts;
                        better |= keep(shift(tried, i, j, by));
                    }
                    for (std::size_t a = 0; j > i && a < kPairSteps * kPairSteps; ++a) {
                        tried = cuts;
                        better |= keep(shift(tried, i, i, kSteps[a / kPairSteps]) &&
                                       shift(tried, j, j, kSteps[a % kPairSteps]));
                    }
                }
            }
        }
    }

    // Iterated local search: throws a few cuts of the best elsewhere and descends again.
    void perturb() {
        std::vector<int> all(stages_), first(ranks_);
        for (int stage = stages_ - 1; stage >= 0; --stage) first[in_.ranks[stage]] = all[stage] = stage;
        const double ideal = objective(rest_[0][0], balanced(first), balanced(all));
        std::uint64_t state = 1;
        const auto random = [&](int below) {  // Knuth's MMIX generator, its upper bits
            state = state * 6364136223846793005u + 1442695040888963407u;
            return static_cast<int>((state >> 33) % static_cast<std::uint64_t>(below));
        };
        while (work_ >= 0 && (best_score_.excess > 0 || best_score_.objective > ideal * (1 + kEnough))) {
            Cuts cuts = best_;
            for (int times = 0; times < 3; ++times) {
                const int i = 1 + random(stages_ - 1);
                const int next = i + 1 < stages_ ? cuts[i + 1] : size_;
                cuts[i] = cuts[i - 1] + 1 + random(next - cuts[i - 1] - 1);
            }
            descend(cuts);
            consider(cuts);
            work_ -= effort_;
        }
    }

    // Branch and bound over all cuts, first stage first; says whether it came to its end.
    bool enumerate() {
        cuts_.clear();
        cost_.assign(ranks_, 0);
        bytes_.assign(ranks_, 0);
        nodes_ = kNodes;
        extend(0, 0, 0, 0);
        return nodes_ > 0;
    }

    void extend(int begin, double sum, double max, double dearest) {
        const int stage = static_cast<int>(cuts_.size()), left = stages_ - stage - 1;
        const int rank = in_.ranks[stage];
        const double cost_before = cost_[rank], bytes_before = bytes_[rank];
        double cost = 0, bytes = 0;
        cuts_.push_back(begin);
        for (int end = begin; end < size_ - left && nodes_ > 0;) {
            --nodes_;
            rank_of_[end] = rank;
            cost += in_.cost[stage][end];
            bytes += in_.memory[stage][end];
            for (const Use& u : uses_[end])
                if (u.enters(begin) && rank_of_[u.source] != rank)
                    cost += u.amount * in_.rate[stage] + in_.latency[stage];
            ++end;
            cost_[rank] = cost_before + cost;
            bytes_[rank] = bytes_before + bytes;
            if (bytes_[rank] > in_.limit[rank] * (1 + kSlack)) break;
            const double slowest = std::max(max, cost_[rank]), stage_max = std::max(dearest, cost);
            const auto hopeless = [&](double all) {
                const double bound =
                    objective(all, std::max(slowest, all / ranks_), std::max(stage_max, all / stages_));
                return best_score_.excess == 0 && bound >= best_score_.objective * (1 - kSlack);
            };
            // As long as this stage may take the rest too, a bound only grows with the interval: hopeless
            // stays so.
            if (hopeless(sum + cost + rest_[stage][end])) break;
            if (hopeless(sum + cost + rest_[stage + 1][end])) continue;
            if (left > 0)
                extend(end, sum + cost, slowest, stage_max);
            else if (end == size_)
                consider(cuts_);
        }
        cuts_.pop_back();
        cost_[rank] = cost_before;
        bytes_[rank] = bytes_before;
    }

    const SharedRanks& in_;
    const std::vector<Edge> edges_;
    const int stages_, size_, ranks_;
    const double per_rank_, pace_;
    std::vector<std::vector<double>> cost_before_, memory_before_;  // [stage][unit]
    std::vector<std::vector<double>>
        rest_;  // [stage][unit]: least cost of the units from there on these stages on
    Uses uses_;
    long effort_ = 0, work_, nodes_ = 0;

    Cuts best_, cuts_;
    Score best_score_{kInf, kInf};
    Incoming into_;
    std::vector<int> stage_of_, rank_of_, held_;
    std::vector<double> rank_cost_, rank_memory_, cost_, bytes_;
};

}  // namespace

RankedCuts cut_ranked(const SharedRanks& problem, const std::vector<int>& start) {
    return Search(problem).run(start);
}

Incoming incoming(const std::vector<Edge>& edges, const std::vector<int>& cuts, const std::vector<int>& ranks,
                  int size) {
    Incoming into{std::vector<double>(cuts.size()), std::vector<double>(cuts.size())};
    std::vector<int> stage_of(size);
    number_stages(cuts, stage_of);
    add_incoming(in_order(edges), stage_of, ranks, into);
    return into;
}

}  // namespace smpar
