// The only file that knows Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "partition.hpp"

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

}  // namespace

NB_MODULE(_native, m) {
    using namespace nb::literals;
    m.def("partition", &partition, nb::call_guard<nb::gil_scoped_release>(), "time"_a, "memory"_a, "edges"_a,
          "ties"_a, "stages"_a, "microbatches"_a, "memory_weight"_a, "memory_limit"_a, "ranks"_a,
          "evenness"_a);
}
