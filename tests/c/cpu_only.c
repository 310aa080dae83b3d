// That the library at work was built without CUDA. The tests named *_cpu_only run after it: were their library not
// found, the loader would say so and take the one with CUDA.
#include "check.h"

int main(void) {
  int32_t count = -1;
  CHECK_FAILS(nvb_cuda_get_device_count(&count), NVB_ERROR_CUDA_NOT_AVAILABLE, "built without CUDA");
  CHECK_EQUAL(count, -1);
  return test_result();
}
