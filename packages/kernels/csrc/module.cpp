// Python bindings. Pointers and sizes cross as integers; the Python side has checked them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "copy.hpp"

#ifdef LIGHTRFT_WITH_CUDA
#include "bucket.cuh"
#endif

namespace {

// (source, destination or 0, numel, cast code, bytes of one destination element, start)
using SegmentRow = std::tuple<
    std::uintptr_t, std::uintptr_t, std::int64_t, int, std::int64_t, std::uint64_t>;

// The hashes of all segments, or nothing.
std::vector<std::int64_t> run_segments(
    const std::vector<SegmentRow>& rows, std::uint16_t bf16_nan, int num_threads, bool with_hash) {
    std::vector<lightrft::CopySegment> segments;
    segments.reserve(rows.size());
    for (const auto& [source, destination, numel, cast, itemsize, start] : rows) {
        segments.push_back(
            {reinterpret_cast<const char*>(source), reinterpret_cast<char*>(destination), numel,
             static_cast<lightrft::Cast>(cast), itemsize, start});
    }
    std::vector<std::uint64_t> hashes(with_hash ? rows.size() : 0, 0);
    lightrft::run_segments(segments, bf16_nan, num_threads, with_hash ? hashes.data() : nullptr);
    return {hashes.begin(), hashes.end()};
}

#ifdef LIGHTRFT_WITH_CUDA
void launch_segments(
    std::uintptr_t segments, std::int64_t num_segments, std::int64_t num_tiles,
    std::uintptr_t hashes, int device, std::uintptr_t stream) {
    const int error = lightrft::launch_segments(
        reinterpret_cast<const lightrft::DeviceSegment*>(segments), num_segments, num_tiles,
        reinterpret_cast<unsigned long long*>(hashes), device, reinterpret_cast<void*>(stream));
    if (error != 0) {
        throw std::runtime_error(
            std::string("weight-bucket kernel: ") + lightrft::cuda_error_text(error));
    }
}
#endif

}  // namespace

PYBIND11_MODULE(_native, module) {
    namespace py = pybind11;
    using release_gil = py::call_guard<py::gil_scoped_release>;
    module.attr("interface_version") = 2;
#ifdef LIGHTRFT_WITH_CUDA
    module.attr("has_cuda") = true;
    module.attr("device_tile_elements") = lightrft::kDeviceTileElements;
    module.def("launch_segments", &launch_segments, py::arg("segments"), py::arg("num_segments"),
               py::arg("num_tiles"), py::arg("hashes"), py::arg("device"), py::arg("stream"),
               release_gil());
#else
    module.attr("has_cuda") = false;
#endif
    module.def("run_segments", &run_segments, py::arg("segments"), py::arg("bf16_nan"),
               py::arg("num_threads"), py::arg("with_hash"), release_gil());
}
