// Runs numbered tiles of work on a few threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

// One binary serves all x86-64 machines: the loader picks the widest instructions there are.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define LIGHTRFT_VECTORISED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define LIGHTRFT_VECTORISED
#endif

namespace lightrft {

// Calls work(tile, thread) for every tile in [0, num_tiles); the caller is thread 0.
template <typename Work>
void for_each_tile(std::int64_t num_tiles, int num_threads, const Work& work) {
    std::atomic<std::int64_t> next{0};
    const auto run = [&](int thread) {
        for (std::int64_t tile = next++; tile < num_tiles; tile = next++) {
            work(tile, thread);
        }
    };
    std::vector<std::thread> helpers;
    for (int thread = 1; thread < num_threads && thread < num_tiles; ++thread) {
        helpers.emplace_back(run, thread);
    }
    run(0);
    for (auto& helper : helpers) {
        helper.join();
    }
}

}  // namespace lightrft
