// The kernel that quantises to Int4 gives the codes, scales and zero points of the CPU executor, bit for bit: run lane
// by lane on the CPU (warp.h), and compared by the values that they stand for.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <nvbackend.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "quantize.h"

namespace nvb::quantize {
cudaError_t launch_int4(const nvb_quantize_params& params, const nvb_launch& launch);
}

// What a launcher asks the CUDA runtime, which the test does not link.
extern "C" cudaError_t cudaPeekAtLastError() {
  return cudaSuccess;
}

namespace {

int failures = 0;

void expect(nvb_status status, const char* what) {
  if (status == NVB_OK) return;
  char text[1024];
  nvb_last_error_message(text, sizeof text);
  std::fprintf(stderr, "%s: %s\n", what, text);
  std::exit(1);
}

enum class Values { kNormal, kOutliers, kSkewed, kSubnormalScales, kLarge, kFew };

struct Case {
  uint32_t dtype;
  std::vector<int64_t> parts;
  int64_t columns;
  uint32_t group;
  bool zero_points, clipping, gated;
  Values values;

  std::string text() const {
    std::string rows;
    for (const int64_t part : parts) rows += " " + std::to_string(part);
    return "dtype " + std::to_string(dtype) + ", rows" + rows + ", columns " + std::to_string(columns) + ", group " +
           std::to_string(group) + (zero_points ? ", zero points" : "") + (clipping ? ", clipping" : "") +
           (gated ? ", gated" : "") + ", values " + std::to_string(static_cast<int>(values));
  }
};

float draw(Values values, std::mt19937& numbers, int64_t column) {
  const float normal = std::normal_distribution<float>()(numbers);
  switch (values) {
    case Values::kNormal:
      return 0.02f * normal;
    case Values::kOutliers:
      return 0.02f * normal * (numbers() % 29 == 0 ? 40.0f : 1.0f);
    case Values::kSkewed:
      return 3.0f + 0.1f * normal;
    case Values::kSubnormalScales:
      return 2e-6f * normal;
    case Values::kLarge:
      return 1.2e4f * normal;
    case Values::kFew:
      // Groups of zeros, of one value, and of two.
      return column / 32 % 3 == 0 ? 0.0f : column / 32 % 3 == 1 ? 0.75f : column % 2 == 0 ? -3.0f : 1e-6f;
  }
  return 0.0f;
}

// A matrix in its dtype, with a pitch that leaves odd rows unaligned.
struct Source {
  std::vector<unsigned char> bytes;
  int64_t stride;
};

Source make_source(const Case& c, int64_t rows, std::mt19937& numbers) {
  const size_t size = c.dtype == NVB_DTYPE_F32 ? 4 : 2;
  Source source;
  source.stride = c.columns + (c.columns % 3 == 0 ? 3 : 0);
  source.bytes.resize(size * static_cast<size_t>(rows * source.stride));
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < c.columns; ++column) {
      const float value = draw(c.values, numbers, column);
      unsigned char* const to = source.bytes.data() + size * static_cast<size_t>(row * source.stride + column);
      const __half half = __float2half_rn(value);
      const __nv_bfloat16 brain = __float2bfloat16_rn(value);
      const void* const from = c.dtype == NVB_DTYPE_F32   ? static_cast<const void*>(&value)
                               : c.dtype == NVB_DTYPE_F16 ? static_cast<const void*>(&half)
                                                          : static_cast<const void*>(&brain);
      std::memcpy(to, from, size);
    }
  }
  return source;
}

int64_t total(const std::vector<int64_t>& parts) {
  int64_t rows = 0;
  for (const int64_t part : parts) rows += part;
  return rows;
}

// The values of the weight that the kernel writes, and the error that it reports.
std::vector<float> by_the_kernel(const Case& c, const std::vector<Source>& sources, double* error) {
  const int64_t rows = total(c.parts), tile_rows = (rows + 15) / 16, tiles = (c.columns + 63) / 64;
  const int64_t groups = (c.columns + c.group - 1) / c.group;
  std::vector<uint32_t> data(static_cast<size_t>(tile_rows * tiles * 128));
  std::vector<__half2> scales(static_cast<size_t>(tile_rows * groups * 8)), offsets(scales.size());
  nvb_quantize_report report = {};
  nvb_quantize_params params = {};
  params.matrix.data = data.data();
  params.matrix.scales = scales.data();
  params.matrix.zero_points = c.zero_points ? offsets.data() : nullptr;
  params.matrix.rows = rows;
  params.matrix.columns = c.columns;
  params.matrix.encoding = NVB_INT4;
  params.matrix.scale_kind = NVB_SCALES_GROUPS;
  params.matrix.group = c.group;
  params.part_count = static_cast<uint32_t>(c.parts.size());
  params.gated = c.gated;
  params.input_dtype = c.dtype;
  params.clipping = c.clipping;
  params.report = &report;
  for (size_t i = 0; i < c.parts.size(); ++i) {
    params.parts[i].data = sources[i].bytes.data();
    params.parts[i].rows = c.parts[i];
    params.parts[i].stride = sources[i].stride;
  }
  nvb_launch launch = {};
  if (nvb::quantize::launch_int4(params, launch) != cudaSuccess || report.flags != 0) {
    std::fprintf(stderr, "%s: the kernel refuses, or has flags %u\n", c.text().c_str(), report.flags);
    ++failures;
  }
  *error = report.norm > 0 ? std::sqrt(report.difference / report.norm) : 0;

  std::vector<float> values(static_cast<size_t>(rows * c.columns));
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t k = 0; k < c.columns; ++k) {
      // csrc/common/quantized.h says where a code lies.
      const int64_t tile = row / 16 * tiles + k / 64, in_tile = k % 64, lane = row % 8 * 4 + in_tile % 16 / 4;
      const uint32_t word = data[static_cast<size_t>(tile * 128 + lane * 4 + in_tile / 16)];
      const int64_t nibble = 2 * (in_tile % 4 / 2) + row % 16 / 8 + 4 * (in_tile % 2);
      const float code = static_cast<float>(word >> (4 * nibble) & 15u);
      const size_t at = static_cast<size_t>((row / 16 * groups + k / c.group) * 8 + row % 8);
      const bool second = row % 16 / 8 == 1;
      const float scale = __half2float(second ? scales[at].y : scales[at].x);
      const float offset = __half2float(second ? offsets[at].y : offsets[at].x);
      values[static_cast<size_t>(row * c.columns + k)] = c.zero_points ? scale * code + offset : scale * (code - 8.0f);
    }
  }
  return values;
}

std::vector<float> by_the_library(nvb_backend* backend, const Case& c, std::vector<Source>& sources, double* error) {
  std::vector<nvb_tensor> parts;
  for (size_t i = 0; i < c.parts.size(); ++i) {
    parts.push_back(nvb_tensor_2d(sources[i].bytes.data(), c.dtype, c.parts[i], c.columns));
    parts.back().strides[0] = sources[i].stride;
    parts.back().strides[1] = 1;
  }
  nvb_weight_desc desc;
  nvb_weight_desc_init(&desc);
  desc.parts = parts.data();
  desc.part_count = parts.size();
  desc.arrangement = c.gated ? NVB_WEIGHT_GATED : NVB_WEIGHT_STACKED;
  desc.format = NVB_WEIGHT_FORMAT_INT4;
  desc.granularity = NVB_GRANULARITY_GROUPS;
  desc.group_size = c.group;
  desc.zero_points = c.zero_points;
  desc.clipping = c.clipping;
  nvb_weight* weight = nullptr;
  expect(nvb_weight_create(backend, &desc, nullptr, &weight), "nvb_weight_create");
  std::vector<float> values(static_cast<size_t>(total(c.parts) * c.columns));
  const nvb_tensor output = nvb_tensor_2d(values.data(), NVB_DTYPE_F32, total(c.parts), c.columns);
  expect(nvb_weight_dequantize(weight, &output, nullptr), "nvb_weight_dequantize");
  nvb_weight_info info;
  nvb_weight_info_init(&info);
  expect(nvb_weight_get_info(weight, &info), "nvb_weight_get_info");
  *error = info.relative_error;
  expect(nvb_weight_destroy(weight), "nvb_weight_destroy");
  return values;
}

void compare(nvb_backend* backend, const Case& c, std::mt19937& numbers) {
  std::vector<Source> sources;
  for (const int64_t rows : c.parts) sources.push_back(make_source(c, rows, numbers));
  double error = 0, expected_error = 0;
  const std::vector<float> values = by_the_kernel(c, sources, &error);
  const std::vector<float> expected = by_the_library(backend, c, sources, &expected_error);
  size_t different = 0, first = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] != expected[i] && different++ == 0) first = i;
  }
  if (different > 0) {
    std::fprintf(stderr, "%s: %zu of %zu values differ; the first at row %lld, column %lld is %.9g, %.9g by the CPU\n",
                 c.text().c_str(), different, values.size(), static_cast<long long>(first) / c.columns,
                 static_cast<long long>(first) % c.columns, values[first], expected[first]);
    ++failures;
  }
  if (std::fabs(error - expected_error) > 1e-3 * expected_error + 1e-7) {
    std::fprintf(stderr, "%s: the relative error is %g, %g by the CPU\n", c.text().c_str(), error, expected_error);
    ++failures;
  }
}

}  // namespace

int main() {
  nvb_backend_options options;
  nvb_backend_options_init(&options);
  options.device = "cpu";
  nvb_backend* backend = nullptr;
  expect(nvb_backend_create(&options, &backend), "nvb_backend_create");
  std::mt19937 numbers(18);
  int cases = 0;
  const auto check = [&](const Case& c) {
    compare(backend, c, numbers);
    ++cases;
  };
  for (const bool zero_points : {false, true}) {
    for (const Values values : {Values::kNormal, Values::kOutliers, Values::kSkewed, Values::kSubnormalScales,
                                Values::kLarge, Values::kFew}) {
      for (const uint32_t group : {32u, 64u, 128u}) {
        // Half of the last group does not exist, nor do most of the second tile's rows.
        check({NVB_DTYPE_F32, {18}, 128 + group / 2, group, zero_points, true, false, values});
      }
      check({NVB_DTYPE_F32, {5}, 256, 32, zero_points, false, false, values});
    }
    for (const uint32_t dtype : {NVB_DTYPE_F16, NVB_DTYPE_BF16}) {
      check({dtype, {3, 1, 9}, 99, 32, zero_points, true, false, Values::kNormal});
      check({dtype, {7, 7}, 130, 64, zero_points, true, true, Values::kOutliers});
    }
    check({NVB_DTYPE_F32, {1}, 1, 32, zero_points, true, false, Values::kNormal});
  }
  expect(nvb_backend_destroy(backend), "nvb_backend_destroy");
  std::printf("%d weights, %d failures\n", cases, failures);
  return failures == 0 ? 0 : 1;
}
