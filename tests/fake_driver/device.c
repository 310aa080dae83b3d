// Initialisation, devices, primary contexts, and what a caller asks about errors and entry points.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

context contexts[MAX_DEVICES];
_Thread_local context* current_context;

// NVIDIA's driver takes itself down in exit, too; threads that are inside it then, or come later, may crash.
static void take_down(void) {
  fake.gone = true;
}

int cuInit(unsigned flags) {
  call c = begin(__func__, 0);
  if (c.runs) {
    if (!fake.initialized) atexit(take_down);
    c.status = flags == 0 ? (int)fake.settings[FAKE_INIT_STATUS] : INVALID_VALUE;
    fake.initialized |= c.status == SUCCESS;
  }
  return finish(c);
}

int cuDriverGetVersion(int* version) {
  call c = begin(__func__, 0);
  if (c.runs) *version = (int)fake.settings[FAKE_DRIVER_VERSION];
  return finish(c);
}

int cuDeviceGetCount(int* count) {
  call c = begin(__func__, NEEDS_INIT);
  if (c.runs) *count = (int)fake.settings[FAKE_DEVICES];
  return finish(c);
}

static bool is_device(int device) {
  return device >= 0 && device < fake.settings[FAKE_DEVICES];
}

int cuDeviceGet(int* device, int ordinal) {
  call c = begin(__func__, NEEDS_INIT);
  if (c.runs) {
    if (is_device(ordinal)) {
      *device = ordinal;
    } else {
      c.status = INVALID_DEVICE;
    }
  }
  return finish(c);
}

int cuDeviceGetName(char* name, int capacity, int device) {
  call c = begin(__func__, NEEDS_INIT);
  if (c.runs) snprintf(name, (size_t)capacity, "Fake GPU %d", device);
  return finish(c);
}

int cuDeviceTotalMem_v2(size_t* bytes, int device) {
  call c = begin(__func__, NEEDS_INIT);
  if (c.runs) {
    *bytes = (size_t)fake.settings[FAKE_MEMORY_BYTES];
    c.status = is_device(device) ? SUCCESS : INVALID_DEVICE;
  }
  return finish(c);
}

// Numbers of CUdevice_attribute, with the values of an H100 where the kernels depend on them.
static int attribute_value(int attribute) {
  switch (attribute) {
    case 13:
      return 1980000;  // kHz
    case 16:
      return 132;  // multiprocessors
    case 33:
      return 0x0f;  // PCI bus
    case 36:
      return 2619000;  // kHz of the memory
    case 37:
      return 5120;  // bits of its bus
    case 38:
      return 50 << 20;  // bytes of the L2 cache
    case 75:
      return (int)fake.settings[FAKE_CAPABILITY] / 10;
    case 76:
      return (int)fake.settings[FAKE_CAPABILITY] % 10;
    case 83:
      return 1;  // unified memory
    case 97:
      return 227 << 10;  // bytes of shared memory that a block may ask for
    case 102:
      return (int)fake.settings[FAKE_VIRTUAL];
    case 115:
      return (int)fake.settings[FAKE_POOLS];
    default:
      return 0;
  }
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  call c = begin(__func__, NEEDS_INIT);
  if (c.runs) {
    *value = attribute_value(attribute);
    c.status = is_device(device) ? SUCCESS : INVALID_DEVICE;
  }
  return finish(c);
}

int cuDeviceGetUuid(unsigned char* uuid, int device) {
  call c = begin(__func__, NEEDS_INIT);
  if (c.runs) {
    for (int i = 0; i < 16; ++i) uuid[i] = (unsigned char)(16 * device + i);
    c.status = is_device(device) ? SUCCESS : INVALID_DEVICE;
  }
  return finish(c);
}

int cuDeviceGetPCIBusId(char* text, int capacity, int device) {
  call c = begin(__func__, NEEDS_INIT);
  if (c.runs) {
    snprintf(text, (size_t)capacity, "0000:0F:%02X.0", device);
    c.status = is_device(device) ? SUCCESS : INVALID_DEVICE;
  }
  return finish(c);
}

int cuDeviceCanAccessPeer(int* accessible, int device, int peer) {
  call c = begin(__func__, NEEDS_INIT);
  if (c.runs) {
    *accessible = (int)fake.settings[FAKE_PEERS];
    c.status = is_device(device) && is_device(peer) && device != peer ? SUCCESS : INVALID_DEVICE;
  }
  return finish(c);
}

int cuDeviceGetP2PAttribute(int* value, int attribute, int device, int peer) {
  enum { PERFORMANCE_RANK = 1 };
  call c = begin(__func__, NEEDS_INIT);
  if (c.runs) {
    *value = attribute == PERFORMANCE_RANK ? 0 : (int)fake.settings[FAKE_PEERS];
    c.status = is_device(device) && is_device(peer) && device != peer ? SUCCESS : INVALID_DEVICE;
  }
  return finish(c);
}

int cuDevicePrimaryCtxRetain(context** retained, int device) {
  call c = begin(__func__, NEEDS_INIT);
  if (c.runs) c.status = (int)fake.settings[FAKE_RETAIN_STATUS];
  if (c.runs && c.status == SUCCESS) {
    contexts[device].device = device;
    ++contexts[device].retained;
    ++fake.books.contexts;
    *retained = &contexts[device];
  }
  return finish(c);
}

int cuDevicePrimaryCtxRelease_v2(int device) {
  call c = begin(__func__, NEEDS_INIT | RELEASES);
  if (c.runs) {
    if (contexts[device].retained == 0) {
      c.status = violation(c.function, INVALID_CONTEXT, "the primary context was released before");
    } else {
      if (--contexts[device].retained == 0) contexts[device].peers = 0;
      --fake.books.contexts;
    }
  }
  return finish(c);
}

int cuCtxGetCurrent(context** current) {
  call c = begin(__func__, 0);
  if (c.runs) {
    *current = current_context;
    c.status = fake.initialized ? SUCCESS : NOT_INITIALIZED;
  }
  return finish(c);
}

int cuCtxSetCurrent(context* wanted) {
  call c = begin(__func__, 0);
  if (c.runs) {
    if (!fake.initialized) {
      c.status = NOT_INITIALIZED;
    } else if (wanted != NULL && wanted->retained == 0) {
      c.status = violation(c.function, INVALID_CONTEXT, "the context was released");
    } else {
      current_context = wanted;
    }
  }
  return finish(c);
}

int cuCtxEnablePeerAccess(context* peer, unsigned flags) {
  call c = begin(__func__, NEEDS_CONTEXT);
  if (c.runs) {
    const unsigned bit = 1u << peer->device;
    if (peer->retained == 0 || peer == current_context || flags != 0) {
      c.status = violation(c.function, INVALID_VALUE, "not a live context of another device");
    } else if (current_context->peers & bit) {
      c.status = PEER_ACCESS_ALREADY_ENABLED;
    } else {
      current_context->peers |= bit;
    }
  }
  return finish(c);
}

int cuCtxSynchronize(void) {
  // Several threads in here may stand there for ever (src/cuda/all_work.rs).
  context* const waited = current_context;
  const bool alone = waited == NULL || atomic_fetch_add(&waited->waiting, 1) == 0;
  wait_for_host_functions();
  call c = begin(__func__, NEEDS_CONTEXT | RELEASES);
  if (!alone) violation(__func__, SUCCESS, "another thread waits for the same device");
  const int status = finish(c);
  if (waited != NULL) atomic_fetch_sub(&waited->waiting, 1);
  return status;
}

// Not counted: error messages are made of it.
int cuGetErrorString(int status, const char** text) {
  switch (status) {
    case INVALID_VALUE:
      *text = "invalid argument";
      break;
    case OUT_OF_MEMORY:
      *text = "out of memory";
      break;
    case NOT_INITIALIZED:
      *text = "initialization error";
      break;
    case 46:
      *text = "CUDA-capable device(s) is/are busy or unavailable";
      break;
    case 100:
      *text = "no CUDA-capable device is detected";
      break;
    case 304:
      *text = "OS call failed or operation not supported on this OS";
      break;
    case 700:
      *text = "an illegal memory access was encountered";
      break;
    case 719:
      *text = "unspecified launch failure";
      break;
    case 803:
      *text = "system has unsupported display driver / cuda driver combination";
      break;
    case 999:
      *text = "unknown error";
      break;
    default:
      *text = "a status that the fake driver does not describe";
      break;
  }
  return SUCCESS;
}

// The CUDA runtime looks its entry points up here.
int cuGetProcAddress_v2(const char* symbol, void** function, int version, uint64_t flags, int* found) {
  (void)version;
  (void)flags;
  char newer[128];
  static void* self;
  Dl_info info;
  if (self == NULL && dladdr(&fake, &info)) self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  snprintf(newer, sizeof newer, "%s_v2", symbol);
  *function = dlsym(self, newer);
  if (*function == NULL) *function = dlsym(self, symbol);
  if (found != NULL) *found = *function == NULL;
  return *function != NULL ? SUCCESS : NOT_FOUND;
}

// The tables between NVIDIA's runtime and driver are private, and the runtime checks through one of them that it talks
// to NVIDIA's driver: it does not start on this one, and launches fail with its status. Tests that need launches
// link a stand-in runtime.
int cuGetExportTable(const void** table, const void* id) {
  (void)id;
  *table = NULL;
  return NOT_FOUND;
}
