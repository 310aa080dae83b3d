// libnvidia-ml.so.1 without a GPU: one board, whose every value is another number, so that no two can be taken for each
// other. What the library does not ask for today has a number of its own as well. Types and numbers are those of
// nvml.h.
#include <stddef.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };

typedef struct {
  unsigned gpu, memory;
} utilization;

typedef struct {
  unsigned version;
  unsigned long long total, reserved, free, used;
} memory_v2;

static int board;

static int give(unsigned* place, unsigned value) {
  *place = value;
  return SUCCESS;
}

int nvmlInit_v2(void) {
  return SUCCESS;
}

int nvmlShutdown(void) {
  return SUCCESS;
}

int nvmlSystemGetDriverVersion(char* text, unsigned bytes) {
  static const char version[] = "580.00";
  if (bytes < sizeof version) return INSUFFICIENT_SIZE;
  memcpy(text, version, sizeof version);
  return SUCCESS;
}

// The place of the fake driver's only device.
int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, void** device) {
  if (strstr(bus, ":0f:00.") == NULL && strstr(bus, ":0F:00.") == NULL) return NOT_FOUND;
  *device = &board;
  return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(void* device, utilization* rates) {
  if (device != &board) return INVALID_ARGUMENT;
  *rates = (utilization){.gpu = 11, .memory = 12};
  return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(void* device, memory_v2* memory) {
  if (device != &board) return INVALID_ARGUMENT;
  memory->total = 21000;
  memory->reserved = 22000;
  memory->free = 23000;
  memory->used = 24000;
  return SUCCESS;
}

// The GPU's temperature: it is the only sensor.
int nvmlDeviceGetTemperature(void* device, unsigned sensor, unsigned* degrees) {
  return device == &board && sensor == 0 ? give(degrees, 31) : INVALID_ARGUMENT;
}

int nvmlDeviceGetPowerUsage(void* device, unsigned* milliwatts) {
  return device == &board ? give(milliwatts, 41000) : INVALID_ARGUMENT;
}

int nvmlDeviceGetPowerManagementLimit(void* device, unsigned* milliwatts) {
  return device == &board ? give(milliwatts, 42000) : INVALID_ARGUMENT;
}

int nvmlDeviceGetEnforcedPowerLimit(void* device, unsigned* milliwatts) {
  return device == &board ? give(milliwatts, 43000) : INVALID_ARGUMENT;
}

// The clocks of graphics, multiprocessors, memory and video.
int nvmlDeviceGetClockInfo(void* device, unsigned domain, unsigned* mhz) {
  return device == &board && domain < 4 ? give(mhz, 51 + domain) : INVALID_ARGUMENT;
}

int nvmlDeviceGetEccMode(void* device, unsigned* current, unsigned* pending) {
  if (device != &board) return INVALID_ARGUMENT;
  *current = 1;
  *pending = 0;
  return SUCCESS;
}

// Corrected or not; since the driver was loaded, or in the board's life.
int nvmlDeviceGetTotalEccErrors(void* device, unsigned corrected, unsigned counter, unsigned long long* errors) {
  if (device != &board || corrected > 1 || counter > 1) return INVALID_ARGUMENT;
  *errors = 61 + corrected + 2 * counter;
  return SUCCESS;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void* device, unsigned long long* reasons) {
  if (device != &board) return INVALID_ARGUMENT;
  *reasons = 0x44;
  return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void* device, unsigned* count, void* processes) {
  (void)processes;
  if (device != &board) return INVALID_ARGUMENT;
  *count = 71;
  return INSUFFICIENT_SIZE;
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(void* device, unsigned* count, void* processes) {
  (void)processes;
  if (device != &board) return INVALID_ARGUMENT;
  *count = 72;
  return INSUFFICIENT_SIZE;
}
