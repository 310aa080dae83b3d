// Each field of a GPU's usage is NVML's value of that name: the fake NVML gives every value another number.
#include "../c/check.h"

int main(void) {
  nvb_device_info info;
  nvb_device_info_init(&info);
  CHECK_OK(nvb_hardware_get_device_info(0, &info));
  CHECK_EQUAL(info.kind, NVB_DEVICE_CUDA);
  nvb_device_usage usage;
  nvb_device_usage_init(&usage);
  CHECK_OK(nvb_hardware_get_usage(0, &usage));
  CHECK_EQUAL(usage.known, 0xfff);
  CHECK_EQUAL(usage.utilization, 11);
  CHECK_EQUAL(usage.memory_utilization, 12);
  CHECK_EQUAL(usage.memory_total, 21000);
  CHECK_EQUAL(usage.memory_used, 24000);
  CHECK_EQUAL(usage.temperature, 31);
  CHECK_EQUAL(usage.power, 41000);
  CHECK_EQUAL(usage.power_limit, 43000);
  CHECK_EQUAL(usage.clock, 52);
  CHECK_EQUAL(usage.memory_clock, 53);
  CHECK_EQUAL(usage.ecc_enabled, 1);
  CHECK_EQUAL(usage.ecc_corrected, 61);
  CHECK_EQUAL(usage.ecc_uncorrected, 62);
  CHECK_EQUAL(usage.throttle_reasons, 0x44);
  CHECK_EQUAL(usage.processes, 71);
  return test_result();
}
