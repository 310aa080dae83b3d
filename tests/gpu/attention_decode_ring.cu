// The decode attention of compute capability 9.0 on a device: its results beside the formula in f64, and its speed.
#include "attention_decode_bench.h"
#include "attention_decode_check.h"

using namespace decode_test;

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "all";
  const std::string filter = argc > 2 ? argv[2] : "";
  if (mode == "list") {
    for (const Variant& variant : kVariants) std::printf("%s\n", variant.name);
    std::printf("8.0\n8.0 old\n8.0 K\n");
    return 0;
  }
  int failures = 0;
  if (mode == "check" || mode == "all") failures = check(filter);
  if (mode == "bench" || mode == "all") {
    Bench bench;
    if (filter.empty() || filter == "read") bench.read_rates();
    if (filter == "read") return 0;
    bench.rows_of_a_sequence(filter);
    bench.unequal_lengths(filter);
    bench.table_of_rows(filter);
    bench.fp8(filter);
  }
  return failures != 0;
}
