#include "filling.hpp"

#include <algorithm>

namespace smpar {

namespace {

constexpr double kEps = 1e-9;
constexpr double kNever = std::numeric_limits<double>::infinity();

struct Choice {
    double start;
    Kind kind;
    int segment;
};

// Finds the place with the least number, of equal ones the first.
class Tournament {
  public:
    explicit Tournament(int size) {
        while (leaves_ < size) leaves_ *= 2;
        winners_.assign(2 * static_cast<std::size_t>(leaves_), {kNever, 0});
        for (int place = 0; place < size; ++place) set(place, kNever);
    }
    int first() const { return winners_[1].place; }
    void set(int place, double number) {
        Winner now{number, place};
        int node = leaves_ + place;
        if (winners_[node].number == number && winners_[node].place == place) return;
        winners_[node] = now;
        for (; node > 1; node /= 2) {
            const Winner other = winners_[node ^ 1];
            const bool loses = (other.number < now.number) | ((node & 1) & (other.number == now.number));
            now = {loses ? other.number : now.number, loses ? other.place : now.place};
            winners_[node / 2] = now;
        }
    }

  private:
    struct Winner {
        double number;
        int place;
    };
    int leaves_ = 1;
    std::vector<Winner> winners_;  // of the subtree of each node; node n has the children 2n and 2n + 1
};

// It keeps two clocks: that of the rule, on which messages take a while, decides; on the real one they take
// no time.
template <bool kDelay>
class Filling {
  public:
    Filling(const Pipeline& pipeline, int microbatches, const Rule& rule)
        : pipeline_(pipeline), microbatches_(microbatches), rule_(rule), training_(pipeline.training) {
        find_places();
        const int stages = pipeline.stages();
        const double delay = rule.delay * mean_task(pipeline);
        for (int s = 0; s < stages; ++s) {
            Segment segment{};
            segment.splits = pipeline.weight[s] > 0;
            segment.forward = pipeline.forward[s];
            segment.weight = pipeline.weight[s];
            segment.backward =
                segment.splits ? pipeline.backward[s] - pipeline.weight[s] : pipeline.backward[s];
            segment.arrival = s > 0 && pipeline.crosses(s - 1) ? delay : 0.0;
            segment.departure = training_ && s + 1 < stages && pipeline.crosses(s) ? delay : 0.0;
            segment.share = share(s);
            double rest = 0;  // of later segments of the rank, and itself
            for (int other : descending_[place_[s]])
                if (other >= s) rest = share(other) + rest;
            segment.room = static_cast<double>(descending_.size()) - rest + kEps;
            segments_.push_back(segment);
        }
        forwards_.resize(static_cast<std::size_t>(stages) * microbatches);
        backwards_.resize(forwards_.size());
        if (kDelay) real_forwards_ = real_backwards_ = forwards_;
        ranks_.resize(descending_.size());
        order_.resize(descending_.size());
        for (std::size_t place = 0; place < descending_.size(); ++place) {
            int tasks = 0;
            for (int s : descending_[place]) {
                tasks += training_ ? 2 + segments_[s].splits : 1;
                const double backward = training_ ? pipeline_.backward[s] : 0.0;
                ranks_[place].work += microbatches * (segments_[s].forward + backward);
            }
            order_[place].reserve(static_cast<std::size_t>(tasks) * microbatches);
            tasks_ += static_cast<std::size_t>(tasks) * microbatches;
        }
    }

    Filled run(double limit) {
        const int size = static_cast<int>(descending_.size());
        // Idle time is a sum of many; no order is given up for its rounding.
        limit_ = limit * (1 + 1e-9);
        Tournament starts(size);
        std::vector<Choice> choices;
        for (int place = 0; place < size; ++place) {
            choices.push_back(choose(place));
            starts.set(place, choices.back().start);
        }
        for (std::size_t left = tasks_; left > 0; --left) {
            const int place = starts.first();
            const int touched = perform(place, choices[place]);
            if (gave_up_) return {{}, kNever};
            choices[place] = choose(place);
            starts.set(place, choices[place].start);
            if (touched != place) {
                choices[touched] = choose(touched);
                starts.set(touched, choices[touched].start);
            }
        }
        double end = 0;
        for (const Rank& rank : ranks_) end = std::max(end, rank.real);
        Order order(pipeline_.size());
        for (int place = 0; place < size; ++place) order[homes_[place]] = std::move(order_[place]);
        return {std::move(order), end};
    }

  private:
    struct Segment {
        double forward, backward, weight;  // backward: of I where it splits, else of B
        double arrival, departure;         // what messages to its forward and backward are thought to take
        double share, room;
        bool splits;
        int forwards, backwards, weights;  // how many have run
    };
    struct Rank {
        double free = 0, held = 0;
        double real = 0, idle = 0,
               work = 0;  // on the real clock: free from then on, idle until then, all its work
        bool turned = false;
    };

    // Ranks are counted in order of their first segment.
    void find_places() {
        for (int s = 0; s < pipeline_.stages(); ++s) {
            const auto home = std::find(homes_.begin(), homes_.end(), pipeline_.ranks[s]);
            place_.push_back(static_cast<int>(home - homes_.begin()));
            if (home == homes_.end()) {
                homes_.push_back(pipeline_.ranks[s]);
                descending_.emplace_back();
            }
            auto& mine = descending_[place_[s]];
            mine.insert(mine.begin(), s);
        }
    }

    // Of what its rank keeps of one microbatch.
    double share(int segment) const {
        std::int64_t all = 0;
        const auto& mine = descending_[place_[segment]];
        for (int other : mine) all += pipeline_.saved[other];
        if (all == 0) return 1.0 / static_cast<double>(mine.size());
        return static_cast<double>(pipeline_.saved[segment]) / static_cast<double>(all);
    }

    const double* of(const std::vector<double>& ends, int segment) const {
        return ends.data() + static_cast<std::size_t>(segment) * microbatches_;
    }

    double forward_start(int place, int s) const {
        const Segment& segment = segments_[s];
        const int done = segment.forwards;
        const Rank& rank = ranks_[place];
        if (done == microbatches_) return kNever;
        if (training_) {
            if (rank.held > segment.room) return kNever;
            if (s == descending_[place].back() && done - segment.backwards >= rule_.ahead[place])
                return kNever;
        }
        if (s == 0) return rank.free;
        if (segments_[s - 1].forwards <= done) return kNever;
        return std::max(rank.free, of(forwards_, s - 1)[done] + segment.arrival);
    }

    double backward_start(int place, int s) const {
        const Segment& segment = segments_[s];
        const int done = segment.backwards;
        if (!training_ || done == segment.forwards) return kNever;
        if (s + 1 == pipeline_.stages()) return std::max(ranks_[place].free, of(forwards_, s)[done]);
        if (segments_[s + 1].backwards <= done) return kNever;
        return std::max(ranks_[place].free, of(backwards_, s + 1)[done] + segment.departure);
    }

    Choice choose(int place) const {
        const Rank& rank = ranks_[place];
        const double free = rank.free;
        const bool forward_first = rule_.turn && rank.turned;
        Choice best{kNever, kForward, 0};
        // In order of preference, latest stage first: a later one has to be earlier in time.
        for (const bool backward : {!forward_first, forward_first})
            for (int s : descending_[place]) {
                const double start = backward ? backward_start(place, s) : forward_start(place, s);
                if (start < best.start) {
                    best = {start, backward ? back(s) : kForward, s};
                    if (start == free) return best;
                }
            }
        int oldest = -1;  // of the W's
        double since = kNever;
        for (int s : descending_[place]) {
            const Segment& segment = segments_[s];
            if (!segment.splits || segment.weights >= segment.backwards) continue;
            const double end = of(backwards_, s)[segment.weights];
            if (oldest < 0 || end < since || (end == since && s < oldest)) {
                oldest = s;
                since = end;
            }
        }
        if (oldest >= 0 && best.start > free + (rule_.patience - kEps) * segments_[oldest].weight)
            return {free, kWeights, oldest};
        return best;
    }

    Kind back(int s) const { return segments_[s].splits ? kInputs : kBackward; }

    // Does it; returns the other rank that may choose otherwise now, or the same one.
    int perform(int place, const Choice& choice) {
        const int s = choice.segment, last = pipeline_.stages() - 1;
        Segment& segment = segments_[s];
        Rank& rank = ranks_[place];
        int microbatch, neighbour = s;
        switch (choice.kind) {
            case kForward:
                microbatch = segment.forwards++;
                work(rank, choice.start, segment.forward,
                     s > 0 ? real(real_forwards_, s - 1, microbatch) : 0.0);
                note(forwards_, real_forwards_, s, microbatch, rank);
                rank.held += segment.share;
                rank.turned = false;
                neighbour = std::min(s + 1, last);
                break;
            case kWeights:
                microbatch = segment.weights++;
                work(rank, choice.start, segment.weight, 0.0);
                rank.held -= segment.share;
                break;
            default:
                microbatch = segment.backwards++;
                work(rank, choice.start, segment.backward,
                     s < last ? real(real_backwards_, s + 1, microbatch) : 0.0);
                note(backwards_, real_backwards_, s, microbatch, rank);
                if (choice.kind == kBackward) rank.held -= segment.share;
                rank.turned = true;
                neighbour = std::max(s - 1, 0);
        }
        order_[place].push_back(action(s, choice.kind, microbatch));
        return place_[neighbour];
    }

    double real(const std::vector<double>& ends, int segment, int microbatch) const {
        return kDelay ? of(ends, segment)[microbatch] : 0.0;
    }

    void work(Rank& rank, double start, double seconds, double ready) {
        const double really = kDelay ? std::max(rank.real, ready) : start;
        if (really > rank.real) {
            rank.idle += really - rank.real;
            gave_up_ = rank.work + rank.idle > limit_;
        }
        rank.free = start + seconds;
        rank.real = kDelay ? really + seconds : rank.free;
    }

    void note(std::vector<double>& ends, std::vector<double>& real_ends, int s, int microbatch,
              const Rank& rank) {
        const std::size_t at = static_cast<std::size_t>(s) * microbatches_ + microbatch;
        ends[at] = rank.free;
        if (kDelay) real_ends[at] = rank.real;
    }

    const Pipeline& pipeline_;
    const int microbatches_;
    const Rule& rule_;
    const bool training_;
    std::vector<int> homes_, place_;            // place -> rank, segment -> place
    std::vector<std::vector<int>> descending_;  // place -> its segments
    std::vector<Segment> segments_;
    std::vector<double> forwards_, backwards_, real_forwards_,
        real_backwards_;  // ends, by segment and microbatch
    double limit_ = kNever;
    bool gave_up_ = false;
    std::vector<Rank> ranks_;
    Order order_;
    std::size_t tasks_ = 0;
};

}  // namespace

double mean_task(const Pipeline& pipeline) {
    double sum = 0;
    for (double seconds : pipeline.forward) sum += seconds;
    if (pipeline.training)
        for (double seconds : pipeline.backward) sum += seconds;
    return sum / (pipeline.stages() * (pipeline.training ? 2.0 : 1.0));
}

Filled fill(const Pipeline& pipeline, int microbatches, const Rule& rule, double limit) {
    if (rule.delay == 0) return Filling<false>(pipeline, microbatches, rule).run(limit);
    return Filling<true>(pipeline, microbatches, rule).run(limit);
}

}  // namespace smpar
