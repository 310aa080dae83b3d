// A malloc of the program's own, which stands before the C library's and fails where the test says so: for requests of
// the library under test alone, as those of the C library and of the test are no business of its.
//
// Beside AddressSanitizer, which has taken that place, and without glibc there is none: NVB_FAILING_MALLOC is not
// defined.
#ifndef NVBACKEND_TESTS_FAILING_MALLOC_H
#define NVBACKEND_TESTS_FAILING_MALLOC_H

#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__)
#define NVB_FAILING_MALLOC 1

void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);

// Requests from the first to the last + 1 fail; the count goes on.
static _Atomic long requests, large_requests, first = -1, last = -1, smallest;
static const char *library_start, *library_end;

// Whether this request, made from `caller`, fails.
static int fails(size_t bytes, const void* caller) {
  if ((const char*)caller < library_start || (const char*)caller >= library_end) return 0;
  if (bytes < (size_t)smallest) return 0;
  if (bytes > 65536) ++large_requests;
  long number = requests++;
  return number >= first && number < last;
}

#define CALLER __builtin_return_address(0)

void* malloc(size_t bytes) {
  if (fails(bytes, CALLER)) return errno = ENOMEM, NULL;
  return __libc_malloc(bytes);
}

void* calloc(size_t count, size_t bytes) {
  if (fails(count * bytes, CALLER)) return errno = ENOMEM, NULL;
  return __libc_calloc(count, bytes);
}

void* realloc(void* old, size_t bytes) {
  if (fails(bytes, CALLER)) return errno = ENOMEM, NULL;
  return __libc_realloc(old, bytes);
}

int posix_memalign(void** out, size_t alignment, size_t bytes) {
  if (fails(bytes, CALLER)) return ENOMEM;
  *out = __libc_memalign(alignment, bytes);
  return *out == NULL ? ENOMEM : 0;
}

void* aligned_alloc(size_t alignment, size_t bytes) {
  if (fails(bytes, CALLER)) return errno = ENOMEM, NULL;
  return __libc_memalign(alignment, bytes);
}

void* mmap(void* address, size_t bytes, int protection, int flags, int file, off_t offset) {
  if (fails(bytes, CALLER)) return errno = ENOMEM, MAP_FAILED;
  return (void*)syscall(SYS_mmap, address, bytes, protection, flags, file, offset);
}

// Where the library lies, whose requests alone are counted: those of the C library and of this program are no business
// of its.
static int look_at_object(struct dl_phdr_info* info, size_t size, void* address) {
  (void)size;
  const char *start = NULL, *end = NULL;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
    const char* from = (const char*)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
    const char* to = from + info->dlpi_phdr[i].p_memsz;
    if (start == NULL || from < start) start = from;
    if (end == NULL || to > end) end = to;
  }
  if (start == NULL || (const char*)address < start || (const char*)address >= end) return 0;
  library_start = start;
  library_end = end;
  return 1;
}

static int find_library(void) {
  return dl_iterate_phdr(look_at_object, dlsym(RTLD_DEFAULT, "nvb_backend_create"));
}

#endif

#endif  // NVBACKEND_TESTS_FAILING_MALLOC_H
