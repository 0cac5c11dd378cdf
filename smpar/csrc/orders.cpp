#include "orders.hpp"

#include <algorithm>

#include "filling.hpp"

namespace smpar {

namespace {

constexpr double kDelay = 0.1;  // that of smpar/schedule/zero_bubble.py
constexpr double kEqual = 1 + 1e-6;
constexpr double kNone = std::numeric_limits<double>::infinity();

template <typename Seconds>
Graph make_graph(const Pipeline& p, Seconds seconds) {
    const int stages = p.stages();
    Graph graph{p.size(), stages, p.ranks, {}, p.forward, p.backward, p.weight, p.saved, p.training, {}};
    std::vector<int> last(p.size(), 0);
    for (int s = 0; s < stages; ++s) {
        graph.stage.push_back(s);
        last[p.ranks[s]] = s;
    }
    for (int s = 0; s < stages; ++s) {
        if (s > 0) graph.needs.push_back(seconds(Need{3 * (s - 1), 3 * s, p.crosses(s - 1)}, s - 1, true));
        if (!p.training) continue;
        graph.needs.push_back({3 * last[p.ranks[s]], 3 * s + 1});
        graph.needs.push_back({3 * s + 1, 3 * s + 2});
        if (s + 1 < stages)
            graph.needs.push_back(seconds(Need{3 * (s + 1) + 1, 3 * s + 1, p.crosses(s)}, s, false));
    }
    return graph;
}

// All forwards, or so many ahead of the backwards that follow in turn.
Order whole_backwards(const Pipeline& p, int microbatches, bool drain) {
    Order order(p.size());
    for (int s = 0; s < p.stages(); ++s) {
        const int ahead = drain ? microbatches : std::min(p.stages() - s, microbatches);
        auto& actions = order[p.ranks[s]];
        actions.reserve(2 * static_cast<std::size_t>(microbatches));
        for (int i = 0; i < microbatches + ahead; ++i) {
            if (i >= ahead && p.training) actions.push_back(action(s, kBackward, i - ahead));
            if (i < microbatches) actions.push_back(action(s, kForward, i));
        }
    }
    return order;
}

Order in_groups(const Pipeline& p, int microbatches, const std::vector<int>& groups) {
    const int size = p.size(), chunks = p.stages() / size;
    struct Turn {
        int chunk, microbatch;
    };
    std::vector<Turn> forwards, backwards;
    int first = 0;
    for (int group : groups) {
        for (int chunk = 0; chunk < chunks; ++chunk)
            for (int i = first; i < first + group; ++i) {
                forwards.push_back({chunk, i});
                backwards.push_back({chunks - 1 - chunk, i});
            }
        first += group;
    }
    const int turns = microbatches * chunks, largest = *std::max_element(groups.begin(), groups.end());
    Order order(size);
    for (int rank = 0; rank < size; ++rank) {
        const int ahead = std::min(turns, 2 * (size - 1 - rank) + (chunks - 1) * largest + 1);
        auto& actions = order[rank];
        actions.reserve(2 * static_cast<std::size_t>(turns));
        const auto add = [&](const Turn& turn, Kind kind) {
            actions.push_back(action(turn.chunk * size + rank, kind, turn.microbatch));
        };
        for (int i = 0; i < turns + ahead; ++i) {
            if (i >= ahead && p.training) add(backwards[i - ahead], kBackward);
            if (i < turns) add(forwards[i], kForward);
        }
    }
    return order;
}

std::int64_t sum_of_peaks(const Pipeline& p, const Times& times) {
    const bool counts = std::all_of(p.saved.begin(), p.saved.end(), [](auto bytes) { return bytes == 0; });
    std::int64_t sum = 0;
    for (std::int64_t peak : counts ? times.peak_count : times.peak_bytes) sum += peak;
    return sum;
}

Order interleaved(const Pipeline& p, int microbatches) {
    const int size = p.size(), rounds = std::max(1, microbatches / size), rest = microbatches - rounds * size;
    std::vector<int> larger;
    for (int number = 0; number < rounds; ++number)
        larger.push_back(microbatches / rounds + (number < microbatches % rounds));
    Order second = in_groups(p, microbatches, larger);
    if (rest <= 0) return second;
    std::vector<int> smaller(rounds, size);
    smaller.push_back(rest);
    Order first = in_groups(p, microbatches, smaller);
    const Graph graph = graph_of(p, 0.0);
    Clock clock(graph, microbatches);
    const Times one = clock.run(first, false);
    if (!one.ended) return second;
    const Times other = clock.run(second, false);
    if (!other.ended) return first;
    const bool keep = one.seconds < other.seconds ||
                      (one.seconds == other.seconds && sum_of_peaks(p, one) <= sum_of_peaks(p, other));
    return keep ? first : second;
}

bool same(const Order& a, const Order& b) {
    const auto equal = [](const Action& x, const Action& y) {
        return x.task == y.task && x.microbatch == y.microbatch;
    };
    return std::equal(a.begin(), a.end(), b.begin(), [&](const auto& x, const auto& y) {
        return std::equal(x.begin(), x.end(), y.begin(), y.end(), equal);
    });
}

// A V's order for equal stages: _even_vee of smpar/schedule/zero_bubble.py.
Order even_vee(const Pipeline& p, int microbatches) {
    const int size = p.size(), rounds = std::max(0, microbatches - size);
    Order order(size);
    for (int rank = 0; rank < size; ++rank) {
        const int pair[] = {rank, 2 * size - 1 - rank};
        int done[4][2] = {};
        auto& actions = order[rank];
        actions.reserve(6 * static_cast<std::size_t>(microbatches));
        const auto perform = [&](Kind kind, int which) {
            const bool splits = p.weight[pair[which]] > 0;
            const int microbatch = done[kind][which]++;
            const bool needed = microbatch < microbatches && (kind == kForward || p.training);
            if (!needed || (kind == kWeights && !splits)) return;
            actions.push_back(action(pair[which], kind == kInputs && !splits ? kBackward : kind, microbatch));
        };
        const auto all_of = [&](int which) {
            for (Kind kind : {kForward, kInputs, kWeights}) perform(kind, which);
        };
        const int both = microbatches - std::min(microbatches, std::max(size, microbatches) - rank);
        const int last = microbatches - rounds - both;
        for (int i = 0; i < 2 * (size - rank) - 1; ++i) perform(kForward, 0);
        for (int i = 0; i < rank; ++i)
            for (int which : {1, 0}) perform(kForward, which);
        for (int i = 0; i < size - rank; ++i) all_of(1);
        for (int i = 0; i < rounds; ++i)
            for (int which : {0, 1}) all_of(which);
        for (int i = 0; i < both; ++i)
            for (int which : {0, 1}) perform(kInputs, which);
        for (int i = 0; i < last; ++i) {
            perform(kInputs, 0);
            perform(kWeights, i < both ? 1 : 0);
        }
        for (int which : {1, 0})
            while (done[kWeights][which] < microbatches) perform(kWeights, which);
    }
    return order;
}

// Whether no rank holds more than p microbatches.
bool keeps_few(const Pipeline& p, const Times& times) {
    std::vector<std::int64_t> whole(p.size());
    for (int s = 0; s < p.stages(); ++s) whole[p.ranks[s]] += p.saved[s];
    for (int rank = 0; rank < p.size(); ++rank)
        if (times.peak_bytes[rank] > p.size() * whole[rank]) return false;
    return true;
}

// The fastest of one order per rule, and of another one; of equally fast ones, the one that is fastest when
// messages take a while.
Order fastest(const Pipeline& p, int microbatches, const std::vector<Rule>& rules, Filled other) {
    std::vector<Filled> tries;
    double least = other.end;
    for (const Rule& rule : rules) {
        Filled filled = fill(p, microbatches, rule, least * kEqual);
        const auto equal = [&](const Filled& other) { return same(other.order, filled.order); };
        if (filled.order.empty() || std::any_of(tries.begin(), tries.end(), equal)) continue;
        least = std::min(least, filled.end);
        tries.push_back(std::move(filled));
    }
    if (!other.order.empty()) tries.push_back(std::move(other));
    const double limit = least * kEqual;
    const auto slow = [&](const Filled& filled) { return !(filled.end <= limit); };
    tries.erase(std::remove_if(tries.begin(), tries.end(), slow), tries.end());
    std::size_t best = 0;
    if (tries.size() > 1) {
        const Graph late = graph_of(p, kDelay * mean_task(p));
        Clock with_delay(late, microbatches);
        double end = with_delay.makespan(tries[0].order);
        for (std::size_t i = 1; i < tries.size(); ++i) {
            const double other = with_delay.makespan(tries[i].order, end);
            if (other < end) {
                end = other;
                best = i;
            }
        }
    }
    return std::move(tries[best].order);
}

Order zero_bubble(const Pipeline& p, int microbatches) {
    std::vector<int> as_1f1b;
    for (int s = 0; s < p.stages(); ++s) as_1f1b.push_back(p.stages() - s);
    const std::vector<int> free(p.stages(), microbatches);
    return fastest(p, microbatches, {{as_1f1b, true, 1.0}, {as_1f1b, false, 0.0}, {free, false, 0.0}},
                   {{}, kNone});
}

Order zbv(const Pipeline& p, int microbatches) {
    const std::vector<int> free(p.size(), microbatches);
    const Graph graph = graph_of(p, 0.0);
    Filled even{even_vee(p, microbatches), kNone};
    const Times times = Clock(graph, microbatches).run(even.order, false);
    if (keeps_few(p, times))
        even.end = times.seconds;
    else
        even.order.clear();
    return fastest(p, microbatches,
                   {{free, true, 0.0},
                    {free, false, 0.0},
                    {free, false, 0.6},
                    {free, true, 0.3, 0.05},
                    {free, true, 0.3, 0.2},
                    {free, false, 0.0, 0.3}},
                   std::move(even));
}

}  // namespace

int Pipeline::size() const { return *std::max_element(ranks.begin(), ranks.end()) + 1; }

Graph graph_of(const Pipeline& p) {
    Graph graph = make_graph(p, [&](Need need, int boundary, bool activation) {
        need.wire = (activation ? p.wire_forward : p.wire_backward)[boundary];
        need.latency = (activation ? p.latency_forward : p.latency_backward)[boundary];
        return need;
    });
    graph.host = p.host;
    return graph;
}

Graph graph_of(const Pipeline& p, double delay) {
    return make_graph(p, [&](Need need, int, bool) {
        need.latency = delay;
        return need;
    });
}

Order named_order(const Pipeline& pipeline, const std::string& name, int microbatches) {
    if (name == "zb") return zero_bubble(pipeline, microbatches);
    if (name == "zbv") return zbv(pipeline, microbatches);
    if (name == "interleaved_1f1b") return interleaved(pipeline, microbatches);
    return whole_backwards(pipeline, microbatches, name == "gpipe");
}

}  // namespace smpar
