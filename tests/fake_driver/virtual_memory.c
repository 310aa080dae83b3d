// Reserved addresses, physical memory, and the one mapped behind the other.
//
// A range is reserved twice: once for the device's addresses, which nobody may touch, and once for the host memory that
// stands for them. Ranges are never used twice. Physical memory has its content while it is mapped, which is all that a
// caller sees who maps it once.
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "internal.h"

typedef struct {
  uint64_t address;
  size_t bytes;
  unsigned char* storage;
  bool freed;
} range;

typedef struct {
  size_t bytes;
  context* owner;
  bool released;
  bool release_failed;  // reported a fault although it was done: doing it again is no misuse
  int mappings;
} physical;

typedef struct {
  uint64_t address;
  size_t bytes;
  physical* memory;
  unsigned devices;  // bit N: device N may reach it
  bool gone;
  bool unmap_failed;  // as `release_failed`
} mapping;

static const size_t PAGE = (size_t)2 << 20;

static range* ranges;
static mapping* mappings;
static size_t range_count, mapping_count;

static bool is_aligned(uint64_t value) {
  return value % PAGE == 0;
}

static range* find_range(uint64_t address) {
  for (size_t i = range_count; i-- > 0;) {
    if (address >= ranges[i].address && address - ranges[i].address < ranges[i].bytes) return &ranges[i];
  }
  return NULL;
}

static mapping* find_mapping(uint64_t address) {
  for (size_t i = mapping_count; i-- > 0;) {
    mapping* found = &mappings[i];
    if (!found->gone && address >= found->address && address - found->address < found->bytes) return found;
  }
  return NULL;
}

static bool overlaps_mapping(uint64_t address, size_t bytes) {
  for (size_t i = 0; i < mapping_count; ++i) {
    const mapping* other = &mappings[i];
    if (!other->gone && address < other->address + other->bytes && other->address < address + bytes) return true;
  }
  return false;
}

static void forget_if_unused(physical* memory) {
  if (!memory->released || memory->mappings > 0) return;
  memory->owner->used -= (int64_t)memory->bytes;
  fake.books.bytes -= (int64_t)memory->bytes;
  --fake.books.physicals;
}

bool is_reserved(uint64_t address) {
  return find_range(address) != NULL;
}

int mapped_on(uint64_t address) {
  const mapping* found = find_mapping(address);
  return found == NULL ? -1 : found->memory->owner->device;
}

unsigned char* mapped_storage(uint64_t address, size_t bytes, const char** wrong) {
  const range* around = find_range(address);
  for (uint64_t at = address; at < address + bytes;) {
    const mapping* found = find_mapping(at);
    *wrong = found == NULL                                         ? "addresses with no memory mapped behind them"
             : !(found->devices & (1u << current_context->device)) ? "memory that is not open to the device"
                                                                   : NULL;
    if (*wrong != NULL) return NULL;
    at = found->address + found->bytes;
  }
  return around->storage + (address - around->address);
}

int cuMemAddressReserve(uint64_t* address, size_t bytes, size_t alignment, uint64_t hint, uint64_t flags) {
  call c = begin(__func__, NEEDS_INIT);
  if (c.runs) {
    if (bytes == 0 || !is_aligned(bytes) || !is_aligned(alignment) || hint != 0 || flags != 0) {
      c.status = violation(c.function, INVALID_VALUE, "not whole pages");
    } else if ((int64_t)bytes > fake.settings[FAKE_RANGE_BYTES]) {
      c.status = OUT_OF_MEMORY;
    } else {
      // One more page in front of each half, for the alignment.
      const size_t half = bytes + PAGE;
      unsigned char* start = mmap(NULL, 2 * half, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (start == MAP_FAILED) abort();
      const uint64_t first = ((uint64_t)start + PAGE - 1) / PAGE * PAGE;
      ranges = grow(ranges, range_count, sizeof *ranges);
      ranges[range_count++] = (range){first, bytes, (unsigned char*)first + half, false};
      ++fake.books.ranges;
      *address = first;
    }
  }
  return finish(c);
}

int cuMemAddressFree(uint64_t address, size_t bytes) {
  call c = begin(__func__, NEEDS_INIT | RELEASES);
  if (c.runs) {
    range* found = find_range(address);
    if (found == NULL || found->address != address || found->bytes != bytes || found->freed) {
      c.status = violation(c.function, INVALID_VALUE, "no range, another range, or freed twice");
    } else if (overlaps_mapping(address, bytes)) {
      c.status = violation(c.function, INVALID_VALUE, "memory is mapped in the range");
    } else {
      found->freed = true;
      --fake.books.ranges;
    }
  }
  return finish(c);
}

typedef struct {
  int type;
  int handle_types;
  int location_type;
  int device;
} properties;

enum { PINNED = 1, ON_DEVICE = 1 };

int cuMemGetAllocationGranularity(size_t* granularity, const properties* wanted, int option) {
  call c = begin(__func__, NEEDS_INIT);
  (void)option;
  if (c.runs) {
    const bool known = wanted->type == PINNED && wanted->location_type == ON_DEVICE;
    c.status = known && wanted->device < fake.settings[FAKE_DEVICES] ? SUCCESS : INVALID_VALUE;
    if (c.status == SUCCESS) *granularity = PAGE;
  }
  return finish(c);
}

int cuMemCreate(physical** created, size_t bytes, const properties* wanted, uint64_t flags) {
  call c = begin(__func__, NEEDS_INIT);
  if (c.runs) {
    context* owner = &contexts[wanted->device];
    if (bytes == 0 || !is_aligned(bytes) || wanted->type != PINNED || wanted->location_type != ON_DEVICE ||
        owner->retained == 0 || flags != 0) {
      c.status = violation(c.function, INVALID_VALUE, "not whole pages of a device in use");
    } else if ((int64_t)bytes > fake.settings[FAKE_MEMORY_BYTES] - owner->used) {
      c.status = OUT_OF_MEMORY;
    } else {
      // Never given back, so that a handle that is used too long is recognised.
      physical* memory = calloc(1, sizeof *memory);
      if (memory == NULL) abort();
      *memory = (physical){.bytes = bytes, .owner = owner};
      owner->used += (int64_t)bytes;
      fake.books.bytes += (int64_t)bytes;
      ++fake.books.physicals;
      *created = memory;
    }
  }
  return finish(c);
}

// What is mapped still goes with its last mapping.
int cuMemRelease(physical* memory) {
  call c = begin(__func__, NEEDS_INIT | UNMAPS);
  if (c.runs && memory->released) {
    c.status = memory->release_failed && memory->mappings > 0 ? INVALID_VALUE
                                                              : violation(c.function, INVALID_VALUE, "released twice");
  } else if (c.runs) {
    memory->released = true;
    memory->release_failed = c.fault != SUCCESS;
    forget_if_unused(memory);
  }
  return finish(c);
}

int cuMemMap(uint64_t address, size_t bytes, size_t offset, physical* memory, uint64_t flags) {
  call c = begin(__func__, NEEDS_INIT);
  if (c.runs) {
    const range* around = find_range(address);
    const char* wrong = around == NULL || around->freed                               ? "outside the reserved addresses"
                        : bytes > around->bytes - (size_t)(address - around->address) ? "past the end of a range"
                        : !is_aligned(address) || bytes == 0                          ? "not whole pages"
                        : memory->released                                            ? "the memory was released"
                        : memory->bytes != bytes || offset != 0 || flags != 0         ? "not the memory as a whole"
                        : overlaps_mapping(address, bytes)                            ? "other memory is mapped there"
                                                                                      : NULL;
    if (wrong != NULL) {
      c.status = violation(c.function, INVALID_VALUE, wrong);
    } else {
      unsigned char* storage = around->storage + (address - around->address);
      if (mprotect(storage, bytes, PROT_READ | PROT_WRITE) != 0) abort();
      memset(storage, 0xcd, 4096);  // new memory holds no zeros
      mappings = grow(mappings, mapping_count, sizeof *mappings);
      mappings[mapping_count++] = (mapping){.address = address, .bytes = bytes, .memory = memory};
      ++memory->mappings;
      ++fake.books.mappings;
    }
  }
  return finish(c);
}

int open_memory(const char* function, const access_description* descriptions, size_t count, unsigned* devices) {
  for (size_t i = 0; i < count; ++i) {
    const access_description* wanted = &descriptions[i];
    if (wanted->location.type != ON_DEVICE || wanted->location.device >= fake.settings[FAKE_DEVICES] ||
        wanted->flags != READ_AND_WRITE) {
      return violation(function, INVALID_VALUE, "not for reading and writing by a device");
    }
    *devices |= 1u << wanted->location.device;
  }
  return SUCCESS;
}

int cuMemSetAccess(uint64_t address, size_t bytes, const access_description* descriptions, size_t count) {
  call c = begin(__func__, NEEDS_INIT);
  if (c.runs) {
    mapping* found = find_mapping(address);
    c.status = found == NULL || found->address != address || found->bytes != bytes
                   ? violation(c.function, INVALID_VALUE, "not the range of one mapping")
                   : open_memory(c.function, descriptions, count, &found->devices);
  }
  return finish(c);
}

int cuMemGetAccess(unsigned long long* flags, const access_location* location, uint64_t address) {
  call c = begin(__func__, NEEDS_INIT);
  if (c.runs) {
    const mapping* found = find_mapping(address);
    if (found == NULL || location->type != ON_DEVICE) {
      c.status = INVALID_VALUE;
    } else {
      *flags = found->devices & (1u << location->device) ? READ_AND_WRITE : 0;
    }
  }
  return finish(c);
}

static mapping* find_gone(uint64_t address, size_t bytes) {
  for (size_t i = mapping_count; i-- > 0;) {
    if (mappings[i].address == address && mappings[i].bytes == bytes) return &mappings[i];
  }
  return NULL;
}

int cuMemUnmap(uint64_t address, size_t bytes) {
  call c = begin(__func__, NEEDS_INIT | UNMAPS);
  if (c.runs) {
    mapping* found = find_mapping(address);
    const mapping* before = find_gone(address, bytes);
    if (found == NULL && before != NULL && before->unmap_failed) {
      c.status = INVALID_VALUE;
    } else if (found == NULL || found->address != address || found->bytes != bytes) {
      c.status = violation(c.function, INVALID_VALUE, "not the range of one mapping");
    } else {
      const range* around = find_range(address);
      unsigned char* storage = around->storage + (address - around->address);
      if (madvise(storage, bytes, MADV_DONTNEED) != 0 || mprotect(storage, bytes, PROT_NONE) != 0) abort();
      found->gone = true;
      found->unmap_failed = c.fault != SUCCESS;
      --found->memory->mappings;
      --fake.books.mappings;
      forget_if_unused(found->memory);
    }
  }
  return finish(c);
}
