#include "ranked.hpp"

#include <algorithm>
#include <array>
#include <cstdint>

namespace smpar {
namespace {

using Cuts = std::vector<int>;

// Budgets are counts, not seconds, so that every rank and machine decides alike.
constexpr long kNodes = 400'000;    // intervals looked at by the branch and bound: some milliseconds
constexpr long kWork = 60'000'000;  // additions of the local search: less than a tenth of a second
// Closer to perfect balance than this, a better cut cannot be told from noise of the costs.
constexpr double kEnough = 1e-3;
// Rounding allowance: of bounds, and of a memory limit that is met exactly.
constexpr double kSlack = 1e-12;
constexpr std::array<int, 10> kSteps{-1, 1, -2, 2, -3, 3, -5, 5, -8, 8};
constexpr std::size_t kPairSteps = 6;

struct Score {
    double excess;  // bytes above the memory limit, of all ranks
    double objective;
    bool operator<(const Score& other) const {
        return excess != other.excess ? excess < other.excess : objective < other.objective;
    }
};

class Search {
  public:
    Search(const Chain& chain, const Costs& costs, const Goal& goal)
        : costs_(costs),
          goal_(goal),
          ties_(chain.ties),
          edges_(chain.edges),
          size_(chain.size()),
          ranks_(1 + *std::max_element(goal.ranks.begin(), goal.ranks.end())),
          per_rank_(static_cast<double>(goal.stages) / ranks_),
          pace_(goal.microbatches - 1.0 / per_rank_),
          time_(chain.time),
          memory_(chain.memory) {
        const auto prefix = [&](const std::vector<double>& values) {
            std::vector<double> sums{0};
            for (double value : values) sums.push_back(sums.back() + value);
            return sums;
        };
        time_before_ = prefix(time_);
        memory_before_ = prefix(memory_);
        for (Edge& e : edges_) {
            std::sort(e.targets.begin(), e.targets.end());
            effort_ += 1 + static_cast<long>(e.targets.size());
        }
        for (const Tie& t : ties_) effort_ += static_cast<long>(t.units.size()) + ranks_;
        effort_ += size_ + 4 * goal.stages;
        stage_of_.resize(size_);
        rank_of_.resize(size_);
    }

    std::optional<Partition> run(const Cuts& start) {
        consider(start);
        for (Cuts cuts : {start, even()}) {
            descend(cuts);
            consider(cuts);
        }
        if (!enumerate()) perturb();
        if (best_score_.excess > 0) return std::nullopt;
        return measure(best_);
    }

  private:
    struct Loads {
        std::vector<double> time, memory;  // of stages
        double tied = 0;                   // seconds
    };

    // Of the sum of all stages, the dearest rank and the dearest stage.
    double objective(double sum, double rank, double stage) const {
        return sum / per_rank_ + pace_ * ((1 - goal_.evenness) * rank + goal_.evenness * per_rank_ * stage);
    }

    // Cuts at equal shares of the plain cost, each stage at least one unit.
    Cuts even() const {
        const double whole = costs_.plain(time_before_[size_], memory_before_[size_]);
        Cuts cuts{0};
        for (int stage = 1; stage < goal_.stages; ++stage) {
            int unit = cuts.back() + 1;
            const int last = size_ - goal_.stages + stage;
            while (unit < last &&
                   costs_.plain(time_before_[unit], memory_before_[unit]) < whole * stage / goal_.stages)
                ++unit;
            cuts.push_back(unit);
        }
        return cuts;
    }

    // What stages pay beyond their units' times, into `loads`.
    void add_transfers(const Cuts& cuts, Loads& loads) {
        for (int stage = 0; stage < goal_.stages; ++stage) {
            const int end = stage + 1 < goal_.stages ? cuts[stage + 1] : size_;
            std::fill(stage_of_.begin() + cuts[stage], stage_of_.begin() + end, stage);
        }
        for (const Edge& e : edges_) {
            const int home = goal_.ranks[stage_of_[e.source]];
            int paid = -1;
            for (int target : e.targets) {
                const int stage = stage_of_[target];
                if (stage == paid || goal_.ranks[stage] == home) continue;
                loads.time[stage] += e.seconds;
                paid = stage;
            }
        }
        for (const Tie& t : ties_) {
            held_.assign(ranks_, 0);
            int holders = 0;
            for (int unit : t.units) holders += held_[goal_.ranks[stage_of_[unit]]]++ == 0;
            loads.tied += t.seconds * std::max(0, holders - 1);
        }
    }

    Score score(const Cuts& cuts) {
        work_ -= effort_;
        loads_.time.resize(goal_.stages);
        loads_.memory.resize(goal_.stages);
        loads_.tied = 0;
        for (int stage = 0; stage < goal_.stages; ++stage) {
            const int begin = cuts[stage], end = stage + 1 < goal_.stages ? cuts[stage + 1] : size_;
            loads_.time[stage] = time_before_[end] - time_before_[begin];
            loads_.memory[stage] = memory_before_[end] - memory_before_[begin];
        }
        add_transfers(cuts, loads_);
        return judge(loads_);
    }

    Score judge(const Loads& loads) {
        rank_cost_.assign(ranks_, 0);
        rank_memory_.assign(ranks_, 0);
        double sum = 0, excess = 0, dearest = 0;
        for (int stage = 0; stage < goal_.stages; ++stage) {
            const double cost = costs_.plain(loads.time[stage], loads.memory[stage]);
            rank_cost_[goal_.ranks[stage]] += cost;
            rank_memory_[goal_.ranks[stage]] += loads.memory[stage];
            sum += cost;
            dearest = std::max(dearest, cost);
        }
        for (double bytes : rank_memory_)  // a limit that is met to rounding is met
            if (bytes > goal_.memory_limit * (1 + kSlack)) excess += bytes - goal_.memory_limit;
        const double max = *std::max_element(rank_cost_.begin(), rank_cost_.end());
        return {excess, objective(sum, max, dearest) + costs_.tie_charge(loads.tied)};
    }

    void consider(const Cuts& cuts) {
        const Score found = score(cuts);
        if (!best_.empty() && !(found < best_score_)) return;
        best_ = cuts;
        best_score_ = found;
    }

    // Moves cuts first..last along the chain, if every stage keeps a unit.
    bool shift(Cuts& cuts, int first, int last, int by) const {
        const int next = last + 1 < goal_.stages ? cuts[last + 1] : size_;
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
            for (int i = 1; i < goal_.stages; ++i) {
                for (int j = i; j < goal_.stages; ++j) {
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
        const double whole = costs_.plain(time_before_[size_], memory_before_[size_]);
        const double ideal = objective(whole, whole / ranks_, whole / goal_.stages);
        std::uint64_t state = 1;
        const auto random = [&](int below) {  // Knuth's MMIX generator, its upper bits
            state = state * 6364136223846793005u + 1442695040888963407u;
            return static_cast<int>((state >> 33) % static_cast<std::uint64_t>(below));
        };
        while (work_ >= 0 && (best_score_.excess > 0 || best_score_.objective > ideal * (1 + kEnough))) {
            Cuts cuts = best_;
            for (int times = 0; times < 3; ++times) {
                const int i = 1 + random(goal_.stages - 1);
                const int next = i + 1 < goal_.stages ? cuts[i + 1] : size_;
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
        const int stage = static_cast<int>(cuts_.size()), left = goal_.stages - stage - 1;
        const int rank = goal_.ranks[stage];
        const double cost_before = cost_[rank], bytes_before = bytes_[rank];
        cuts_.push_back(begin);
        Costs::Walk walk(costs_, begin, rank_of_.data(), rank);
        while (walk.end < size_ - left && nodes_ > 0) {
            --nodes_;
            rank_of_[walk.end] = rank;
            walk.grow();
            const double cost = costs_.plain(walk.time + walk.forward, walk.memory);
            const double rest = costs_.plain(time_before_[size_] - time_before_[walk.end],
                                             memory_before_[size_] - memory_before_[walk.end]);
            cost_[rank] = cost_before + cost;
            bytes_[rank] = bytes_before + walk.memory;
            const double slowest = std::max(max, cost_[rank]), all = sum + cost + rest;
            if (bytes_[rank] > goal_.memory_limit * (1 + kSlack)) break;
            // All that enters here only grows with the interval: what is too dear stays so.
            const double stage_max = std::max(dearest, cost);
            const double bound =
                objective(all, std::max(slowest, all / ranks_), std::max(stage_max, all / goal_.stages));
            if (best_score_.excess == 0 && bound >= best_score_.objective * (1 - kSlack)) break;
            if (left > 0)
                extend(walk.end, sum + cost, slowest, stage_max);
            else if (walk.end == size_)
                consider(cuts_);
        }
        cuts_.pop_back();
        cost_[rank] = cost_before;
        bytes_[rank] = bytes_before;
    }

    // As the definition says it: sums from left to right, edges in their order.
    Partition measure(const Cuts& cuts) {
        Loads loads{std::vector<double>(goal_.stages), std::vector<double>(goal_.stages)};
        for (int stage = 0; stage < goal_.stages; ++stage) {
            const int end = stage + 1 < goal_.stages ? cuts[stage + 1] : size_;
            for (int unit = cuts[stage]; unit < end; ++unit) {
                loads.time[stage] += time_[unit];
                loads.memory[stage] += memory_[unit];
            }
        }
        add_transfers(cuts, loads);
        return {cuts, judge(loads).objective, loads.time, loads.memory};
    }

    const Costs& costs_;
    const Goal& goal_;
    const std::vector<Tie>& ties_;
    std::vector<Edge> edges_;
    const int size_, ranks_;
    const double per_rank_, pace_;
    const std::vector<double>&time_, &memory_;
    std::vector<double> time_before_, memory_before_;
    long effort_ = 0, work_ = kWork, nodes_ = 0;

    Cuts best_, cuts_;
    Score best_score_{kInf, kInf};
    Loads loads_;
    std::vector<int> stage_of_, rank_of_, held_;
    std::vector<double> rank_cost_, rank_memory_, cost_, bytes_;
};

}  // namespace

std::optional<Partition> partition_ranked(const Chain& chain, const Costs& costs, const Goal& goal,
                                          const std::vector<int>& start) {
    return Search(chain, costs, goal).run(start);
}

}  // namespace smpar
