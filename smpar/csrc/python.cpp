// The only file that knows Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "orders.hpp"
#include "partition.hpp"
#include "simulate.hpp"
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

using PyOrder = std::vector<std::vector<std::pair<int, int>>>;  // (task, microbatch)
using PyTimes = std::tuple<bool, std::vector<int>, double, std::vector<double>, std::vector<double>,
                           std::vector<double>, std::vector<double>, std::vector<std::int64_t>,
                           std::vector<int>, std::vector<double>, std::vector<double>>;
// Ranks, forward, backward, weight, saved, wires forward and backward, latencies forward and backward, host,
// training.
using PyPipeline = std::tuple<std::vector<int>, std::vector<double>, std::vector<double>, std::vector<double>,
                              std::vector<std::int64_t>, std::vector<double>, std::vector<double>,
                              std::vector<double>, std::vector<double>, double, bool>;
// Ranks, stages, rank and stage of segments, forward, backward, weight, saved, training, needs, host.
using PyGraph = std::tuple<int, int, std::vector<int>, std::vector<int>, std::vector<double>,
                           std::vector<double>, std::vector<double>, std::vector<std::int64_t>, bool,
                           std::vector<std::tuple<int, int, bool, double, double>>, double>;

smpar::Pipeline pipeline_of(PyPipeline p) {
    return std::apply([](auto&&... field) { return smpar::Pipeline{std::move(field)...}; }, std::move(p));
}

PyOrder order_to(const smpar::Order& order) {
    PyOrder result(order.size());
    for (std::size_t rank = 0; rank < order.size(); ++rank)
        for (const auto& action : order[rank]) result[rank].emplace_back(action.task, action.microbatch);
    return result;
}

PyTimes times_to(smpar::Times t) {
    return {t.ended,
            std::move(t.at),
            t.seconds,
            std::move(t.last_backward),
            std::move(t.first_start),
            std::move(t.busy),
            std::move(t.waiting),
            std::move(t.peak_bytes),
            std::move(t.in_flight),
            std::move(t.start),
            std::move(t.end)};
}

PyOrder named_order(PyPipeline pipeline, const std::string& name, int microbatches) {
    return order_to(smpar::named_order(pipeline_of(std::move(pipeline)), name, microbatches));
}

// With `record`, also the order; else an empty one.
std::pair<PyTimes, PyOrder> simulate_named(PyPipeline pipeline, const std::string& name, int microbatches,
                                           bool record) {
    const smpar::Pipeline chain = pipeline_of(std::move(pipeline));
    const smpar::Order order = smpar::named_order(chain, name, microbatches);
    const smpar::Graph graph = smpar::graph_of(chain);
    return {times_to(smpar::Clock(graph, microbatches).run(order, record)),
            record ? order_to(order) : PyOrder{}};
}

PyTimes simulate(PyGraph fields, const PyOrder& actions, int microbatches) {
    auto& [ranks, stages, rank, stage, forward, backward, weight, saved, training, needs, host] = fields;
    smpar::Graph graph{ranks, stages, rank, stage, forward, backward, weight, saved, training, {}, host};
    for (const auto& [before, after, sent, wire, latency] : needs)
        graph.needs.push_back({before, after, sent, wire, latency});
    smpar::Order order(actions.size());
    for (std::size_t r = 0; r < actions.size(); ++r)
        for (const auto& [task, microbatch] : actions[r]) order[r].push_back({task, microbatch});
    return times_to(smpar::Clock(graph, microbatches).run(order, true));
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
    m.def("named_order", &named_order, nb::call_guard<nb::gil_scoped_release>(), "pipeline"_a, "name"_a,
          "microbatches"_a);
    m.def("simulate_named", &simulate_named, nb::call_guard<nb::gil_scoped_release>(), "pipeline"_a, "name"_a,
          "microbatches"_a, "record"_a);
    m.def("simulate", &simulate, nb::call_guard<nb::gil_scoped_release>(), "graph"_a, "actions"_a,
          "microbatches"_a);
    m.def("cut_stages", &cut_stages, nb::call_guard<nb::gil_scoped_release>(), "times"_a, "state"_a,
          "saved"_a, "tensors"_a, "places"_a, "microbatches"_a);
    m.def("least_excess", &least_excess, nb::call_guard<nb::gil_scoped_release>(), "times"_a, "state"_a,
          "saved"_a, "tensors"_a, "places"_a);
    m.def("cut_shared", &cut_shared, nb::call_guard<nb::gil_scoped_release>(), "times"_a, "state"_a,
          "saved"_a, "tensors"_a, "places"_a, "microbatches"_a, "ranks"_a, "evenness"_a);
}
