// Holds the kernels of sort_rows, sum_rows and l2_norm against the CPU on a device without Rust, and times the sort
// where the argument is `bench`. tests/gpu/rows.sh builds it. Exits with 1 and names the case where a result is wrong.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "device.h"
#include "l2_norm/l2_norm.h"
#include "sort_rows/sort_rows.h"
#include "sum_rows/sum_rows.h"

namespace {

std::mt19937 random_source(17);
int checked = 0;

template <typename T>
T* upload(const std::vector<T>& values) {
  T* device = nullptr;
  MUST(cudaMalloc(&device, std::max<size_t>(values.size(), 1) * sizeof(T)));
  MUST(cudaMemcpy(device, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return device;
}

template <typename T>
std::vector<T> download(const T* device, size_t count) {
  std::vector<T> values(count);
  MUST(cudaDeviceSynchronize());
  MUST(cudaMemcpy(values.data(), device, count * sizeof(T), cudaMemcpyDeviceToHost));
  return values;
}

[[noreturn]] void wrong(const char* what, int64_t rows, int64_t columns, int64_t at) {
  std::printf("WRONG: %s of %lld rows of %lld, element %lld\n", what, static_cast<long long>(rows),
              static_cast<long long>(columns), static_cast<long long>(at));
  std::exit(1);
}

// Ties, zeros of both signs, infinities and NaN among numbers.
std::vector<float> hard_values(int64_t count) {
  std::normal_distribution<float> normal(0.0f, 3.0f);
  std::vector<float> values(count);
  for (float& value : values) {
    const float number = normal(random_source);
    const unsigned kind = random_source() % 16;
    value = kind < 6 ? std::trunc(number) : kind == 6 ? -0.0f : kind == 7 ? 0.0f : number;
    if (kind == 8) value = random_source() % 2 != 0 ? NAN : -NAN;
    if (kind == 9) value = random_source() % 2 != 0 ? INFINITY : -INFINITY;
  }
  return values;
}

void strides_of(int64_t rows, int64_t row_stride, int64_t column_stride, int64_t (&strides)[4]) {
  strides[0] = strides[1] = rows * row_stride;
  strides[2] = row_stride;
  strides[3] = column_stride;
}

nvb_sort_rows_params sort_of(const float* input, int32_t* output, int64_t rows, int64_t columns, int64_t pitch,
                             int64_t count, bool descending) {
  nvb_sort_rows_params p = {};
  p.input = input;
  p.output = output;
  p.shape[0] = p.shape[1] = 1;
  p.shape[2] = rows;
  p.shape[3] = columns;
  strides_of(rows, pitch, 1, p.input_strides);
  strides_of(rows, count, 1, p.output_strides);
  p.count = count;
  p.input_dtype = NVB_F32;
  p.descending = descending;
  return p;
}

void check_sort(const nvb_launch& launch, int64_t rows, int64_t columns, int64_t count, bool descending) {
  const int64_t pitch = columns + 3;
  const std::vector<float> values = hard_values(rows * pitch);
  float* input = upload(values);
  int32_t* output = upload(std::vector<int32_t>(rows * count, -1));
  const nvb_sort_rows_params p = sort_of(input, output, rows, columns, pitch, count, descending);
  MUST(nvb_cuda_sort_rows(&p, &launch));
  const std::vector<int32_t> found = download(output, rows * count);
  std::vector<int32_t> order(columns);
  for (int64_t row = 0; row < rows; ++row) {
    const float* x = &values[row * pitch];
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      if (std::isnan(x[a]) || std::isnan(x[b])) return !std::isnan(x[a]) && std::isnan(x[b]);
      return descending ? x[a] > x[b] : x[a] < x[b];
    });
    for (int64_t i = 0; i < count; ++i) {
      if (found[row * count + i] != order[i]) wrong("sort", rows, columns, row * count + i);
    }
  }
  MUST(cudaFree(input));
  MUST(cudaFree(output));
  ++checked;
}

// A column stride of 1, or rows and columns exchanged.
void check_sums_and_norms(const nvb_launch& launch, int64_t rows, int64_t columns, bool exchanged, float magnitude) {
  std::normal_distribution<float> normal(0.0f, 1.0f);
  std::vector<float> values(rows * columns);
  for (float& value : values) value = normal(random_source) * magnitude;
  float* input = upload(values);
  float* sums = upload(std::vector<float>(rows, NAN));
  float* norms = upload(std::vector<float>(rows * columns, NAN));
  const int64_t row_stride = exchanged ? 1 : columns, column_stride = exchanged ? rows : 1;
  nvb_sum_rows_params sum = {};
  nvb_l2_norm_params norm = {};
  sum.input = norm.input = input;
  sum.output = sums;
  norm.output = norms;
  for (int64_t* shape : {sum.shape, norm.shape}) {
    shape[0] = shape[1] = 1;
    shape[2] = rows;
    shape[3] = columns;
  }
  strides_of(rows, row_stride, column_stride, sum.input_strides);
  strides_of(rows, row_stride, column_stride, norm.input_strides);
  strides_of(rows, row_stride, column_stride, norm.output_strides);
  strides_of(rows, 1, 1, sum.output_strides);
  sum.input_dtype = sum.output_dtype = norm.input_dtype = norm.output_dtype = NVB_F32;
  sum.scale = 0.5f;
  norm.epsilon = 1e-12f;
  MUST(nvb_cuda_sum_rows(&sum, &launch));
  const std::vector<float> found = download(sums, rows);
  if (columns != 0) MUST(nvb_cuda_l2_norm(&norm, &launch));
  const std::vector<float> normed = download(norms, rows * columns);
  for (int64_t row = 0; row < rows; ++row) {
    double total = 0.0, absolute = 0.0, squares = 0.0;
    const auto at = [&](int64_t column) { return row * row_stride + column * column_stride; };
    for (int64_t column = 0; column < columns; ++column) {
      const double x = values[at(column)];
      total += x;
      absolute += std::fabs(x);
      squares += x * x;
    }
    if (!(std::fabs(found[row] - 0.5 * total) <= 1e-6 * absolute)) wrong("sum", rows, columns, row);
    const double divisor = std::max(std::sqrt(squares), 1e-12);
    for (int64_t column = 0; column < columns; ++column) {
      const double expected = values[at(column)] / divisor;
      if (!(std::fabs(normed[at(column)] - expected) <= 1e-6 * std::fabs(expected) + 1e-37)) {
        wrong("norm", rows, columns, at(column));
      }
    }
  }
  MUST(cudaFree(input));
  MUST(cudaFree(sums));
  MUST(cudaFree(norms));
  ++checked;
}

void time_sort(const nvb_launch& launch, int64_t rows, int64_t columns, int64_t count) {
  float* input = upload(hard_values(rows * columns));
  int32_t* output = upload(std::vector<int32_t>(rows * count, -1));
  const nvb_sort_rows_params p = sort_of(input, output, rows, columns, columns, count, true);
  cudaEvent_t start, end;
  MUST(cudaEventCreate(&start));
  MUST(cudaEventCreate(&end));
  float best = std::numeric_limits<float>::max();
  for (int repeat = 0; repeat < 7; ++repeat) {
    MUST(cudaEventRecord(start, launch.stream));
    MUST(nvb_cuda_sort_rows(&p, &launch));
    MUST(cudaEventRecord(end, launch.stream));
    MUST(cudaEventSynchronize(end));
    float milliseconds = 0.0f;
    MUST(cudaEventElapsedTime(&milliseconds, start, end));
    best = std::min(best, milliseconds);
  }
  std::printf("sort, %6lld rows of %7lld, first %7lld: %10.1f us\n", static_cast<long long>(rows),
              static_cast<long long>(columns), static_cast<long long>(count), best * 1000.0f);
  MUST(cudaFree(input));
  MUST(cudaFree(output));
}

}  // namespace

int main(int argument_count, char** arguments) {
  cudaStream_t stream;
  MUST(cudaStreamCreate(&stream));
  const nvb_launch launch = gpu::device_launch(stream);
  for (const bool descending : {false, true}) {
    for (const int64_t columns : {1, 2, 3, 31, 32, 33, 64, 127, 128, 1000, 1024, 1025, 4095, 4096, 4097, 9001, 33024}) {
      for (const int64_t count : {int64_t{1}, (columns + 1) / 2, columns}) {
        check_sort(launch, columns > 5000 ? 2 : 7, columns, count, descending);
      }
    }
    check_sort(launch, 70000, 8, 8, descending);
  }
  for (const int64_t columns : {0, 1, 2, 31, 32, 33, 255, 257, 1025, 70001}) {
    for (const bool exchanged : {false, true}) {
      for (const float magnitude : {1.0f, 0.0f, 1e-30f, 1e30f})
        check_sums_and_norms(launch, 5, columns, exchanged, magnitude);
    }
  }
  check_sums_and_norms(launch, 70000, 3, false, 1.0f);
  std::printf("%d cases are right\n", checked);
  if (argument_count < 2 || std::strcmp(arguments[1], "bench") != 0) return 0;
  time_sort(launch, 512, 128, 128);
  time_sort(launch, 512, 2048, 2048);
  time_sort(launch, 512, 4096, 4096);
  time_sort(launch, 16, 8192, 8192);
  time_sort(launch, 1, 65536, 64);
  time_sort(launch, 1, 262144, 64);
  time_sort(launch, 16, 202048, 32);
  time_sort(launch, 1, 1048576, 1048576);
  return 0;
}
