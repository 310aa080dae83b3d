// Device memory that is allocated in blocks, memory pools, unified memory and page-locked host memory.
//
// A device address lies in a range that is reserved and not accessible; what it stands for is host memory beside it.
// Addresses are never used twice, so that every use of a block after its end is seen.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "internal.h"

typedef struct {
  int64_t blocks;
  unsigned devices;  // bit N: device N may reach its blocks, besides their owner
  bool destroyed;
} pool;

typedef struct {
  uint64_t address;
  size_t bytes;
  unsigned char* storage;  // NULL once freed
  context* owner;
  pool* from;    // NULL for plain allocations
  bool managed;  // unified: the host uses the same addresses, and the device need not have room
} block;

typedef struct {
  void* pointer;  // NULL once freed
  size_t bytes;
} host_block;

static const size_t RESERVED_BYTES = (size_t)1 << 40, LEAST_RESERVED_BYTES = (size_t)1 << 32;
static const size_t ALIGNMENT = 512;
static const size_t PAGE = 4096;  // what page-locked and unified memory is aligned to
static const size_t GAP = 4096;   // between blocks, so that running past an end meets no other block

static uint64_t next_address, end_address;
static block* blocks;
static host_block* host_blocks;
static size_t block_count, host_block_count;

void* grow(void* array, size_t count, size_t size) {
  if ((count & (count - 1)) != 0) return array;
  void* larger = realloc(array, (count ? 2 * count : 1) * size);
  if (larger == NULL) abort();
  return larger;
}

// NULL: this machine has no such memory.
static void* allocate_pages(size_t bytes) {
  return bytes > SIZE_MAX - PAGE ? NULL : aligned_alloc(PAGE, (bytes + PAGE - 1) / PAGE * PAGE);
}

static int allocate(call* c, uint64_t* address, size_t bytes, context* owner, pool* from) {
  if (bytes == 0) return violation(c->function, INVALID_VALUE, "0 bytes asked for");
  if (end_address == 0) {
    // Under valgrind a process has fewer addresses.
    size_t reserved = RESERVED_BYTES;
    void* range;
    while ((range = mmap(NULL, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) ==
           MAP_FAILED) {
      if (reserved <= LEAST_RESERVED_BYTES) abort();
      reserved /= 2;
    }
    next_address = (uint64_t)range;
    end_address = next_address + reserved;
  }
  const int64_t limit = fake.settings[FAKE_MEMORY_BYTES];
  const size_t span = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT + GAP;
  if (bytes > (size_t)(limit - owner->used) || span > end_address - next_address) return OUT_OF_MEMORY;
  unsigned char* storage = calloc(1, bytes);
  if (storage == NULL) return OUT_OF_MEMORY;
  memset(storage, 0xcd, bytes < GAP ? bytes : GAP);  // new memory holds no zeros
  blocks = grow(blocks, block_count, sizeof *blocks);
  blocks[block_count++] = (block){next_address, bytes, storage, owner, from, false};
  *address = next_address;
  next_address += span;
  owner->used += (int64_t)bytes;
  ++fake.books.blocks;
  fake.books.bytes += (int64_t)bytes;
  if (from != NULL) ++from->blocks;
  return SUCCESS;
}

static block* find(uint64_t address) {
  for (size_t i = block_count; i-- > 0;) {
    if (address >= blocks[i].address && address - blocks[i].address < blocks[i].bytes) return &blocks[i];
  }
  return NULL;
}

static int release(call* c, uint64_t address) {
  block* found = find(address);
  if (found == NULL || found->address != address) {
    return violation(c->function, INVALID_VALUE, "an address that was never allocated");
  }
  if (found->storage == NULL) return violation(c->function, INVALID_VALUE, "freed twice");
  free(found->storage);
  found->storage = NULL;
  if (!found->managed) found->owner->used -= (int64_t)found->bytes;
  --fake.books.blocks;
  fake.books.bytes -= (int64_t)found->bytes;
  if (found->from != NULL) --found->from->blocks;
  return SUCCESS;
}

static host_block* find_host(const void* pointer) {
  for (size_t i = host_block_count; i-- > 0;) {
    const unsigned char* first = host_blocks[i].pointer;
    if (first != NULL && (const unsigned char*)pointer >= first &&
        (size_t)((const unsigned char*)pointer - first) < host_blocks[i].bytes) {
      return &host_blocks[i];
    }
  }
  return NULL;
}

// Whether work in the current context may use the block.
static bool is_open(const block* found) {
  if (found->managed || found->owner == current_context) return true;
  if (found->from != NULL) return (found->from->devices & (1u << current_context->device)) != 0;
  return (current_context->peers & (1u << found->owner->device)) != 0;
}

// The host memory behind a range that the device can reach, page-locked memory included; NULL after noting why there is
// none.
static unsigned char* access_range(call* c, uint64_t address, size_t bytes) {
  if (find_host((const void*)address) != NULL) return (unsigned char*)address;
  if (is_reserved(address)) {
    const char* unmapped = NULL;
    unsigned char* storage = mapped_storage(address, bytes, &unmapped);
    if (storage == NULL) c->status = violation(c->function, INVALID_VALUE, unmapped);
    return storage;
  }
  block* found = find(address);
  const char* wrong = found == NULL            ? "an address outside device memory"
                      : found->storage == NULL ? "device memory that was freed"
                      : !is_open(found)        ? "memory that is not open to the device"
                      : bytes > found->bytes - (size_t)(address - found->address) ? "past the end of a block"
                                                                                  : NULL;
  if (wrong == NULL) return found->storage + (address - found->address);
  c->status = violation(c->function, INVALID_VALUE, wrong);
  return NULL;
}

int cuMemGetInfo_v2(size_t* free_bytes, size_t* total) {
  call c = begin(__func__, NEEDS_CONTEXT);
  if (c.runs) {
    *total = (size_t)fake.settings[FAKE_MEMORY_BYTES];
    *free_bytes = *total - (size_t)current_context->used;
  }
  return finish(c);
}

int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
  call c = begin(__func__, NEEDS_CONTEXT);
  if (c.runs) c.status = allocate(&c, address, bytes, current_context, NULL);
  return finish(c);
}

int cuMemFree_v2(uint64_t address) {
  call c = begin(__func__, NEEDS_CONTEXT | RELEASES);
  if (c.runs) c.status = release(&c, address);
  return finish(c);
}

int cuMemPoolCreate(pool** created, const void* properties) {
  call c = begin(__func__, NEEDS_INIT);
  (void)properties;
  if (c.runs) {
    *created = calloc(1, sizeof(pool));
    if (*created == NULL) abort();
    ++fake.books.pools;
  }
  return finish(c);
}

int cuMemPoolSetAttribute(pool* changed, int attribute, void* value) {
  call c = begin(__func__, NEEDS_INIT);
  (void)attribute;
  (void)value;
  if (c.runs && changed->destroyed) c.status = violation(c.function, INVALID_HANDLE, "the pool was destroyed");
  return finish(c);
}

int cuMemPoolSetAccess(pool* changed, const access_description* descriptions, size_t count) {
  call c = begin(__func__, NEEDS_INIT);
  if (c.runs && (changed->destroyed || count == 0)) {
    c.status = violation(c.function, INVALID_VALUE, "no pool or no description");
  } else if (c.runs) {
    c.status = open_memory(c.function, descriptions, count, &changed->devices);
  }
  return finish(c);
}

int cuMemPoolGetAccess(int* flags, const pool* asked, const access_location* location) {
  call c = begin(__func__, NEEDS_INIT);
  if (c.runs && asked->destroyed) {
    c.status = violation(c.function, INVALID_HANDLE, "the pool was destroyed");
  } else if (c.runs) {
    *flags = asked->devices & (1u << location->device) ? READ_AND_WRITE : 0;
  }
  return finish(c);
}

// Blocks that are still allocated stay usable, and the pool lives until the last of them is freed.
int cuMemPoolDestroy(pool* destroyed) {
  call c = begin(__func__, NEEDS_INIT | RELEASES);
  if (c.runs) {
    if (destroyed->destroyed) {
      c.status = violation(c.function, INVALID_HANDLE, "destroyed twice");
    } else {
      destroyed->destroyed = true;
      --fake.books.pools;
    }
  }
  return finish(c);
}

int cuMemPoolTrimTo(pool* trimmed, size_t kept) {
  call c = begin(__func__, NEEDS_INIT);
  (void)kept;
  if (c.runs && trimmed->destroyed) c.status = violation(c.function, INVALID_HANDLE, "the pool was destroyed");
  return finish(c);
}

int cuDeviceGraphMemTrim(int device) {
  call c = begin(__func__, NEEDS_INIT);
  if (c.runs && (device < 0 || device >= fake.settings[FAKE_DEVICES])) c.status = INVALID_DEVICE;
  return finish(c);
}

int cuMemAllocFromPoolAsync(uint64_t* address, size_t bytes, pool* from, void* queue) {
  call c = begin(__func__, NEEDS_CONTEXT);
  stream* on = c.runs ? live_stream(c.function, queue) : NULL;
  if (on != NULL && *capture_of(on) != NULL) {
    c.status = violation(c.function, INVALID_VALUE, "a capture allocates");
  } else if (on != NULL) {
    c.status = from->destroyed ? violation(c.function, INVALID_HANDLE, "the pool was destroyed")
                               : allocate(&c, address, bytes, current_context, from);
  } else if (c.runs) {
    c.status = INVALID_HANDLE;
  }
  return finish(c);
}

int cuMemFreeAsync(uint64_t address, void* queue) {
  call c = begin(__func__, stream_flags(queue) | RELEASES);
  if (c.runs) c.status = live_stream(c.function, queue) == NULL ? INVALID_HANDLE : release(&c, address);
  return finish(c);
}

int run_work(call* c, const work* done) {
  const bool to_host = done->kind == WORK_COPY_TO_HOST, from_host = done->kind == WORK_COPY_TO_DEVICE;
  if (done->kind == WORK_LAUNCH) {
    ++fake.books.launches;
    return SUCCESS;
  }
  unsigned char* to = to_host ? (unsigned char*)done->to : access_range(c, done->to, done->bytes);
  if (to == NULL) return c->status;
  if (done->kind == WORK_FILL) {
    memset(to, done->value, done->bytes);
    return SUCCESS;
  }
  const unsigned char* from = from_host ? (const unsigned char*)done->from : access_range(c, done->from, done->bytes);
  if (from == NULL) return c->status;
  memmove(to, from, done->bytes);
  return SUCCESS;
}

static int queue_work(const char* function, void* handle, work queued) {
  call c = begin(function, NEEDS_CONTEXT);
  stream* queue = c.runs ? live_stream(c.function, handle) : NULL;
  if (c.runs && queue == NULL) {
    c.status = INVALID_HANDLE;
  } else if (c.runs && !capture_work(queue, queued)) {
    c.status = run_work(&c, &queued);
    if (c.status == SUCCESS) enqueue(queue);
  }
  return finish(c);
}

int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void* queue) {
  return queue_work(__func__, queue, (work){WORK_COPY_TO_DEVICE, to, (uint64_t)from, bytes, 0});
}

int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* queue) {
  return queue_work(__func__, queue, (work){WORK_COPY_TO_HOST, (uint64_t)to, from, bytes, 0});
}

int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void* queue) {
  return queue_work(__func__, queue, (work){WORK_COPY, to, from, bytes, 0});
}

// CUDA_MEMCPY2D.
typedef struct {
  size_t x, y;
  int type;  // 1: host, 2: device
  void* host;
  uint64_t device;
  void* array;
  size_t pitch;
} rows_of;
typedef struct {
  rows_of from, to;
  size_t width, height;
} rows_copy;

// A capture of one is refused: nobody makes any.
int cuMemcpy2DAsync_v2(const rows_copy* asked, void* queue) {
  call c = begin(__func__, NEEDS_CONTEXT);
  stream* on = c.runs ? live_stream(c.function, queue) : NULL;
  if (c.runs && on == NULL) {
    c.status = INVALID_HANDLE;
  } else if (on != NULL && *capture_of(on) != NULL) {
    c.status = violation(c.function, INVALID_VALUE, "a copy of rows in a capture");
  } else if (on != NULL) {
    const rows_of *from = &asked->from, *to = &asked->to;
    const work_kind kind = to->type == 1 ? WORK_COPY_TO_HOST : from->type == 1 ? WORK_COPY_TO_DEVICE : WORK_COPY;
    const uint64_t to_start = to->type == 1 ? (uint64_t)to->host : to->device;
    const uint64_t from_start = from->type == 1 ? (uint64_t)from->host : from->device;
    if (asked->width > from->pitch || asked->width > to->pitch) {
      c.status = violation(c.function, INVALID_VALUE, "rows that overlap");
    }
    for (size_t row = 0; row < asked->height && c.status == SUCCESS; ++row) {
      const work one = {kind, to_start + row * to->pitch, from_start + row * from->pitch, asked->width, 0};
      c.status = run_work(&c, &one);
    }
    if (c.status == SUCCESS) enqueue(on);
  }
  return finish(c);
}

int cuMemsetD8Async(uint64_t to, unsigned char value, size_t bytes, void* queue) {
  return queue_work(__func__, queue, (work){WORK_FILL, to, 0, bytes, value});
}

int cuMemAllocManaged(uint64_t* address, size_t bytes, unsigned flags) {
  enum { ATTACH_GLOBAL = 1 };
  call c = begin(__func__, NEEDS_CONTEXT);
  if (c.runs && (bytes == 0 || flags != ATTACH_GLOBAL)) {
    c.status = violation(c.function, INVALID_VALUE, "0 bytes, or attached to less than the whole machine");
  } else if (c.runs) {
    unsigned char* storage = allocate_pages(bytes);
    if (storage == NULL) {
      c.status = OUT_OF_MEMORY;
    } else {
      blocks = grow(blocks, block_count, sizeof *blocks);
      blocks[block_count++] = (block){(uint64_t)storage, bytes, storage, current_context, NULL, true};
      *address = (uint64_t)storage;
      ++fake.books.blocks;
      fake.books.bytes += (int64_t)bytes;
    }
  }
  return finish(c);
}

static int check_managed(call* c, uint64_t address, size_t bytes) {
  const block* found = find(address);
  if (found != NULL && found->managed && found->storage != NULL && bytes > 0 &&
      bytes <= found->bytes - (size_t)(address - found->address)) {
    return SUCCESS;
  }
  return violation(c->function, INVALID_VALUE, "not inside a block of unified memory");
}

int cuMemAdvise(uint64_t address, size_t bytes, int advice, int device) {
  call c = begin(__func__, NEEDS_CONTEXT);
  (void)advice;
  (void)device;
  if (c.runs) c.status = check_managed(&c, address, bytes);
  return finish(c);
}

int cuMemPrefetchAsync(uint64_t address, size_t bytes, int device, void* handle) {
  call c = begin(__func__, stream_flags(handle));
  (void)device;
  stream* queue = c.runs ? live_stream(c.function, handle) : NULL;
  if (queue != NULL) {
    c.status = check_managed(&c, address, bytes);
    enqueue(queue);
  } else if (c.runs) {
    c.status = INVALID_HANDLE;
  }
  return finish(c);
}

static int host_node = -1;

int fake_host_node(void) {
  return host_node;
}

// The first node of this thread's memory policy if that prefers one.
static int preferred_node(void) {
  enum { PREFERRED = 1, NODES = 1024, WORD_BITS = 8 * sizeof(unsigned long) };
  int mode = 0;
  unsigned long nodes[NODES / WORD_BITS] = {0};
  if (syscall(SYS_get_mempolicy, &mode, nodes, NODES, NULL, 0) != 0 || mode != PREFERRED) return -1;
  for (int node = 0; node < NODES; ++node) {
    if (nodes[node / WORD_BITS] >> node % WORD_BITS & 1) return node;
  }
  return -1;
}

int cuMemHostAlloc(void** pointer, size_t bytes, unsigned flags) {
  enum { RELAXED = 2 };
  call c = begin(__func__, NEEDS_CONTEXT);
  (void)flags;
  void* pages = NULL;
  if (c.runs && fake_capture_mode() != RELAXED) {
    c.status = violation(c.function, INVALID_VALUE, "it would end a capture, in a mode that is not relaxed");
  } else if (c.runs) {
    pages = allocate_pages(bytes);
    if (pages == NULL) c.status = OUT_OF_MEMORY;
  }
  if (pages != NULL) {
    *pointer = pages;
    host_node = preferred_node();
    host_blocks = grow(host_blocks, host_block_count, sizeof *host_blocks);
    host_blocks[host_block_count++] = (host_block){*pointer, bytes};
    ++fake.books.host_blocks;
  }
  return finish(c);
}

int cuMemFreeHost(void* pointer) {
  call c = begin(__func__, NEEDS_CONTEXT | RELEASES);
  if (c.runs) {
    host_block* found = find_host(pointer);
    if (found == NULL || found->pointer != pointer) {
      c.status = violation(c.function, INVALID_VALUE, "not page-locked memory of this driver, or freed twice");
    } else {
      free(pointer);
      found->pointer = NULL;
      --fake.books.host_blocks;
    }
  }
  return finish(c);
}

int cuPointerGetAttribute(void* value, int attribute, uint64_t address) {
  enum { MEMORY_TYPE = 2, DEVICE_ORDINAL = 9, IS_LEGACY_CUDA_IPC_CAPABLE = 10, MEMPOOL_HANDLE = 17 };
  enum { HOST = 1, DEVICE = 2 };
  call c = begin(__func__, NEEDS_INIT);
  if (c.runs) {
    const block* found = find(address);
    const int ordinal = found != NULL && found->storage != NULL ? found->owner->device : mapped_on(address);
    const bool device = ordinal >= 0;
    if (!device && find_host((const void*)address) == NULL) {
      c.status = INVALID_VALUE;
    } else if (attribute == MEMORY_TYPE) {
      *(unsigned*)value = device ? DEVICE : HOST;
    } else if (attribute == DEVICE_ORDINAL) {
      *(int*)value = device ? ordinal : 0;
    } else if (attribute == MEMPOOL_HANDLE) {
      *(pool**)value = found != NULL ? found->from : NULL;
    } else if (attribute == IS_LEGACY_CUDA_IPC_CAPABLE) {
      *(unsigned*)value = found != NULL && found->from == NULL && !found->managed;
    } else {
      c.status = violation(c.function, INVALID_VALUE, "an attribute that the fake driver does not know");
    }
  }
  return finish(c);
}
