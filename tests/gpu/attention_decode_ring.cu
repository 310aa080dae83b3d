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
  if (mode == "check") return failures != 0;
  Bench bench;
  const auto is_asked = [&](const char* part) { return mode == "all" || mode == "bench" || mode == part; };
  if (is_asked("read")) bench.read_rates();
  if (is_asked("table")) bench.table_of_rows(filter);
  if (is_asked("queries")) bench.rows_of_a_sequence(filter);
  if (is_asked("unequal")) bench.unequal_lengths(filter);
  if (is_asked("fp8")) bench.fp8(filter);
  return failures != 0;
}
