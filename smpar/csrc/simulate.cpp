#include "simulate.hpp"

#include <algorithm>
#include <map>
#include <utility>

namespace smpar {

namespace {

constexpr double kNotYet = -1.0;

}  // namespace

Clock::Clock(const Graph& graph, int microbatches)
    : graph_(graph), microbatches_(microbatches), rows_(4 * graph.segments()) {
    const int slots = 3 * graph.segments();
    std::vector<std::vector<int>> into(slots), from(slots);  // needs of a slot, messages that it sends
    std::vector<int> key(graph.needs.size());
    int keys = slots;
    for (std::size_t i = 0; i < graph.needs.size(); ++i) {
        const Need& need = graph.needs[i];
        into[need.after].push_back(static_cast<int>(i));
        if (need.sent) from[need.before].push_back(static_cast<int>(i));
        key[i] = need.sent ? keys++ : need.before;
    }
    keys_ = keys;
    std::map<std::pair<int, int>, int> channels;  // (sender, receiver)
    for (int task = 0; task < static_cast<int>(rows_.size()); ++task) {
        Row& row = rows_[task];
        row.cost = graph.cost(task >> 2, static_cast<Kind>(task & 3));
        row.slot = slot_of(task);
        row.inputs = static_cast<int>(inputs_.size());
        for (const bool sent : {true, false}) {
            for (int i : into[row.slot])
                if (graph.needs[i].sent == sent) inputs_.push_back({key[i], graph.needs[i].before});
            if (sent) row.received = static_cast<int>(inputs_.size());
        }
        row.inputs_end = static_cast<int>(inputs_.size());
        row.messages = static_cast<int>(messages_.size());
        for (int i : from[row.slot]) {
            const Need& need = graph.needs[i];
            const int sender = graph.rank[need.before / 3], receiver = graph.rank[need.after / 3];
            const int fresh = static_cast<int>(channels.size());
            const int channel = channels.emplace(std::make_pair(sender, receiver), fresh).first->second;
            messages_.push_back({key[i], need.before, receiver, need.wire, need.latency, channel});
        }
        row.messages_end = static_cast<int>(messages_.size());
    }
    channels_.resize(channels.size());
    ranks_.resize(graph.ranks);
}

// Runs one rank until it waits. False: an action was done before, or ends after the limit.
template <bool kAll>
bool Clock::advance(const Order& order, int number, Times& times) {
    Rank& rank = ranks_[number];
    const std::vector<Action>& actions = order[number];
    const double host = graph_.host;
    for (; rank.at < static_cast<int>(actions.size()); ++rank.at) {
        const Action now = actions[rank.at];
        const Row& row = rows_[now.task];
        const std::size_t base = static_cast<std::size_t>(now.microbatch) * keys_;
        double* done = done_.data() + base;
        for (int i = row.inputs; i < row.inputs_end; ++i)
            if (done[inputs_[i].key] < 0) {
                rank.awaited = base + inputs_[i].key + 1;
                return true;
            }
        double start = rank.free;  // moves on while it takes its messages in turn
        for (int i = row.inputs; i < row.received; ++i) {
            const double arrival = done[inputs_[i].key];
            if (arrival > start) {
                if (kAll) times.waiting[number] += arrival - std::max(start, done[inputs_[i].before]);
                start = arrival;
            }
            start += host;
        }
        const double end = start + row.cost;
        if (done[row.slot] >= 0 || end > limit_) return false;
        done[row.slot] = end;
        if constexpr (kAll) {
            const int segment = now.segment(), stage = graph_.stage[segment];
            const Kind kind = now.kind();
            if (rank.at == 0) times.first_start[number] = start;
            times.busy[number] += row.cost;
            times.seconds = std::max(times.seconds, end);
            if (kind == kForward) {
                rank.bytes += graph_.saved[segment];
                times.peak_bytes[number] = std::max(times.peak_bytes[number], rank.bytes);
                times.peak_count[number] = std::max(times.peak_count[number], ++rank.count);
                times.in_flight[stage] = std::max(times.in_flight[stage], ++now_in_flight_[stage]);
            }
            if (kind == kForward ? !graph_.training : kind != kInputs) {
                rank.bytes -= graph_.saved[segment];
                --rank.count;
                --now_in_flight_[stage];
                if (kind != kForward) times.last_backward[stage] = std::max(times.last_backward[stage], end);
            }
            if (!offset_.empty()) {
                times.start[offset_[number] + rank.at] = start;
                times.end[offset_[number] + rank.at] = end;
            }
        } else {
            times.seconds = std::max(times.seconds, end);
        }
        rank.free = end;
        for (int i = row.messages; i < row.messages_end; ++i) {
            const Message& message = messages_[i];
            rank.free += host;
            double& channel = channels_[message.channel];
            channel = std::max(rank.free, channel) + message.wire;
            done[message.key] = channel + message.latency;
            Rank& receiver = ranks_[message.receiver];
            if (receiver.awaited == base + message.key + 1) {
                receiver.awaited = 0;
                runnable_.push_back(message.receiver);
            }
        }
    }
    return true;
}

template <bool kAll>
void Clock::run_all(const Order& order, Times& times) {
    done_.assign(static_cast<std::size_t>(keys_) * microbatches_, kNotYet);
    std::fill(channels_.begin(), channels_.end(), 0.0);
    std::fill(ranks_.begin(), ranks_.end(), Rank{});
    runnable_.clear();
    for (int rank = graph_.ranks - 1; rank >= 0; --rank) runnable_.push_back(rank);
    while (!runnable_.empty()) {
        const int rank = runnable_.back();
        runnable_.pop_back();
        if (!advance<kAll>(order, rank, times)) return;
    }
    times.ended = true;
    for (int rank = 0; rank < graph_.ranks; ++rank)
        times.ended = times.ended && ranks_[rank].at == static_cast<int>(order[rank].size());
}

Times Clock::run(const Order& order, bool record) {
    Times times;
    times.last_backward.assign(graph_.stages, 0.0);
    times.in_flight.assign(graph_.stages, 0);
    now_in_flight_.assign(graph_.stages, 0);
    times.first_start.assign(graph_.ranks, 0.0);
    times.busy.assign(graph_.ranks, 0.0);
    times.waiting.assign(graph_.ranks, 0.0);
    times.peak_bytes.assign(graph_.ranks, 0);
    times.peak_count.assign(graph_.ranks, 0);
    offset_.clear();
    if (record) {
        std::size_t count = 0;
        for (const auto& actions : order) {
            offset_.push_back(count);
            count += actions.size();
        }
        times.start.resize(count);
        times.end.resize(count);
    }
    limit_ = std::numeric_limits<double>::infinity();
    run_all<true>(order, times);
    for (const Rank& rank : ranks_) times.at.push_back(rank.at);
    return times;
}

double Clock::makespan(const Order& order, double limit) {
    Times times;
    limit_ = limit;
    run_all<false>(order, times);
    return times.ended ? times.seconds : std::numeric_limits<double>::infinity();
}

}  // namespace smpar
