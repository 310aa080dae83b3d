// What GCC's -fsanitize-coverage=trace-pc calls in each block of the reader: libFuzzer takes the counts from this
// section. Its own function of that name does nothing, so the linker is told to --wrap it.
#include <stdint.h>

enum { COUNTERS = 1 << 14 };
__attribute__((section("__libfuzzer_extra_counters"))) static uint8_t counters[COUNTERS];

void __wrap___sanitizer_cov_trace_pc(void) {
  const uintptr_t address = (uintptr_t)__builtin_return_address(0);
  uint8_t* const counter = &counters[(address ^ address >> 14) % COUNTERS];
  if (*counter < UINT8_MAX) ++*counter;
}

// GCC reports comparisons of floats as well, which libFuzzer has no use for.
void __sanitizer_cov_trace_cmpf(float left, float right) {
  (void)left, (void)right;
}

void __sanitizer_cov_trace_cmpd(double left, double right) {
  (void)left, (void)right;
}
