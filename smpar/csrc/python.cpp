// The only file that knows Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "partition.hpp"
#include "stages.hpp"

namespace nb = nanobind;

namespace {

using PyEdge = std::tuple<int, std::vector<int>, double>;
using PyTie = std::pair<std::vector<int>, double>;
using PyPartition = std::tuple<std::vector<int>, double, std::vector<double>, std::vector<double>>;

std::optional<PyPartition> partition(std::vector<double> time, std::vector<double> memory,
                                     const std::vector<PyEdge>& edges, const std::vector<PyTie>& ties,
                                     int stages, int microbatches, double memory_weight, double memory_limit,
                                     std::vector<int> ranks, double evenness) {
    smpar::Chain chain{std::move(time), std::move(memory), {}, {}};
    for (const auto& [source, targets, seconds] : edges) chain.edges.push_back({source, targets, seconds});
    for (const auto& [units, seconds] : ties) chain.ties.push_back({units, seconds});
    auto result = smpar::partition(
        chain, {stages, microbatches, memory_weight, memory_limit, std::move(ranks), evenness});
    if (!result) return std::nullopt;
    return PyPartition{result->cuts, result->objective, result->stage_time, result->stage_memory};
}

using PyTensor = std::tuple<int, std::vector<int>, double>;
using PyPlace = std::tuple<int, double, double, double, double, double>;

smpar::Layers layers_of(std::vector<std::vector<double>> times, std::vector<double> state,
                        std::vector<double> saved, const std::vector<PyTensor>& tensors) {
    smpar::Layers layers{std::move(times), std::move(state), std::move(saved), {}};
    for (const auto& [source, targets, bytes] : tensors) layers.tensors.push_back({source, targets, bytes});
    return layers;
}

std::vector<smpar::Place> places_of(const std::vector<PyPlace>& places) {
    std::vector<smpar::Place> at;
    for (const auto& [device_class, seconds_per_byte, latency, in_flight, transient, limit] : places)
        at.push_back({device_class, seconds_per_byte, latency, in_flight, transient, limit});
    return at;
}

std::tuple<std::vector<int>, int, double> least_excess(std::vector<std::vector<double>> times,
                                                       std::vector<double> state, std::vector<double> saved,
                                                       const std::vector<PyTensor>& tensors,
                                                       const std::vector<PyPlace>& places) {
    auto result = smpar::least_excess(
        layers_of(std::move(times), std::move(state), std::move(saved), tensors), places_of(places));
    return {result.cuts, result.stage, result.bytes};
}

std::optional<PyPartition> cut_stages(std::vector<std::vector<double>> times, std::vector<double> state,
                                      std::vector<double> saved, const std::vector<PyTensor>& tensors,
                                      const std::vector<PyPlace>& places, int microbatches) {
    auto result = smpar::cut_stages(layers_of(std::move(times), std::move(state), std::move(saved), tensors),
                                    places_of(places), microbatches);
    if (!result) return std::nullopt;
    return PyPartition{result->cuts, result->seconds, result->stage_time, result->stage_memory};
}

std::pair<PyPartition, bool> cut_shared(std::vector<std::vector<double>> times, std::vector<double> state,
                                        std::vector<double> saved, const std::vector<PyTensor>& tensors,
                                        const std::vector<PyPlace>& places, int microbatches,
                                        const std::vector<int>& ranks, double evenness) {
    auto result = smpar::cut_shared(layers_of(std::move(times), std::move(state), std::move(saved), tensors),
                                    places_of(places), microbatches, ranks, evenness);
    return {PyPartition{result.cuts, result.seconds, result.stage_time, result.stage_memory}, result.fits};
}

}  // namespace

NB_MODULE(_native, m) {
    using namespace nb::literals;
    m.def("partition", &partition, nb::call_guard<nb::gil_scoped_release>(), "time"_a, "memory"_a, "edges"_a,
          "ties"_a, "stages"_a, "microbatches"_a, "memory_weight"_a, "memory_limit"_a, "ranks"_a,
          "evenness"_a);
    m.def("cut_stages", &cut_stages, nb::call_guard<nb::gil_scoped_release>(), "times"_a, "state"_a,
          "saved"_a, "tensors"_a, "places"_a, "microbatches"_a);
    m.def("least_excess", &least_excess, nb::call_guard<nb::gil_scoped_release>(), "times"_a, "state"_a,
          "saved"_a, "tensors"_a, "places"_a);
    m.def("cut_shared", &cut_shared, nb::call_guard<nb::gil_scoped_release>(), "times"_a, "state"_a,
          "saved"_a, "tensors"_a, "places"_a, "microbatches"_a, "ranks"_a, "evenness"_a);
}
