// How the host describes a matrix to the bulk tensor copies of compute capability 9.0.
#pragma once

#include <cuda.h>

#include "../driver/driver.h"

namespace nvb {

using TensorMapEncode = decltype(&cuTensorMapEncodeTiled);

// cuTensorMapEncodeTiled of the driver, or null.
inline TensorMapEncode tensor_map_encoder() noexcept {
  // Looked up once: the driver stays where it is.
  static const TensorMapEncode encode =
      reinterpret_cast<TensorMapEncode>(nvb_driver_function("cuTensorMapEncodeTiled"));
  return encode;
}

}  // namespace nvb
