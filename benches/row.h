// What benches/record.py reads: the device and the versions first, then a row a line, as JSON on standard output.
#ifndef NVB_BENCHES_ROW_H
#define NVB_BENCHES_ROW_H

#include <nvbackend.h>
#include <stdio.h>

// All processors have one record, "cpu", which names the processor among the versions.
static inline void print_run(const nvb_device_info* device) {
  nvb_build_info build;
  nvb_build_info_init(&build);
  if (nvb_get_build_info(&build) != NVB_OK) return;
  if (device->kind == NVB_DEVICE_CPU) {
    printf("{\"device\": \"cpu\", \"versions\": {\"nvbackend\": \"%s\", \"processor\": \"%s\"}}\n",
           nvb_version_string(), device->name);
  } else {
    printf("{\"device\": \"%s\", \"versions\": {\"nvbackend\": \"%s\", \"kernels\": \"%s\", \"CUDA\": \"%u.%u\"}}\n",
           device->name, nvb_version_string(), build.architectures, build.cuda_toolkit_version / 1000,
           build.cuda_toolkit_version % 1000 / 10);
  }
  fflush(stdout);
}

#endif
