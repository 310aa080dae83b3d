#include "fp8.h"

#include <cstdio>

namespace gemma {

void convert_fp8(nvb::graph& graph, nvb_stream* stream, float bound, const char* pass) {
  auto options = nvb::make<nvb_graph_fp8_options>();
  options.maximum_error = bound;
  options.measure_errors = options.measure_times = 1;
  options.stream = stream;
  nvb_status status = nvb_graph_convert_fp8(graph.get(), &options);
  if (status == NVB_ERROR_FP8) {
    char text[512];
    nvb_last_error_message(text, sizeof text);
    std::fprintf(stderr, "fp8 %s: %s; weights alone\n", pass, text);
    options.storage_only = 1;
    status = nvb_graph_convert_fp8(graph.get(), &options);
  }
  nvb::check(status);
  auto info = nvb::make<nvb_graph_fp8_info>();
  nvb::check(nvb_graph_get_fp8_info(graph.get(), &info));
  constexpr double kMiB = 1024 * 1024;
  std::fprintf(stderr,
               "fp8 %s: %u of %u products with %.1f %% of their operations, weights of %.0f for %.0f MiB, error of the "
               "worst output %.2g, a launch %.3f for %.3f ms, %.2f x as fast\n",
               pass, info.converted, info.products, 100 * info.converted_operations / info.operations,
               static_cast<double>(info.weight_bytes_after) / kMiB,
               static_cast<double>(info.weight_bytes_before) / kMiB, info.error, 1e3 * info.seconds_after,
               1e3 * info.seconds_before, info.seconds_before / info.seconds_after);
}

}  // namespace gemma
