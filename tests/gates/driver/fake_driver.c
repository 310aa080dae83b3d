// A CUDA driver of five functions, each of which checks that its arguments arrived. Status 0 says that they did.
#include <stdint.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, NEWER_THAN_CUST = 721 };

typedef struct {
  unsigned char bytes[64];
} memory_handle;

int cuInit(unsigned flags) {
  return flags == 7 ? SUCCESS : INVALID_VALUE;
}

int cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream, void** parameters,
                   void** extra) {
  const uintptr_t seen[] = {(uintptr_t)function,
                            grid_x,
                            grid_y,
                            grid_z,
                            block_x,
                            block_y,
                            block_z,
                            shared_bytes,
                            (uintptr_t)stream,
                            (uintptr_t)parameters,
                            (uintptr_t)extra};
  for (unsigned i = 0; i < 11; ++i) {
    if (seen[i] != i + 1) return INVALID_VALUE;
  }
  return SUCCESS;
}

int cuTexRefSetMipmapLevelClamp(void* reference, float minimum, float maximum) {
  return reference == (void*)9 && minimum == 0.25f && maximum == -3.5f ? SUCCESS : INVALID_VALUE;
}

int cuIpcOpenMemHandle_v2(uint64_t* address, memory_handle handle, unsigned flags) {
  for (unsigned i = 0; i < 64; ++i) {
    if (handle.bytes[i] != 200 - i) return INVALID_VALUE;
  }
  *address = 11;
  return flags == 5 ? SUCCESS : INVALID_VALUE;
}

int cuStreamQuery(void* stream) {
  (void)stream;
  return NEWER_THAN_CUST;
}
