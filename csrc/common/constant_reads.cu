// The mark of constant_reads.h.
#include "constant_reads.h"

namespace {
thread_local uint32_t constant_reads = 0;
}

extern "C" void nvb_cuda_set_constant_reads(uint32_t reads) noexcept {
  constant_reads = reads;
}

extern "C" uint32_t nvb_cuda_constant_reads() noexcept {
  return constant_reads;
}
