// Exact cuts of a chain of layers into stages that differ in speed, links and memory.
#pragma once

#include <optional>
#include <vector>

namespace smpar {

struct Tensor {
    int source;                // the layer that makes it
    std::vector<int> targets;  // later layers
    double bytes;
};

struct Layers {
    std::vector<std::vector<double>> times;  // [device class][layer]: seconds per microbatch
    std::vector<double> state, saved;        // [layer]: bytes, and bytes per microbatch in flight
    std::vector<Tensor> tensors;
    int size() const { return static_cast<int>(state.size()); }
};

// Where a stage runs.
struct Place {
    int device_class;
    double seconds_per_byte, latency;  // of its incoming link
    double in_flight, transient, limit;
};

struct StageCuts {
    std::vector<int> cuts;  // first layer of each stage
    double seconds;         // objective
    std::vector<double> stage_time, stage_memory;
    bool fits = true;
};

// Minimises sum of c + (microbatches - 1) * max of c, as `smpar.planner.stages` defines them; of equal cuts
// the lexicographically smallest. Nothing if no cuts keep within the memory limits. Expects checked numbers.
std::optional<StageCuts> cut_stages(const Layers& layers, const std::vector<Place>& places, int microbatches);

// The same where stages share ranks, whose stages have one class and one limit; maybe not the best. Without
// cuts that fit, those that exceed limits by little.
StageCuts cut_shared(const Layers& layers, const std::vector<Place>& places, int microbatches,
                     const std::vector<int>& ranks, double evenness);

struct Excess {
    std::vector<int> cuts;
    int stage;
    double bytes;
};

// The cuts whose fullest stage, beyond its limit, is least full.
Excess least_excess(const Layers& layers, const std::vector<Place>& places);

}  // namespace smpar
