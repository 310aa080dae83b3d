// Measures the variants of attention_decode_variants.h in replayed graphs.
#ifndef NVBACKEND_TESTS_GPU_ATTENTION_DECODE_BENCH_H
#define NVBACKEND_TESTS_GPU_ATTENTION_DECODE_BENCH_H

#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "attention_decode_variants.h"

namespace decode_test {

__global__ void fill(uint32_t* data, size_t words, uint32_t seed) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < words; i += size_t(gridDim.x) * blockDim.x) {
    uint64_t x = (i + seed * 0x9e3779b97f4a7c15ull + 1) * 0xbf58476d1ce4e5b9ull;
    x ^= x >> 29, x *= 0x94d049bb133111ebull, x ^= x >> 32;
    const auto one = [](uint32_t bits) {  // a sum of four uniform numbers, about normal
      const float f =
          (float(bits & 255) + float(bits >> 8 & 255) + float(bits >> 16 & 255) + float(bits >> 24)) / 147.8f - 3.45f;
      const __nv_bfloat16 b = __float2bfloat16_rn(f);
      return uint32_t(*reinterpret_cast<const uint16_t*>(&b));
    };
    data[i] = one(uint32_t(x)) | one(uint32_t(x >> 32)) << 16;
  }
}

// E4M3 of about normal numbers.
__global__ void fill_fp8(uint32_t* data, size_t words) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < words; i += size_t(gridDim.x) * blockDim.x) {
    uint64_t x = (i + 1) * 0xbf58476d1ce4e5b9ull;
    x ^= x >> 29, x *= 0x94d049bb133111ebull, x ^= x >> 32;
    uint32_t word = 0;
    for (int byte = 0; byte < 4; ++byte) {
      const uint32_t bits = uint32_t(x >> (16 * byte)) & 0xffff;
      const float f =
          (float(bits & 15) + float(bits >> 4 & 15) + float(bits >> 8 & 15) + float(bits >> 12)) / 9.2f - 3.26f;
      word |= uint32_t(__nv_fp8_e4m3(f).__x) << (8 * byte);
    }
    data[i] = word;
  }
}

__global__ void nothing() {
  begin_overlapped();
}

// Reads bytes by bulk copies of `piece` bytes, 16 a stage, with `stages` stages.
__global__ void __launch_bounds__(32) read_only(const unsigned char* data, size_t bytes, int piece, int stages) {
  extern __shared__ __align__(1024) unsigned char ring[];
  __shared__ uint64_t full[64];
  const int lane = threadIdx.x;
  for (int i = lane; i < stages; i += 32) barrier_init(full + i, 1);
  barrier_init_fence();
  order_bulk_copies();
  __syncwarp();
  begin_overlapped();
  const size_t stage_bytes = size_t(16) * piece;
  const size_t total = bytes / stage_bytes;
  const size_t begin = total * blockIdx.x / gridDim.x, end = total * (blockIdx.x + 1) / gridDim.x;
  const auto issue = [&](size_t at, int slot) {
    if (lane == 0) barrier_expect(full + slot, stage_bytes);
    __syncwarp();
    if (lane < 16) {
      bulk_copy(ring + (slot * 16 + lane) * (piece + 16), data + at * stage_bytes + size_t(lane) * piece, piece,
                full + slot);
    }
    __syncwarp();
  };
  for (int i = 0; i < stages; ++i) {
    if (begin + i < end) issue(begin + i, i);
  }
  int slot = 0, parity = 0;
  for (size_t at = begin; at < end; ++at) {
    barrier_wait(full + slot, parity);
    if (at + stages < end) issue(at + stages, slot);
    if (++slot == stages) slot = 0, parity ^= 1;
  }
}

struct Row {
  int d, query_heads, kv_heads, batch, length;
  double peer;  // TB/s, PyTorch's best of the record
};
const Row kRows[] = {
    {128, 32, 8, 1, 4096, 1.527}, {128, 32, 8, 1, 32768, 3.599}, {128, 32, 8, 1, 131072, 4.241},
    {128, 32, 8, 8, 8192, 4.008}, {128, 32, 8, 64, 4096, 4.419}, {128, 32, 8, 128, 1024, 4.251},
    {256, 8, 4, 1, 4096, 1.225},  {256, 8, 4, 1, 32768, 2.584},  {256, 8, 4, 1, 131072, 3.536},
    {256, 8, 4, 8, 8192, 3.559},  {256, 8, 4, 64, 4096, 4.414},  {256, 8, 4, 128, 1024, 4.203},
    {256, 16, 8, 1, 4096, 1.614}, {256, 16, 8, 1, 32768, 3.393}, {256, 16, 8, 1, 131072, 4.096},
    {256, 16, 8, 8, 8192, 4.134}, {256, 16, 8, 64, 4096, 4.425}, {256, 16, 8, 128, 1024, 4.278},
    {64, 32, 8, 1, 4096, 1.013},  {64, 32, 8, 1, 32768, 3.168},  {64, 32, 8, 1, 131072, 4.102},
    {64, 32, 8, 8, 8192, 3.786},  {64, 32, 8, 64, 4096, 4.326},  {64, 32, 8, 128, 1024, 4.140},
};

struct Bench {
  cudaStream_t stream;
  nvb_launch launch;
  unsigned char* memory;
  size_t memory_bytes;
  Workspace workspace;
  void* query;
  void* output;
  int32_t* positions;
  int32_t* table = nullptr;

  Bench() {
    MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    launch = gpu::device_launch(stream);
    memory_bytes = size_t{9} << 29;
    MUST(cudaMalloc(&memory, memory_bytes));
    fill<<<2048, 256>>>(reinterpret_cast<uint32_t*>(memory), memory_bytes / 4, 1);
    MUST(cudaMalloc(&query, 64 << 20));
    fill<<<2048, 256>>>(static_cast<uint32_t*>(query), 16 << 20, 2);
    MUST(cudaMalloc(&output, 64 << 20));
    MUST(cudaMalloc(&positions, 4096 * 4));
    MUST(cudaDeviceSynchronize());
  }

  // Microseconds a call.
  template <typename Call>
  double time(const Call& call, int rotation, double expected_us) {
    int calls = std::max(rotation, std::min(200, static_cast<int>(400 / expected_us) + 1));
    calls = (calls + rotation - 1) / rotation * rotation;
    for (int i = 0; i < 3; ++i) {
      const cudaError_t error = call(i % rotation);
      if (error != cudaSuccess) {
        cudaGetLastError();
        return NAN;
      }
    }
    MUST(cudaStreamSynchronize(stream));
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < calls; ++i) MUST(call(i % rotation));
    MUST(cudaStreamEndCapture(stream, &graph));
    MUST(cudaGraphInstantiate(&replay, graph, 0));
    cudaEvent_t begin, end;
    MUST(cudaEventCreate(&begin));
    MUST(cudaEventCreate(&end));
    std::vector<float> times;
    for (int round = 0; round < 7; ++round) {
      MUST(cudaGraphLaunch(replay, stream));
      MUST(cudaEventRecord(begin, stream));
      MUST(cudaGraphLaunch(replay, stream));
      MUST(cudaEventRecord(end, stream));
      MUST(cudaEventSynchronize(end));
      float milliseconds = 0;
      MUST(cudaEventElapsedTime(&milliseconds, begin, end));
      if (round >= 2) times.push_back(milliseconds);
    }
    std::sort(times.begin(), times.end());
    MUST(cudaEventDestroy(begin));
    MUST(cudaEventDestroy(end));
    MUST(cudaGraphExecDestroy(replay));
    MUST(cudaGraphDestroy(graph));
    return times[times.size() / 2] * 1e3 / calls;
  }

  // Lengths may differ; `page` 0: contiguous.
  nvb_attention_decode_params params(const Row& row, const std::vector<int>& lengths, int page, int rows) {
    nvb_attention_decode_params p = {};
    std::vector<int32_t> host;
    int longest = 0;
    for (const int length : lengths) {
      for (int i = 0; i < rows; ++i) host.push_back(length - rows + i);
      longest = std::max(longest, length);
    }
    MUST(cudaMemcpy(positions, host.data(), host.size() * 4, cudaMemcpyHostToDevice));
    p.query = query, p.output = output, p.positions = positions;
    p.sequences = row.batch, p.rows_per_sequence = rows, p.query_heads = row.query_heads, p.kv_heads = row.kv_heads,
    p.head_dim = p.value_dim = row.d;
    p.slot_count = row.batch, p.capacity = longest, p.max_kv_length = longest;
    p.scale = 1.0f / std::sqrt(float(row.d));
    p.query_dtype = p.kv_dtype = p.output_dtype = NVB_BF16;
    p.key_token_stride = p.value_token_stride = row.d;
    p.key_head_stride = p.value_head_stride = int64_t{longest} * row.d;
    p.key_sequence_stride = p.value_sequence_stride = p.key_head_stride * row.kv_heads;
    p.query_head_stride = p.output_head_stride = row.d;
    p.query_token_stride = p.output_token_stride = int64_t{row.d} * row.query_heads;
    if (page > 0) {
      const int entries = (longest + page - 1) / page;
      std::vector<int32_t> pages(size_t(entries) * row.batch);
      for (size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<int32_t>(i);
      std::shuffle(pages.begin(), pages.end(), std::mt19937(3));
      if (table != nullptr) MUST(cudaFree(table));
      MUST(cudaMalloc(&table, pages.size() * 4));
      MUST(cudaMemcpy(table, pages.data(), pages.size() * 4, cudaMemcpyHostToDevice));
      p.placement.pages = table, p.placement.page_row_stride = entries, p.placement.page_tokens = page;
      p.placement.page_count = static_cast<int32_t>(pages.size());
      p.key_head_stride = p.value_head_stride = int64_t{page} * row.d;
      p.placement.block_stride = p.placement.value_block_stride = p.key_head_stride * row.kv_heads;
    }
    return p;
  }

  double measure(const Variant* variant, const Row& row, const std::vector<int>& lengths, int page, int rows = 1,
                 uint32_t constant = 0) {
    const nvb_attention_decode_params base = params(row, lengths, page, rows);
    const size_t tensor =
        (size_t(row.batch) * row.kv_heads * base.capacity * row.d * (variant != nullptr && variant->fp8 ? 1 : 2) +
         4095) /
        4096 * 4096;
    const int rotation = std::max<int>(
        1,
        std::min<int64_t>(2 * tensor >= 600000000 ? 1 : (200 << 20) / (2 * tensor) + 1, memory_bytes / (2 * tensor)));
    const auto call = [&](int i) {
      nvb_attention_decode_params p = base;
      p.key = memory + 2 * tensor * i, p.value = memory + 2 * tensor * i + tensor;
      return variant != nullptr ? launch_new(*variant, p, workspace, 0, launch)
                                : launch_old(p, workspace, constant, launch);
    };
    double bytes = 0;
    for (const int length : lengths) bytes += 4.0 * length * row.kv_heads * row.d;
    return time(call, rotation, bytes / 4.2e6);
  }

  void read_rates() {
    std::printf("empty kernel: %.2f us a call in a graph\n", time(
                                                                 [&](int) {
                                                                   launch_overlapped(nothing, dim3(132), dim3(288), 0,
                                                                                     &launch);
                                                                   return cudaGetLastError();
                                                                 },
                                                                 1, 2));
    MUST(cudaFuncSetAttribute(read_only, cudaFuncAttributeMaxDynamicSharedMemorySize, 226 << 10));
    for (const size_t bytes : {size_t{8} << 20, size_t{16} << 20, size_t{128} << 20, size_t{1} << 30}) {
      std::printf("reading %4zu MiB, TB/s:", bytes >> 20);
      for (const int piece : {512, 1024, 2048, 4096}) {
        for (const int kib : {64, 104, 200}) {
          const int stages = std::min(64, (kib << 10) / (16 * (piece + 16)));
          if (stages < 1) continue;
          const int shared = stages * 16 * (piece + 16);
          const int rotation = bytes >= 600000000 ? 1 : (200 << 20) / bytes + 1;
          const double us = time(
              [&](int i) {
                return launch_overlapped(read_only, dim3(launch.multiprocessors), dim3(32), shared, &launch,
                                         static_cast<const unsigned char*>(memory + bytes * i), bytes, piece, stages);
              },
              rotation, bytes / 4.2e6);
          std::printf(" %d/%dK %.2f (%.1f us)", piece, kib, bytes / us * 1e-6, us);
        }
      }
      std::printf("\n");
    }
  }

  void table_of_rows(const std::string& filter) {
    const bool pages = std::getenv("NVB_PAGES") != nullptr;
    for (const Row& row : kRows) {
      const std::vector<int> lengths(row.batch, row.length);
      const double bytes = 4.0 * row.batch * row.length * row.kv_heads * row.d;
      const double old = measure(nullptr, row, lengths, 0), old_paged = measure(nullptr, row, lengths, 16);
      std::printf("d=%d %d/%d b=%d kv=%d: 8.0 %.1f us, %.2f of the peer, pages of 16 %.2f\n", row.d, row.query_heads,
                  row.kv_heads, row.batch, row.length, old, bytes / old * 1e-6 / row.peer, old / old_paged);
      for (const uint32_t constant : {kOldConstant, kKeysConstant}) {
        const double early = measure(nullptr, row, lengths, 0, 1, constant);
        std::printf("   %-20s %8.1f us %.3f TB/s, %.2f of the peer\n", constant == kOldConstant ? "8.0 old" : "8.0 K",
                    early, bytes / early * 1e-6, bytes / early * 1e-6 / row.peer);
      }
      for (const Variant& variant : kVariants) {
        if (variant.head_dim != row.d || variant.rows > 8 || variant.fp8 || !is_asked(variant, filter)) continue;
        const double us = measure(&variant, row, lengths, 0);
        const double paged = pages ? measure(&variant, row, lengths, 16) : us;
        std::printf("   %-20s %8.1f us %.3f TB/s, %.2f of the peer, pages of 16 %.2f\n", variant.name, us,
                    bytes / us * 1e-6, bytes / us * 1e-6 / row.peer, us / paged);
      }
      std::fflush(stdout);
    }
  }

  void unequal_lengths(const std::string& filter) {
    for (const int d : {128, 64, 256}) {
      const Row row{d, 32, 8, 32, 4096, 0};
      std::vector<int> lengths;
      double sum = 0;
      for (int i = 0; i < 32; ++i) {
        lengths.push_back(static_cast<int>(128 * std::pow(128.0, i / 31.0)));
        sum += lengths.back();
      }
      std::shuffle(lengths.begin(), lengths.end(), std::mt19937(5));
      const std::vector<int> equal(32, static_cast<int>(sum / 32));
      const auto line = [&](const Variant* variant) {
        const double one = measure(variant, row, lengths, 0), other = measure(variant, row, equal, 0);
        std::printf("unequal d=%d %-20s %.1f us, equal %.1f us: %.2f of the rate\n", d,
                    variant != nullptr ? variant->name : "8.0", one, other, sum / one / (equal[0] * 32.0 / other));
      };
      line(nullptr);
      for (const Variant& variant : kVariants) {
        if (variant.head_dim == d && variant.rows <= 8 && !variant.fp8 && is_asked(variant, filter)) line(&variant);
      }
      std::fflush(stdout);
    }
  }

  void rows_of_a_sequence(const std::string& filter) {
    for (const int d : {128, 64, 256}) {
      for (const int batch : {64, 1}) {
        const Row row{d, d == 256 ? 16 : 32, 8, batch, 4096, 0};
        const std::vector<int> lengths(batch, 4096);
        const double one = measure(nullptr, row, lengths, 0), four = measure(nullptr, row, lengths, 0, 4);
        std::printf("4 queries d=%d b=%d: 8.0 %.1f us, one query %.1f us\n", d, batch, four, one);
        for (const Variant& variant : kVariants) {
          if (variant.head_dim != d || variant.rows < 16 || variant.fp8 || !is_asked(variant, filter)) continue;
          std::printf("   %-20s %.1f us\n", variant.name, measure(&variant, row, lengths, 0, 4));
        }
        std::fflush(stdout);
      }
    }
  }

  void fp8(const std::string& filter) {
    fill_fp8<<<2048, 256>>>(reinterpret_cast<uint32_t*>(memory), memory_bytes / 4);
    MUST(cudaDeviceSynchronize());
    for (const Row& row : {Row{128, 32, 8, 64, 4096, 0}, Row{128, 32, 8, 1, 4096, 0}, Row{128, 32, 8, 1, 32768, 0},
                           Row{128, 32, 8, 128, 1024, 0}, Row{256, 16, 8, 64, 4096, 0}, Row{256, 16, 8, 1, 4096, 0}}) {
      const std::vector<int> lengths(row.batch, row.length);
      std::printf("fp8 d=%d b=%d kv=%d\n", row.d, row.batch, row.length);
      for (const Variant& variant : kVariants) {
        if (variant.head_dim != row.d || !variant.fp8 || variant.e5m2 || !is_asked(variant, filter)) continue;
        const double us = measure(&variant, row, lengths, 0), paged = measure(&variant, row, lengths, 16);
        const double four = row.d == 128 && variant.rows == 16 ? measure(&variant, row, lengths, 0, 4) : 0;
        std::printf("   %-20s %.1f us, pages of 16 %.2f, 4 queries %.1f us\n", variant.name, us, us / paged, four);
      }
      std::fflush(stdout);
    }
  }
};

}  // namespace decode_test

#endif
