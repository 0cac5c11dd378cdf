// A schedule on a simulated clock, with messages on channels between ranks.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

namespace smpar {

enum Kind : int { kForward = 0, kBackward = 1, kInputs = 2, kWeights = 3 };

// An action of a rank's timetable.
struct Action {
    std::int32_t task;  // 4 * segment + kind
    std::int32_t microbatch;
    int segment() const { return task >> 2; }
    Kind kind() const { return static_cast<Kind>(task & 3); }
};

inline Action action(int segment, Kind kind, int microbatch) { return {4 * segment + kind, microbatch}; }

using Order = std::vector<std::vector<Action>>;  // rank -> its actions

// What an action leaves behind: a forward 3s, a backward of inputs (B or I) 3s + 1, a W 3s + 2.
inline int slot_of(int task) {
    const int kind = task & 3;
    return 3 * (task >> 2) + (kind == kWeights ? 2 : kind != kForward);
}

// Of one microbatch: `after` starts when `before` has ended and, if `sent`, its message has arrived.
struct Need {
    int before, after;  // slots
    bool sent = false;
    double wire = 0, latency = 0;  // seconds that it occupies its channel, and that it travels after that
};

struct Graph {
    int ranks, stages;
    std::vector<int> rank, stage;  // of segments
    std::vector<double> forward, backward, weight;
    std::vector<std::int64_t> saved;
    bool training;  // whether there is a backward
    std::vector<Need> needs;
    double host = 0;  // seconds that each end of a message keeps its rank busy
    int segments() const { return static_cast<int>(rank.size()); }
    double cost(int segment, Kind kind) const {
        switch (kind) {
            case kForward:
                return forward[segment];
            case kBackward:
                return backward[segment];
            case kInputs:
                return backward[segment] - weight[segment];
            default:
                return weight[segment];
        }
    }
};

struct Times {
    bool ended = false;   // all actions ran
    std::vector<int> at;  // rank -> actions that ran
    double seconds = 0;
    std::vector<double> last_backward;                 // of stages
    std::vector<double> first_start, busy, waiting;    // of ranks
    std::vector<std::int64_t> peak_bytes, peak_count;  // of ranks
    std::vector<int> in_flight;                        // of stages
    std::vector<double> start, end;                    // of actions, rank by rank; empty unless asked for
};

// Performs any order of a graph; may be run again.
class Clock {
  public:
    Clock(const Graph& graph, int microbatches);

    // The order need not be right: it stops at what waits for ever or has been done before.
    Times run(const Order& order, bool record);

    // Seconds to the last end; infinity if that is more than `limit`, or the order cannot run.
    double makespan(const Order& order, double limit = std::numeric_limits<double>::infinity());

  private:
    struct Message {
        int key, before, receiver;
        double wire, latency;
        int channel;
    };
    struct Input {
        int key, before;
    };
    struct Row {  // of a task
        double cost;
        int slot;
        int inputs, received, inputs_end;  // messages first, what its own rank has made from `received` on
        int messages, messages_end;
    };
    struct Rank {
        double free = 0;
        int at = 0;
        std::size_t awaited = 0;  // index of what it waits for, plus one
        std::int64_t bytes = 0, count = 0;
    };
    template <bool kAll>
    bool advance(const Order& order, int number, Times& times);
    template <bool kAll>
    void run_all(const Order& order, Times& times);

    const Graph& graph_;
    int microbatches_, keys_;
    std::vector<Row> rows_;
    std::vector<Input> inputs_;
    std::vector<Message> messages_;
    // By microbatch, then key: end of a slot or arrival of a message; negative before that.
    std::vector<double> done_;
    std::vector<double> channels_;  // free from then on
    std::vector<Rank> ranks_;
    std::vector<int> runnable_, now_in_flight_;
    std::vector<std::size_t> offset_;  // of a rank's actions in Times::start
    double limit_ = 0;
};

}  // namespace smpar
