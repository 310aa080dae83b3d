// device_info: prints what the library was built with and which devices it finds, or why it finds none.
#include <inttypes.h>
#include <nvbackend.h>
#include <stdio.h>

static void print_error(const char* what) {
  char text[1024];
  nvb_last_error_message(text, sizeof text);
  fprintf(stderr, "%s: %s\n", what, text);
}

static void print_device(const nvb_device_info* info) {
  const double gib = 1024.0 * 1024.0 * 1024.0;
  if (info->kind == NVB_DEVICE_CPU) {
    printf("cpu: %s, %" PRId32 " threads, %.1f GiB\n", info->name, info->multiprocessors,
           (double)info->total_memory / gib);
    return;
  }
  printf("cuda:%" PRId32 ": %s, compute capability %" PRId32 ".%" PRId32 ", %" PRId32
         " multiprocessors, %.1f GiB, L2 %.1f MiB, driver for CUDA %" PRId32 ".%" PRId32 "\n",
         info->ordinal, info->name, info->compute_capability / 10, info->compute_capability % 10, info->multiprocessors,
         (double)info->total_memory / gib, (double)info->l2_bytes / (1024.0 * 1024.0), info->driver_version / 1000,
         info->driver_version % 1000 / 10);
}

int main(void) {
  nvb_build_info build;
  nvb_build_info_init(&build);
  if (nvb_get_build_info(&build) != NVB_OK) {
    print_error("nvb_get_build_info");
    return 1;
  }
  printf("nvbackend %s, ABI %" PRIu32 "\n", nvb_version_string(), nvb_abi_version());
  if (build.cuda) {
    printf("built with CUDA %" PRIu32 ".%" PRIu32 " for %s\n", build.cuda_toolkit_version / 1000,
           build.cuda_toolkit_version % 1000 / 10, build.architectures);
  } else {
    printf("built for the CPU alone\n");
  }

  // No GPU is a normal answer, not a failure of this program.
  int32_t count = 0;
  if (nvb_cuda_get_device_count(&count) != NVB_OK) {
    char text[1024];
    nvb_last_error_message(text, sizeof text);
    printf("no CUDA device: %s\n", text);
  }
  for (int32_t ordinal = 0; ordinal < count; ++ordinal) {
    nvb_device_info info;
    nvb_device_info_init(&info);
    if (nvb_cuda_get_device_info(ordinal, &info) != NVB_OK) {
      print_error("nvb_cuda_get_device_info");
      return 1;
    }
    print_device(&info);
  }

  // What an engine gets that leaves the choice to the library.
  nvb_backend* backend = NULL;
  if (nvb_backend_create(NULL, &backend) != NVB_OK) {
    print_error("nvb_backend_create");
    return 1;
  }
  nvb_device_info chosen;
  nvb_device_info_init(&chosen);
  const nvb_status status = nvb_backend_get_device_info(backend, &chosen);
  if (status == NVB_OK) {
    printf("chosen for \"auto\": ");
    print_device(&chosen);
  } else {
    print_error("nvb_backend_get_device_info");
  }
  nvb_backend_destroy(backend);
  return status == NVB_OK ? 0 : 1;
}
