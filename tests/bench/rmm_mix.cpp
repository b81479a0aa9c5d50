/*
 * The random mix of allocations and frees that RMM measures its resources by: up to so many MiB a block, 1000 and 10 000
 * allocations, by `cudaMalloc`, `cudaMallocAsync`, RMM's pool and RMM's arena, in one process, round by round in turn.
 *
 *   rmm_mix [LABEL] [NAME=VALUE...]               `cudaMalloc` is the driver's
 *   LD_PRELOAD=libgpupool.so rmm_mix strict       `cudaMalloc` is gpupool's; RMM's slabs come from it once
 *
 *   sizes=1,4,64,1024,4096   largest block in MiB      counts=1000,10000   allocations of a round
 *   threads=1,2,4,8,16       with several_sizes=1,64,1024 and several_count=10000 allocations by all threads together
 *   live=16000               MiB in use at most        slab=32768          MiB that RMM's pool and arena take at first
 *   rounds=5 seconds=3       rounds of a row, and after how long a round or a row is cut short; seed=1
 *
 * One line for each way in each row, NAME=VALUE throughout. `first` is the first round, cold for `cudaMalloc`; `median` is of
 * the others, warm. A round is the same calls for every way: it is drawn before it is timed. A block that is refused is counted
 * and not freed. `cut` says how many rounds ran out of time.
 *
 * Memory: the two slabs, and what the two others hold for `live` each; at least 2 GiB stay free, or it does not begin.
 *
 * Built with RMM's headers (the wheels librmm-cu13 and rapids-logger, unpacked): see tests/gpu/building.py.
 */
#include <cuda/stream_ref>
#include <rmm/mr/arena_memory_resource.hpp>
#include <rmm/mr/cuda_memory_resource.hpp>
#include <rmm/mr/pool_memory_resource.hpp>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

static constexpr std::size_t MIB = std::size_t{1} << 20;

struct Way {
    std::string name;
    std::function<void *(std::size_t, bool)> allocate; /* null where it is refused; the flag: on the thread's own stream */
    std::function<void(void *, std::size_t, bool)> release;
};

/* Allocates block `block` with `bytes`, or frees it where that is 0. */
struct Step {
    std::uint32_t block;
    std::size_t bytes;
};

struct Measured {
    double microseconds = 0; /* an operation */
    std::size_t operations = 0, refused = 0;
    bool cut = false;
};

static double now()
{
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static void check(cudaError_t error, const char *call)
{
    if (error != cudaSuccess) {
        std::fprintf(stderr, "rmm_mix: %s: %s\n", call, cudaGetErrorString(error));
        std::exit(1);
    }
}

/* About three allocations to each free until `count` were made or `live` bytes are in use; then the rest is freed. Any order. */
static std::vector<Step> draw(std::size_t count, std::size_t largest, std::size_t live, std::uint64_t seed)
{
    std::uint64_t random = 88172645463325252ull + seed * 0x9e3779b97f4a7c15ull;
    auto next = [&] {
        random ^= random << 13, random ^= random >> 7, random ^= random << 17;
        return random * 0x2545f4914f6cdd1dull >> 11;
    };
    std::vector<Step> steps, held;
    std::size_t used = 0;
    std::uint32_t made = 0;
    for (int i = 0; i < 16; i++) next();
    while (made < count || !held.empty()) {
        std::size_t bytes = 1 + next() % largest;
        bool grow = next() % 100 < 73 && made < count && used + bytes <= live;
        if (grow || held.empty()) {
            bytes = std::min(bytes, live);
            steps.push_back({made, bytes});
            held.push_back({made, bytes});
            used += bytes;
            made++;
        } else {
            std::size_t victim = next() % held.size();
            used -= held[victim].bytes;
            steps.push_back({held[victim].block, 0});
            held[victim] = held.back();
            held.pop_back();
        }
    }
    return steps;
}

/* One thread's part; how long it took is for the caller, who starts all threads at once. */
static void play(const Way &way, const std::vector<Step> &steps, bool own_stream, double until, Measured &result)
{
    struct Block {
        void *address = nullptr;
        std::size_t bytes = 0;
    };
    std::vector<Block> blocks(steps.size() / 2 + 1);
    for (const Step &step : steps) {
        Block &block = blocks[step.block];
        if (step.bytes) {
            block = {way.allocate(step.bytes, own_stream), step.bytes};
            result.refused += !block.address;
        } else if (block.address) {
            way.release(block.address, block.bytes, own_stream);
            block.address = nullptr;
        }
        result.operations++;
        if (result.operations % 64 == 0 && now() > until) {
            result.cut = true;
            break;
        }
    }
    if (result.cut)
        for (Block &block : blocks)
            if (block.address) {
                way.release(block.address, block.bytes, own_stream);
                result.operations++;
            }
}

static Measured round_of(const Way &way, const std::vector<std::vector<Step>> &parts, bool own_stream, double limit)
{
    Measured all;
    if (parts.size() == 1) {
        double begin = now();
        play(way, parts[0], own_stream, begin + limit, all);
        all.microseconds = (now() - begin) * 1e6 / static_cast<double>(all.operations);
    } else {
        std::vector<Measured> results(parts.size());
        std::vector<double> began(parts.size()), ended(parts.size());
        std::barrier begin(static_cast<std::ptrdiff_t>(parts.size()));
        std::vector<std::thread> workers;
        for (std::size_t self = 0; self < parts.size(); self++)
            workers.emplace_back([&, self] {
                check(cudaSetDevice(0), "cudaSetDevice");
                check(cudaFree(nullptr), "cudaFree");
                begin.arrive_and_wait();
                began[self] = now();
                play(way, parts[self], own_stream, began[self] + limit, results[self]);
                ended[self] = now();
            });
        for (auto &worker : workers) worker.join();
        for (const Measured &one : results) {
            all.operations += one.operations, all.refused += one.refused;
            all.cut |= one.cut;
        }
        double took = *std::max_element(ended.begin(), ended.end()) - *std::min_element(began.begin(), began.end());
        all.microseconds = took * 1e6 / static_cast<double>(all.operations);
    }
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    return all;
}

static std::map<std::string, std::string> options{
    {"sizes", "1,4,64,1024,4096"}, {"counts", "1000,10000"}, {"threads", "1,2,4,8,16"}, {"several_sizes", "1,64,1024"},
    {"several_count", "10000"}, {"live", "16000"}, {"slab", "32768"}, {"rounds", "5"}, {"seconds", "3"}, {"seed", "1"},
    {"ways", "cudaMalloc,cudaMallocAsync,rmm-pool,rmm-arena"}};

static std::vector<std::string> listed(const std::string &name)
{
    std::vector<std::string> parts{""};
    for (char letter : options[name])
        if (letter == ',') parts.emplace_back();
        else parts.back() += letter;
    if (parts == std::vector<std::string>{""}) parts.clear();
    return parts;
}

static std::size_t number(const std::string &text)
{
    char *end;
    unsigned long long value = std::strtoull(text.c_str(), &end, 10);
    if (text.empty() || *end) {
        std::fprintf(stderr, "rmm_mix: %s is no number\n", text.c_str());
        std::exit(2);
    }
    return value;
}

static std::size_t option(const char *name) { return number(options[name]); }

static void row(const char *kind, const std::string &label, const std::vector<Way> &ways, std::size_t largest, std::size_t count,
                std::size_t threads, bool own_stream)
{
    std::vector<std::vector<Step>> parts;
    for (std::size_t self = 0; self < threads; self++)
        parts.push_back(draw(count / threads, largest * MIB, option("live") * MIB / threads, option("seed") + self));
    std::vector<std::vector<Measured>> rounds(ways.size());
    std::vector<double> spent(ways.size());
    double limit = static_cast<double>(option("seconds"));
    for (std::size_t number = 0; number < option("rounds"); number++)
        for (std::size_t w = 0; w < ways.size(); w++) {
            /* Two rounds at least: one warm. */
            if (number > 1 && spent[w] > limit) continue;
            double begin = now();
            rounds[w].push_back(round_of(ways[w], parts, own_stream, limit));
            spent[w] += now() - begin;
        }
    for (std::size_t w = 0; w < ways.size(); w++) {
        std::vector<double> warm;
        std::size_t refused = 0, cut = 0;
        for (std::size_t i = 0; i < rounds[w].size(); i++) {
            if (i) warm.push_back(rounds[w][i].microseconds);
            refused += rounds[w][i].refused;
            cut += rounds[w][i].cut;
        }
        std::sort(warm.begin(), warm.end());
        double first = rounds[w][0].microseconds;
        std::printf("%s label=%s way=%s mib=%zu count=%zu threads=%zu median_us=%.3f best_us=%.3f worst_us=%.3f first_us=%.3f "
                    "rounds=%zu refused=%zu cut=%zu\n",
                    kind, label.c_str(), ways[w].name.c_str(), largest, count, threads,
                    warm.empty() ? first : warm[warm.size() / 2], warm.empty() ? first : warm.front(),
                    warm.empty() ? first : warm.back(), first, rounds[w].size(), refused, cut);
    }
    std::fflush(stdout);
}

/* A resource of RMM's, which throws where it has no room. */
template <typename Resource>
static Way of(Resource &resource, const char *name)
{
    auto stream = [](bool own) { return cuda::stream_ref{own ? cudaStreamPerThread : cudaStreamLegacy}; };
    return {name,
            [&resource, stream](std::size_t bytes, bool own) -> void * {
                try {
                    return resource.allocate(stream(own), bytes, 256);
                } catch (const rmm::bad_alloc &) {
                    return nullptr;
                }
            },
            [&resource, stream](void *pointer, std::size_t bytes, bool own) {
                resource.deallocate(stream(own), pointer, bytes, 256);
            }};
}

static void *given(cudaError_t answer, void *pointer, const char *call)
{
    if (answer == cudaSuccess) return pointer;
    if (answer != cudaErrorMemoryAllocation) check(answer, call);
    cudaGetLastError();
    return nullptr;
}

int main(int count, char **arguments)
{
    std::string label = "bare";
    for (int i = 1; i < count; i++) {
        std::string word = arguments[i];
        auto equals = word.find('=');
        if (equals == std::string::npos) label = word;
        else if (options.count(word.substr(0, equals))) options[word.substr(0, equals)] = word.substr(equals + 1);
        else return std::fprintf(stderr, "rmm_mix: %s is no option\n", arguments[i]), 2;
    }
    check(cudaSetDevice(0), "cudaSetDevice");
    check(cudaFree(nullptr), "cudaFree");
    std::size_t slab = option("slab") * MIB, free_bytes, total;
    check(cudaMemGetInfo(&free_bytes, &total), "cudaMemGetInfo");
    /* The two that have no slab hold more than is in use; half as much again was never exceeded. */
    std::size_t needed = 2 * slab + 3 * option("live") * MIB + 2048 * MIB;
    if (free_bytes < needed) {
        std::fprintf(stderr, "rmm_mix: %zu MiB are free, and slab=%zu live=%zu need %zu; name smaller ones\n", free_bytes / MIB,
                     slab / MIB, option("live"), needed / MIB);
        return 1;
    }
    rmm::mr::cuda_memory_resource upstream;
    rmm::mr::pool_memory_resource pool{upstream, slab, slab};
    rmm::mr::arena_memory_resource arena{upstream, slab};
    auto stream = [](bool own) { return own ? cudaStreamPerThread : cudaStreamLegacy; };
    std::vector<Way> known{
        {"cudaMalloc",
         [](std::size_t bytes, bool) { void *p = nullptr; auto e = cudaMalloc(&p, bytes); return given(e, p, "cudaMalloc"); },
         [](void *pointer, std::size_t, bool) { check(cudaFree(pointer), "cudaFree"); }},
        {"cudaMallocAsync",
         [stream](std::size_t bytes, bool own) {
             void *p = nullptr;
             auto e = cudaMallocAsync(&p, bytes, stream(own));
             return given(e, p, "cudaMallocAsync");
         },
         [stream](void *pointer, std::size_t, bool own) { check(cudaFreeAsync(pointer, stream(own)), "cudaFreeAsync"); }},
        of(pool, "rmm-pool"),
        of(arena, "rmm-arena"),
    };
    /* As a program that cares would set it: what was freed stays in the driver's pool. */
    cudaMemPool_t async;
    std::uint64_t keep = UINT64_MAX;
    check(cudaDeviceGetDefaultMemPool(&async, 0), "cudaDeviceGetDefaultMemPool");
    check(cudaMemPoolSetAttribute(async, cudaMemPoolAttrReleaseThreshold, &keep), "cudaMemPoolSetAttribute");
    std::vector<Way> ways;
    for (const auto &name : listed("ways"))
        for (const auto &way : known)
            if (way.name == name) ways.push_back(way);
    if (ways.empty()) return std::fprintf(stderr, "rmm_mix: ways=%s names none\n", options["ways"].c_str()), 2;
    for (const auto &size : listed("sizes"))
        for (const auto &allocations : listed("counts")) row("mix", label, ways, number(size), number(allocations), 1, false);
    for (const auto &size : listed("several_sizes"))
        for (const auto &threads : listed("threads"))
            row("threads", label, ways, number(size), option("several_count"), number(threads), true);
    return 0;
}
