// A deliberate fault on the device: a kernel of the library writes 16 KiB into a block of 256 bytes that the driver
// gave out, which the library cannot know the size of. Run under compute-sanitizer it must be reported; that proves
// that the tool watches the library's kernels. Without a GPU there is nothing to prove, and it says so.
#include <dlfcn.h>
#include <nvbackend.h>
#include <stdint.h>
#include <stdio.h>

typedef int (*context_retain)(void** context, int device);
typedef int (*context_set)(void* context);
typedef int (*memory_allocate)(uint64_t* pointer, size_t bytes);

int main(void) {
  nvb_backend* backend = NULL;
  nvb_backend_options options;
  nvb_backend_options_init(&options);
  options.device = "cuda:0";
  if (nvb_backend_create(&options, &backend) != NVB_OK) {
    char text[512];
    nvb_last_error_message(text, sizeof text);
    printf("skipped: %s\n", text);
    return 0;
  }
  void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (driver == NULL) return 1;
  context_retain retain;
  context_set set;
  memory_allocate allocate;
  *(void**)&retain = dlsym(driver, "cuDevicePrimaryCtxRetain");
  *(void**)&set = dlsym(driver, "cuCtxSetCurrent");
  *(void**)&allocate = dlsym(driver, "cuMemAlloc_v2");
  void* context = NULL;
  uint64_t block = 0;
  if (retain(&context, 0) != 0 || set(context) != 0 || allocate(&block, 256) != 0) return 1;

  nvb_elementwise_args args;
  nvb_elementwise_args_init(&args);
  args.input = args.output = nvb_tensor_1d((void*)(uintptr_t)block, NVB_DTYPE_F32, 4096);
  args.factor = 2;
  const nvb_status launched = nvb_scale(backend, &args, NULL);
  printf("nvb_scale past a block: %s\n", nvb_status_name(launched));
  nvb_backend_destroy(backend);
  return 0;
}
