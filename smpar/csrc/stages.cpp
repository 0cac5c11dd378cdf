#include "stages.hpp"

#include <algorithm>
#include <map>
#include <tuple>

#include "ranked.hpp"

namespace smpar {
namespace {

// Effort, counted and not timed, so that every machine takes the same path.
constexpr int kRoughRounds = 8;          // of narrowing with the roughest costs
constexpr int kRounds = 24;              // of narrowing with relaxed costs
constexpr int kExactRounds = 4;          // of narrowing with true costs, at most,
constexpr long kExactWork = 20'000'000;  // and no more than look at so many intervals
constexpr long kSharedWork = 9'000'000;  // additions of the local search where ranks are shared
// Relaxed costs are differences of prefix sums: their rounding is relative to the whole chain.
constexpr double kPrefixSlack = 1e-11;

using Ends = std::vector<std::vector<int>>;      // [stage][begin]: intervals up to this end
using Table = std::vector<std::vector<double>>;  // [stages][layer]

// What enters an interval when it grows over a layer, and sums along that growth: in the order of the Python
// twin, so that both round alike.
class Traffic {
  public:
    explicit Traffic(const Layers& layers) : uses_(layers.size()) {
        for (const Tensor& t : layers.tensors) add_uses(uses_, nullptr, t.source, t.targets, t.bytes);
    }

    // Of the intervals [begin, begin + 1), ..., [begin, end): bytes and number of tensors that come in.
    void row(int begin, int end, std::vector<double>& bytes, std::vector<double>& count) const {
        bytes.clear();
        count.clear();
        double sum = 0, tensors = 0;
        for (int layer = begin; layer < end; ++layer) {
            for (const Use& u : uses_[layer]) {
                if (!u.enters(begin)) continue;
                sum += u.amount;
                tensors += 1;
            }
            bytes.push_back(sum);
            count.push_back(tensors);
        }
    }

    const std::vector<Use>& uses(int layer) const { return uses_[layer]; }

    // Whether a tensor jumps over a layer.
    bool skips() const {
        for (int layer = 0; layer < static_cast<int>(uses_.size()); ++layer)
            for (const Use& u : uses_[layer])
                if (u.enters(layer - 1)) return true;
        return false;
    }

  private:
    Uses uses_;
};

void fold_row(const std::vector<double>& values, int begin, int end, std::vector<double>& sums) {
    sums.clear();
    double sum = 0;
    for (int i = begin; i < end; ++i) sums.push_back(sum += values[i]);
}

double stage_time(const Place& at, double computing, double bytes, double count) {
    return computing + (bytes * at.seconds_per_byte + count * at.latency);
}

double stage_memory(const Place& at, double state, double saved) {
    return state + at.in_flight * saved + at.transient;
}

// The largest ends that each stage's memory allows.
Ends fitting(const Layers& layers, const std::vector<Place>& places) {
    const int n = layers.size();
    using Key = std::tuple<double, double, double>;
    std::map<Key, std::vector<int>> known;
    for (const Place& p : places) known[{p.in_flight, p.transient, p.limit}].resize(n);
    std::vector<double> state, saved;
    for (int begin = 0; begin < n; ++begin) {
        fold_row(layers.state, begin, n, state);
        fold_row(layers.saved, begin, n, saved);
        for (auto& [key, ends] : known) {
            const Place at{0, 0, 0, std::get<0>(key), std::get<1>(key), std::get<2>(key)};
            int low = 0, high = n - begin;  // so many layers fit, so many at most
            while (low < high) {
                const int middle = (low + high + 1) / 2;
                if (stage_memory(at, state[middle - 1], saved[middle - 1]) <= at.limit)
                    low = middle;
                else
                    high = middle - 1;
            }
            ends[begin] = begin + low;
        }
    }
    Ends ends;
    for (const Place& p : places) ends.push_back(known[{p.in_flight, p.transient, p.limit}]);
    return ends;
}

// Any cuts that fit, or none if there are no such.
std::vector<int> any_cuts(const Ends& ends, int n) {
    const int stages = static_cast<int>(ends.size());
    std::vector<std::vector<int>> from(stages + 1, std::vector<int>(n + 1, -1));  // begin of the last stage
    from[0][0] = 0;
    for (int k = 1; k <= stages; ++k) {
        int best = -1;  // of the begins so far the one that reaches farthest
        for (int e = 1; e <= n; ++e) {
            const int begin = e - 1;
            if (from[k - 1][begin] >= 0 && (best < 0 || ends[k - 1][begin] > ends[k - 1][best])) best = begin;
            if (best >= 0 && ends[k - 1][best] >= e) from[k][e] = best;
        }
    }
    if (from[stages][n] < 0) return {};
    std::vector<int> cuts(stages);
    for (int k = stages, end = n; k > 0; --k) end = cuts[k - 1] = from[k][end];
    return cuts;
}

StageCuts measure(const Layers& layers, const Traffic& traffic, const std::vector<Place>& places,
                  int microbatches, std::vector<int> cuts) {
    const int stages = static_cast<int>(places.size());
    StageCuts result{std::move(cuts), 0, std::vector<double>(stages), std::vector<double>(stages), true};
    std::vector<double> computing, bytes, count, state, saved;
    double sum = 0, max = 0;
    for (int k = stages - 1; k >= 0; --k) {
        const int begin = result.cuts[k], end = k + 1 < stages ? result.cuts[k + 1] : layers.size();
        fold_row(layers.times[places[k].device_class], begin, end, computing);
        fold_row(layers.state, begin, end, state);
        fold_row(layers.saved, begin, end, saved);
        traffic.row(begin, end, bytes, count);
        result.stage_time[k] = stage_time(places[k], computing.back(), bytes.back(), count.back());
        result.stage_memory[k] = stage_memory(places[k], state.back(), saved.back());
        sum = result.stage_time[k] + sum;
        max = std::max(max, result.stage_time[k]);
        result.fits = result.fits && result.stage_memory[k] <= places[k].limit;
    }
    result.seconds = sum + (microbatches - 1.0) * max;
    return result;
}

// The problem with each stage charged only for the tensors that its first layer uses, and those that no
// interval within `reach` could hold the source of: a stage then costs after(end) - before(begin), so that
// the least sums of all prefixes and suffixes take a step per stage and layer. It is a lower bound, and exact
// for a chain without skips.
class Relaxed {
  public:
    Relaxed(const Layers& layers, const Traffic& traffic, const std::vector<Place>& places, Ends reach)
        : reach_(std::move(reach)),
          n_(layers.size()),
          stages_(static_cast<int>(places.size())),
          queue_(n_ + 1) {
        double largest = 0;
        for (int stage = 0; stage < stages_; ++stage) {
            const Place& at = places[stage];
            std::vector<double> before{0}, entry;
            int first = 0;  // of the intervals that hold the layer
            for (int layer = 0; layer < n_; ++layer) {
                while (first < layer && reach_[stage][first] <= layer) ++first;
                double bytes = 0, count = 0, first_bytes = 0, first_count = 0;
                for (const Use& u : traffic.uses(layer)) {
                    (u.enters(first) ? bytes : first_bytes) += u.amount;
                    (u.enters(first) ? count : first_count) += 1;
                }
                before.push_back(before.back() +
                                 stage_time(at, layers.times[at.device_class][layer], bytes, count));
                entry.push_back(stage_time(at, 0, first_bytes, first_count));
                largest = std::max(largest, entry.back());
            }
            largest = std::max(largest, before.back());
            before_.push_back(std::move(before));
            entry_.push_back(std::move(entry));
        }
        slack_ = kPrefixSlack * largest;
    }

    double slack() const { return slack_; }

    // The largest ends of intervals that cost at most `cap`; never falling, which may allow more.
    Ends window(double cap) const {
        Ends ends;
        for (int stage = 0; stage < stages_; ++stage) {
            const std::vector<double>&before = before_[stage], &entry = entry_[stage];
            ends.emplace_back(n_);
            int end = 0;
            for (int begin = 0; begin < n_; ++begin) {
                end = std::max(end, begin);
                const double reach = cap + slack_ - entry[begin] + before[begin];
                while (end < reach_[stage][begin] && before[end + 1] <= reach) ++end;
                ends.back()[begin] = end;
            }
        }
        return ends;
    }

    // Least sums of prefixes: the first so many stages end before the layer.
    Table prefixes(const Ends& ends) {
        Table sums(stages_ + 1, std::vector<double>(n_ + 1, kInf));
        sums[0][0] = 0;
        from_.assign(stages_ + 1, std::vector<int>(n_ + 1, -1));
        std::vector<double> value(n_ + 1);
        for (int k = 1; k <= stages_; ++k) {
            const std::vector<double>&before = before_[k - 1], &entry = entry_[k - 1];
            std::size_t head = 0, tail = 0;  // begins by growing value, the least of those that still reach
            for (int e = 1; e <= n_; ++e) {
                const int begin = e - 1;
                value[begin] = sums[k - 1][begin] - before[begin] + entry[begin];
                if (value[begin] < kInf) {
                    while (tail > head && value[queue_[tail - 1]] >= value[begin]) --tail;
                    queue_[tail++] = begin;
                }
                while (head < tail && ends[k - 1][queue_[head]] < e) ++head;
                if (head == tail) continue;
                from_[k][e] = queue_[head];
                sums[k][e] = value[queue_[head]] + before[e];
            }
        }
        return sums;
    }

    // The cuts of the whole chain that the last call of `prefixes` found, or none.
    std::vector<int> cuts() const {
        if (from_[stages_][n_] < 0) return {};
        std::vector<int> cuts(stages_);
        for (int k = stages_, end = n_; k > 0; --k) end = cuts[k - 1] = from_[k][end];
        return cuts;
    }

    // Least sums of suffixes: the last so many stages begin at the layer.
    Table suffixes(const Ends& ends) {
        Table sums(stages_ + 1, std::vector<double>(n_ + 1, kInf));
        sums[0][n_] = 0;
        std::vector<double> value(n_ + 1);
        for (int k = 1; k <= stages_; ++k) {
            const int stage = stages_ - k;
            const std::vector<double>&before = before_[stage], &entry = entry_[stage];
            std::size_t head = 0, tail = 0;  // ends
            for (int begin = n_ - 1; begin >= 0; --begin) {
                const int e = begin + 1;
                value[e] = sums[k - 1][e] + before[e];
                if (value[e] < kInf) {
                    while (tail > head && value[queue_[tail - 1]] >= value[e]) --tail;
                    queue_[tail++] = e;
                }
                while (head < tail && queue_[head] > ends[stage][begin]) ++head;
                if (head < tail) sums[k][begin] = value[queue_[head]] - before[begin] + entry[begin];
            }
        }
        return sums;
    }

  private:
    Ends reach_;
    int n_, stages_;
    std::vector<std::vector<double>> before_;  // [stage][layer]: seconds of the layers before it
    std::vector<std::vector<double>>
        entry_;  // [stage][begin]: seconds of further tensors its first layer uses
    double slack_ = 0;
    std::vector<int> queue_;
    Ends from_;
};

// Which intervals the optimum may use.
struct Candidates {
    Ends ends;
    Range range;
};

Candidates candidates(const Layers& layers, const Traffic& traffic, const std::vector<Place>& places,
                      const Ends& fit, double weight, double bound,
                      const std::function<double(const std::vector<int>&)>& objective) {
    const int stages = static_cast<int>(fit.size()), n = static_cast<int>(fit[0].size());
    const auto narrow = [&](Relaxed& relaxed, double low, double high, int rounds) -> std::vector<Piece> {
        const auto least_sum = [&](double at) {
            const double sum = relaxed.prefixes(relaxed.window(at)).back().back();
            if (const std::vector<int> cuts = relaxed.cuts(); !cuts.empty())
                bound = std::min(bound, loosen(objective(cuts)));
            return std::max(0.0, sum - relaxed.slack());
        };
        const double sum = least_sum(high);
        if (weight == 0)
            return {{bound, bound, sum}};  // max(cost) does not count: all are raised to its bound
        low = std::max(low, sum / stages * (1 - kSlack));
        return halve({low, std::min(high, loosen((bound - sum) / weight)), sum}, weight, bound, rounds,
                     least_sum);
    };
    Relaxed relaxed(layers, traffic, places, fit);
    std::vector<Piece> pieces = narrow(relaxed, 0, bound, traffic.skips() ? kRoughRounds : kRounds);
    if (traffic.skips()) {
        double low = kInf, high = 0;
        for (const Piece& p : pieces) {
            low = std::min(low, p.low);
            high = std::max(high, p.high);
        }
        relaxed = Relaxed(layers, traffic, places, relaxed.window(high));
        pieces = narrow(relaxed, weight > 0 ? low : 0, high, kRounds);
    }
    Candidates found{Ends(stages, std::vector<int>(n)), {kInf, 0, bound}};
    for (int stage = 0; stage < stages; ++stage)
        for (int begin = 0; begin < n; ++begin) found.ends[stage][begin] = begin;
    for (const Piece& p : pieces) {
        found.range.low = std::min(found.range.low, p.low);
        found.range.high = std::max(found.range.high, p.high);
        const Ends window = relaxed.window(p.high);
        const Table prefix = relaxed.prefixes(window), suffix = relaxed.suffixes(window);
        const auto hopeful = [&](int k, int layer) {
            return prefix[k][layer] + suffix[stages - k][layer] + weight * p.low <= bound + relaxed.slack();
        };
        for (int stage = 0; stage < stages; ++stage) {
            std::vector<int> last(n + 1, -1);  // [layer]: the last hopeful cut up to it
            for (int layer = 1; layer <= n; ++layer)
                last[layer] = hopeful(stage + 1, layer) ? layer : last[layer - 1];
            for (int begin = 0; begin < n; ++begin) {
                if (!hopeful(stage, begin)) continue;
                int& end = found.ends[stage][begin];
                end = std::max(end, last[std::min(window[stage][begin], fit[stage][begin])]);
            }
        }
    }
    return found;
}

// Costs by place, as far as stages look at them.
class Bands {
  public:
    Bands(const Layers& layers, const Traffic& traffic, const std::vector<Place>& places, const Ends& ends) {
        std::vector<int> all(layers.size(), 0);
        for (std::size_t stage = 0; stage < places.size(); ++stage) {
            Band& band = bands_[key(places[stage])];
            band.end.resize(layers.size());
            for (int begin = 0; begin < layers.size(); ++begin) {
                band.end[begin] = std::max({band.end[begin], begin, ends[stage][begin]});
                all[begin] = std::max(all[begin], band.end[begin]);
            }
        }
        for (auto& [key, band] : bands_) {
            std::size_t size = 0;
            for (int begin = 0; begin < layers.size(); ++begin) size += band.end[begin] - begin;
            band.costs.reserve(size);
        }
        std::vector<std::vector<double>> computing(layers.times.size());
        std::vector<double> bytes, count;
        for (int begin = 0; begin < layers.size(); ++begin) {
            for (auto& [key, band] : bands_)
                band.offset.push_back(static_cast<std::ptrdiff_t>(band.costs.size()));
            if (all[begin] <= begin) continue;
            traffic.row(begin, all[begin], bytes, count);
            for (std::size_t c = 0; c < computing.size(); ++c)
                fold_row(layers.times[c], begin, all[begin], computing[c]);
            for (auto& [key, band] : bands_) {
                const auto& [device_class, seconds_per_byte, latency] = key;
                const Place at{device_class, seconds_per_byte, latency, 0, 0, 0};
                const std::vector<double>& seconds = computing[device_class];
                for (int i = 0; i < band.end[begin] - begin; ++i)
                    band.costs.push_back(stage_time(at, seconds[i], bytes[i], count[i]));
            }
        }
    }

    const Band& of(const Place& at) const { return bands_.at(key(at)); }

  private:
    using Key = std::tuple<int, double, double>;
    static Key key(const Place& at) { return {at.device_class, at.seconds_per_byte, at.latency}; }
    std::map<Key, Band> bands_;
};

}  // namespace

std::optional<StageCuts> cut_stages(const Layers& layers, const std::vector<Place>& places,
                                    int microbatches) {
    const int n = layers.size(), stages = static_cast<int>(places.size());
    const double weight = microbatches - 1.0;
    const Traffic traffic(layers);
    const Ends fit = fitting(layers, places);
    std::vector<int> start = any_cuts(fit, n);
    if (start.empty()) return std::nullopt;

    const auto objective = [&](const std::vector<int>& cuts) {
        const StageCuts found = measure(layers, traffic, places, microbatches, cuts);
        return found.fits ? found.seconds : kInf;
    };
    Candidates found = candidates(layers, traffic, places, fit, weight, loosen(objective(start)), objective);
    const Bands bands(layers, traffic, places, found.ends);
    Lanes lanes;
    long work = 1;
    for (int stage = 0; stage < stages; ++stage) {
        lanes.push_back({&bands.of(places[stage]), &found.ends[stage]});
        for (int begin = 0; begin < n; ++begin) work += found.ends[stage][begin] - begin;
    }
    const long rounds = std::clamp<long>(kExactWork / work - 3, 0, kExactRounds);
    found.range = narrow(lanes, weight, found.range, static_cast<int>(rounds));
    return measure(layers, traffic, places, microbatches, best_cuts(lanes, weight, found.range));
}

StageCuts cut_shared(const Layers& layers, const std::vector<Place>& places, int microbatches,
                     const std::vector<int>& ranks, double evenness) {
    SharedRanks shared{};
    shared.ranks = ranks;
    shared.microbatches = microbatches;
    shared.evenness = evenness;
    shared.work = kSharedWork;
    for (const Tensor& t : layers.tensors) shared.edges.push_back({t.source, t.targets, t.bytes});
    std::vector<Place> free =
        places;  // a limit per rank forbids cuts that one per stage allows, and vice versa
    std::vector<double> transient(1 + *std::max_element(ranks.begin(), ranks.end()));
    shared.limit.resize(transient.size());
    for (std::size_t k = 0; k < places.size(); ++k) {
        const Place& at = places[k];
        free[k].limit = kInf;
        shared.cost.push_back(layers.times[at.device_class]);
        shared.memory.emplace_back();
        for (int i = 0; i < layers.size(); ++i)
            shared.memory[k].push_back(layers.state[i] + at.in_flight * layers.saved[i]);
        shared.rate.push_back(at.seconds_per_byte);
        shared.latency.push_back(at.latency);
        transient[ranks[k]] = std::max(transient[ranks[k]], at.transient);
        shared.limit[ranks[k]] = at.limit - transient[ranks[k]];
    }
    RankedCuts found = cut_ranked(shared, cut_stages(layers, free, microbatches)->cuts);
    if (found.excess > 0) {  // so tight that the cuts which spread memory best have to be the start
        SharedRanks bytes = shared;
        bytes.edges.clear();
        bytes.microbatches = std::numeric_limits<int>::max();
        bytes.evenness = 0;
        bytes.limit.assign(shared.limit.size(), kInf);
        for (std::size_t k = 0; k < places.size(); ++k)
            for (int i = 0; i < layers.size(); ++i)
                bytes.cost[k][i] = shared.memory[k][i] / std::max(shared.limit[ranks[k]], 1.0);
        found = cut_ranked(shared, cut_ranked(bytes, found.cuts).cuts);
    }
    StageCuts result = measure(layers, Traffic(layers), places, microbatches, found.cuts);
    const Incoming into = incoming(shared.edges, found.cuts, ranks, layers.size());
    for (std::size_t k = 0; k < places.size(); ++k) {
        const int end = k + 1 < places.size() ? found.cuts[k + 1] : layers.size();
        double computing = 0;
        for (int i = found.cuts[k]; i < end; ++i) computing += shared.cost[k][i];
        result.stage_time[k] = stage_time(places[k], computing, into.seconds[k], into.count[k]);
    }
    result.seconds = found.objective;
    result.fits = found.excess == 0;
    return result;
}

// Bisection by what all limits are raised; it ends because each try that fits lowers the upper end to an
// excess that occurs.
Excess least_excess(const Layers& layers, const std::vector<Place>& places) {
    const auto excess = [&](std::vector<int> cuts) {
        const StageCuts found = measure(layers, Traffic(layers), places, 1, std::move(cuts));
        Excess worst{found.cuts, 0, -kInf};
        for (std::size_t k = 0; k < places.size(); ++k) {
            const double bytes = found.stage_memory[k] - places[k].limit;
            if (bytes > worst.bytes) worst = {found.cuts, static_cast<int>(k), bytes};
        }
        return worst;
    };
    const auto raised = [&](double by) {
        std::vector<Place> more = places;
        for (Place& p : more) p.limit += by;
        return any_cuts(fitting(layers, more), layers.size());
    };
    Excess best = excess(raised(kInf));
    double low = -kInf;
    for (const Place& p : places) low = std::max(low, p.transient - p.limit);
    for (;;) {
        const double middle = low + (best.bytes - low) / 2;
        if (!(low < middle && middle < best.bytes)) return best;
        std::vector<int> cuts = raised(middle);
        Excess found = cuts.empty() ? best : excess(std::move(cuts));
        if (found.bytes < best.bytes)
            best = std::move(found);
        else
            low = middle;
    }
}

}  // namespace smpar
