/*
 * The same random mix of allocations and frees on 1 thread and on N, by `cudaMalloc`, by RMM's pool, by RMM's arena and by
 * `cudaMallocAsync`, all in one process, round by round in turn.
 *
 *   LD_PRELOAD=libgpupool.so rmm_threads N...     `cudaMalloc` is then gpupool's, RMM's slabs come from it once
 *
 * Built with RMM's headers (the wheel librmm-cu13, unpacked): see tests/gpu/building.py.
 */
#include <rmm/cuda_stream_view.hpp>
#include <rmm/mr/arena_memory_resource.hpp>
#include <rmm/mr/cuda_memory_resource.hpp>
#include <rmm/mr/pool_memory_resource.hpp>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

using Allocate = std::function<void *(std::size_t)>;
using Release = std::function<void(void *, std::size_t)>;

struct Way {
    const char *name;
    Allocate allocate;
    Release release;
    int operations;
};

static double now()
{
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static void check(cudaError_t error, const char *call)
{
    if (error != cudaSuccess) {
        std::fprintf(stderr, "rmm_threads: %s: %s\n", call, cudaGetErrorString(error));
        std::exit(1);
    }
}

/* Operations a second of `threads` threads, each with up to 16 blocks of 1 to 8 MiB, from the first start to the last end. */
static double throughput(const Way &way, int threads)
{
    std::barrier begin(threads);
    std::vector<double> began(threads), ended(threads);
    std::vector<std::thread> workers;
    for (int self = 0; self < threads; self++)
        workers.emplace_back([&, self] {
            check(cudaSetDevice(0), "cudaSetDevice");
            std::uint64_t random = 88172645463325252ull + static_cast<std::uint64_t>(self) + 1;
            void *held[16] = {};
            std::size_t sizes[16] = {};
            begin.arrive_and_wait();
            began[self] = now();
            for (int i = 0; i < way.operations; i++) {
                random ^= random << 13, random ^= random >> 7, random ^= random << 17;
                auto slot = random % 16;
                if (held[slot]) {
                    way.release(held[slot], sizes[slot]);
                    held[slot] = nullptr;
                } else {
                    sizes[slot] = static_cast<std::size_t>(1 + (random >> 8) % 8) << 20;
                    held[slot] = way.allocate(sizes[slot]);
                }
            }
            ended[self] = now();
            for (int slot = 0; slot < 16; slot++)
                if (held[slot]) way.release(held[slot], sizes[slot]);
        });
    for (auto &worker : workers) worker.join();
    double first = *std::min_element(began.begin(), began.end()), last = *std::max_element(ended.begin(), ended.end());
    return threads * static_cast<double>(way.operations) / (last - first);
}

static double median(std::vector<double> values)
{
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

int main(int count, char **arguments)
{
    check(cudaSetDevice(0), "cudaSetDevice");
    check(cudaFree(nullptr), "cudaFree");
    auto stream = rmm::cuda_stream_per_thread;
    rmm::mr::cuda_memory_resource upstream;
    rmm::mr::pool_memory_resource pool{upstream, std::size_t{8} << 30};
    rmm::mr::arena_memory_resource arena{upstream, std::size_t{8} << 30};
    auto of = [&](auto &resource, const char *name) {
        return Way{name, [&](std::size_t bytes) { return resource.allocate(stream, bytes, 256); },
                   [&](void *pointer, std::size_t bytes) { resource.deallocate(stream, pointer, bytes, 256); }, 100000};
    };
    std::vector<Way> ways{
        {"cudaMalloc", [](std::size_t bytes) { void *p; check(cudaMalloc(&p, bytes), "cudaMalloc"); return p; },
         [](void *pointer, std::size_t) { check(cudaFree(pointer), "cudaFree"); },
         std::getenv("LD_PRELOAD") ? 100000 : 2000},
        of(pool, "RMM pool"),
        of(arena, "RMM arena"),
        {"cudaMallocAsync",
         [](std::size_t bytes) { void *p; check(cudaMallocAsync(&p, bytes, cudaStreamPerThread), "cudaMallocAsync"); return p; },
         [](void *pointer, std::size_t) { check(cudaFreeAsync(pointer, cudaStreamPerThread), "cudaFreeAsync"); }, 20000},
    };
    for (int i = 1; i < count; i++) {
        int threads = std::atoi(arguments[i]);
        if (threads < 1) return std::fprintf(stderr, "usage: rmm_threads THREADS...\n"), 2;
        std::vector<std::vector<double>> one(ways.size()), many(ways.size()), ratio(ways.size());
        for (auto &way : ways) throughput(way, threads); /* warm */
        for (int round = 0; round < 5; round++)
            for (std::size_t w = 0; w < ways.size(); w++) {
                one[w].push_back(throughput(ways[w], 1));
                many[w].push_back(throughput(ways[w], threads));
                ratio[w].push_back(many[w].back() / one[w].back());
            }
        for (std::size_t w = 0; w < ways.size(); w++)
            std::printf("%-16s 1 thread %9.0f operations/s (%6.2f us each), %2d threads %9.0f (%6.2f us each), ratio %.2f\n",
                        ways[w].name, median(one[w]), 1e6 / median(one[w]), threads, median(many[w]), 1e6 / median(many[w]),
                        median(ratio[w]));
    }
    return 0;
}
