// A full disk: whatever the library writes fails with an error that names the path, and leaves what was there before.
//
// The limit on the size of files stands for the disk, and a small file system of its own where the process may mount
// one.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "folder.h"

static char folder[] = "/tmp/nvb_test_disk_XXXXXX";

static const char* in_folder(const char* name) {
  static char path[300];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  return path;
}

static long size_of(const char* path) {
  struct stat status;
  return stat(path, &status) == 0 ? (long)status.st_size : -1;
}

static nvb_linear_case product_of(uint64_t columns) {
  nvb_linear_case product;
  nvb_linear_case_init(&product);
  product.rows = 1;
  product.columns = columns;
  product.depth = 64;
  product.input_dtype = NVB_DTYPE_BF16;
  product.format = NVB_WEIGHT_FORMAT_INT8;
  return product;
}

// `fill` takes what is left of the disk, `clear` gives it back.
static void check_writers(fixture* f, void (*fill)(void), void (*clear)(void)) {
  int before = files_in(folder);
  fill();
  CHECK_FAILS(nvb_memory_write_snapshot(f->memory, in_folder("new")), NVB_ERROR_IO, in_folder("new"));
  clear();
  CHECK_EQUAL(files_in(folder), before);

  CHECK_OK(nvb_memory_write_snapshot(f->memory, in_folder("kept")));
  long size = size_of(in_folder("kept"));
  CHECK(size > 4096);
  fill();
  CHECK_FAILS(nvb_memory_write_snapshot(f->memory, in_folder("kept")), NVB_ERROR_IO, in_folder("kept"));
  clear();
  CHECK_EQUAL(size_of(in_folder("kept")), size);
  CHECK_EQUAL(files_in(folder), before + 1);

  // Tuning goes on without its file, which the report says.
  nvb_backend_options options = device_options();
  options.tuning_file = in_folder("tuning");
  nvb_backend* backend = NULL;
  if (!CHECK_OK(nvb_backend_create(&options, &backend))) return;
  nvb_linear_case product = product_of(64);
  nvb_tune_options tune;
  nvb_tune_options_init(&tune);
  tune.rounds = 1;
  nvb_tune_report report;
  nvb_tune_report_init(&report);
  fill();
  CHECK_OK(nvb_tune_linear(backend, &product, 1, &tune, NULL, NULL, &report));
  clear();
  CHECK_EQUAL(size_of(in_folder("tuning")), -1);
  CHECK_EQUAL(files_in(folder), before + 1);
  product = product_of(128);
  CHECK_OK(nvb_tune_linear(backend, &product, 1, &tune, NULL, NULL, &report));
  CHECK(size_of(in_folder("tuning")) > 0);
  CHECK_OK(nvb_backend_destroy(backend));
  CHECK_EQUAL(unlink(in_folder("tuning")), 0);
  CHECK_EQUAL(unlink(in_folder("kept")), 0);
  CHECK_EQUAL(files_in(folder), before);
}

static void limit_files(rlim_t bytes) {
  struct rlimit limits;
  CHECK_EQUAL(getrlimit(RLIMIT_FSIZE, &limits), 0);
  limits.rlim_cur = bytes;
  CHECK_EQUAL(setrlimit(RLIMIT_FSIZE, &limits), 0);
}

static void fill_by_limit(void) {
  limit_files(100);
}

static void clear_limit(void) {
  limit_files(RLIM_INFINITY);
}

static void fill_disk(void) {
  static char zeros[1 << 16];
  int file = open(in_folder("filler"), O_WRONLY | O_CREAT | O_APPEND, 0600);
  CHECK(file >= 0);
  for (size_t part = sizeof zeros; part > 0; part /= 2) {
    while (write(file, zeros, part) > 0) continue;
  }
  close(file);
}

static void clear_disk(void) {
  CHECK_EQUAL(unlink(in_folder("filler")), 0);
}

static void check_disk(void (*fill)(void), void (*clear)(void)) {
  fixture f = open_fixture();
  void* blocks[200];
  for (int i = 0; i < 200; ++i) CHECK_OK(nvb_memory_allocate(f.memory, 1000, f.stream, &blocks[i]));
  check_writers(&f, fill, clear);
  for (int i = 0; i < 200; ++i) CHECK_OK(nvb_memory_free(f.memory, blocks[i], f.stream));
  close_fixture(&f);
}

int main(void) {
  // What is written past the limit sends a signal as well, which engines that limit files ignore.
  signal(SIGXFSZ, SIG_IGN);
  if (mkdtemp(folder) == NULL) return 1;
  // A child has the small disk in a name space of its own, before either process has used the library.
  pid_t child = fork();
  if (child == 0) {
    int mounted = unshare(CLONE_NEWNS) == 0 && mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0 &&
                  mount("none", folder, "tmpfs", 0, "size=1m") == 0;
    if (!mounted) _exit(77);
    check_disk(fill_disk, clear_disk);
    _exit(test_result());
  }
  int status = -1;
  CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status));
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77) {
    printf("No disk of its own is filled: the process may not mount one\n");
  } else {
    CHECK_EQUAL(status, 0);
  }
  check_disk(fill_by_limit, clear_limit);
  CHECK_EQUAL(rmdir(folder), 0);
  return test_result();
}
