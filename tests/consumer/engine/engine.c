/* The smallest engine in C: it checks that library and header belong together, and works on a backend. */
#include <nvbackend.h>
#include <stdio.h>

int main(void) {
  if (nvb_abi_version() != NVB_ABI_VERSION || nvb_version_number() != NVB_VERSION_NUMBER) {
    fprintf(stderr, "header %s, library %s\n", NVB_VERSION_STRING, nvb_version_string());
    return 1;
  }
  nvb_backend_options options;
  nvb_backend_options_init(&options);
  options.device = "cpu";
  nvb_backend* backend = NULL;
  if (nvb_backend_create(&options, &backend) != NVB_OK) {
    char text[512];
    nvb_last_error_message(text, sizeof text);
    fprintf(stderr, "%s\n", text);
    return 1;
  }
  void* memory = NULL;
  const nvb_status status = nvb_host_allocate(backend, 4096, &memory);
  if (status == NVB_OK) nvb_host_free(backend, memory, 4096);
  nvb_backend_destroy(backend);
  return status != NVB_OK;
}
