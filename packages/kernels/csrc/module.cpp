// Python bindings. Pointers and sizes cross as integers; the Python side has checked them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "copy.hpp"
#include "hash.hpp"

#ifdef LIGHTRFT_WITH_CUDA
#include "bucket.cuh"
#endif

namespace {

// (source, destination, numel, cast code, bytes of one destination element)
using SegmentRow = std::tuple<std::uintptr_t, std::uintptr_t, std::int64_t, int, std::int64_t>;

void copy_segments(const std::vector<SegmentRow>& rows, std::uint16_t bf16_nan, int num_threads) {
    std::vector<lightrft::CopySegment> segments;
    segments.reserve(rows.size());
    for (const auto& [source, destination, numel, cast, itemsize] : rows) {
        segments.push_back(
            {reinterpret_cast<const char*>(source), reinterpret_cast<char*>(destination), numel,
             static_cast<lightrft::Cast>(cast), itemsize});
    }
    lightrft::copy_segments(segments, bf16_nan, num_threads);
}

std::int64_t hash_range(
    std::uintptr_t pointer, std::int64_t numel, int itemsize, std::uint64_t start,
    int num_threads) {
    const auto* data = reinterpret_cast<const void*>(pointer);
    return static_cast<std::int64_t>(
        lightrft::hash_range(data, numel, itemsize, start, num_threads));
}

#ifdef LIGHTRFT_WITH_CUDA
void launch_segments(
    std::uintptr_t segments, std::uintptr_t tile_segments, std::int64_t num_tiles,
    std::uintptr_t hashes, int device, std::uintptr_t stream) {
    const int error = lightrft::launch_segments(
        reinterpret_cast<const lightrft::DeviceSegment*>(segments),
        reinterpret_cast<const std::int32_t*>(tile_segments), num_tiles,
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
    module.attr("interface_version") = 1;
#ifdef LIGHTRFT_WITH_CUDA
    module.attr("has_cuda") = true;
    module.attr("device_tile_elements") = lightrft::kDeviceTileElements;
    module.def("launch_segments", &launch_segments, py::arg("segments"), py::arg("tile_segments"),
               py::arg("num_tiles"), py::arg("hashes"), py::arg("device"), py::arg("stream"),
               release_gil());
#else
    module.attr("has_cuda") = false;
#endif
    module.def("copy_segments", &copy_segments, py::arg("segments"), py::arg("bf16_nan"),
               py::arg("num_threads"), release_gil());
    module.def("hash_range", &hash_range, py::arg("pointer"), py::arg("numel"),
               py::arg("itemsize"), py::arg("start"), py::arg("num_threads"), release_gil());
}
