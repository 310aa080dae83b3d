// The calls of the CUDA driver that the peers need, found at run time so that the program starts without one.
#pragma once
#include <cstddef>
#include <cstdint>

class Driver {
 public:
  static constexpr unsigned kNonBlocking = 1;  // CU_STREAM_NON_BLOCKING
  static constexpr int kReleaseThreshold = 4;  // CU_MEMPOOL_ATTR_RELEASE_THRESHOLD

  // Opens libcuda.so.1 with the first call; ends the program if there is none.
  static const Driver& get();
  // Fails unless the status is CUDA_SUCCESS.
  void expect(int status, const char* what) const;
  // Makes the device's primary context the calling thread's.
  void attach(int ordinal) const;

  int (*init)(unsigned);
  int (*retain_context)(void**, int);
  int (*set_context)(void*);
  int (*stream_create)(void**, unsigned);
  int (*stream_destroy)(void*);
  int (*stream_synchronize)(void*);
  int (*get_default_pool)(void**, int);
  int (*pool_set_attribute)(void*, int, void*);
  int (*pool_trim)(void*, size_t);
  int (*allocate_async)(uint64_t*, size_t, void*);
  int (*free_async)(uint64_t, void*);
  int (*allocate)(uint64_t*, size_t);
  int (*free)(uint64_t);

 private:
  Driver();
};
