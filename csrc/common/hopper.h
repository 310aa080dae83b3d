// Where kernels for compute capability 9.0 alone run.
#pragma once

#include "launch.h"

namespace nvb {

// Whether kernels for compute capability 9.0 alone run: this build has them, and choices are made for such a device.
// (The build makes 9.0a of 9.0.)
inline bool is_hopper(const nvb_launch& launch) {
  constexpr int kArchitectures[] = {__CUDA_ARCH_LIST__};
  for (int architecture : kArchitectures) {
    if (architecture == 900) return launch.capability == 90;
  }
  return false;
}

}  // namespace nvb
