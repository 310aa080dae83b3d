// What takes a path wants a regular file, and says so at once: a pipe is not waited for, a device is not read.
#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>
#include <sys/time.h>

#include "folder.h"

static char folder[] = "/tmp/nvb_test_files_XXXXXX";

static const char* in_folder(const char* name) {
  static char path[2][256];
  static int next;
  next = !next;
  snprintf(path[next], sizeof path[next], "%s/%s", folder, name);
  return path[next];
}

static void write_text(const char* path, const char* text) {
  FILE* file = fopen(path, "w");
  if (file == NULL || fputs(text, file) < 0 || fclose(file) != 0) check_fail(__FILE__, __LINE__, path, "not written");
}

static char last_record[1024];

static void keep_record(uint32_t level, const char* target, const char* message, size_t length, void* user_data) {
  (void)target;
  (void)user_data;
  if (level <= NVB_LOG_WARNING) snprintf(last_record, sizeof last_record, "%.*s", (int)length, message);
}

// A tuning file that cannot be read is told in a record, and the backend works without it.
static void check_tuning_file(const char* path, const char* words) {
  nvb_backend_options options = device_options();
  options.tuning_file = path;
  options.log_callback = keep_record;
  options.log_level = NVB_LOG_WARNING;
  last_record[0] = '\0';
  nvb_backend* backend = NULL;
  if (!CHECK_OK(nvb_backend_create(&options, &backend))) return;
  CHECK((words == NULL) == (last_record[0] == '\0'));
  if (words != NULL && (strstr(last_record, path) == NULL || strstr(last_record, words) == NULL)) {
    check_fail(__FILE__, __LINE__, path, last_record);
  }
  CHECK_OK(nvb_backend_destroy(backend));
}

int main(void) {
  // Whatever waits here would wait for ever.
  const struct itimerval limit = {{0, 0}, {60, 0}};
  setitimer(ITIMER_REAL, &limit, NULL);
  fixture f = open_fixture();
  if (mkdtemp(folder) == NULL) return 1;
  CHECK_EQUAL(mkfifo(in_folder("pipe"), 0600), 0);
  CHECK_EQUAL(symlink("pipe", in_folder("link")), 0);
  CHECK_EQUAL(mkdir(in_folder("folder"), 0700), 0);
  write_text(in_folder("file"), "not a GGUF file");

  const struct {
    const char* path;
    const char* words;
  } refused[] = {{"pipe", "a pipe; a regular file is needed"},
                 {"link", "a pipe; a regular file is needed"},
                 {"folder", "a folder; a regular file is needed"},
                 {"/dev/zero", "a device; a regular file is needed"},
                 {"/dev/full", "a device; a regular file is needed"}};
  nvb_gguf* file = foreign_handle();
  for (size_t i = 0; i < sizeof refused / sizeof *refused; ++i) {
    const char* path = refused[i].path[0] == '/' ? refused[i].path : in_folder(refused[i].path);
    CHECK_FAILS(nvb_gguf_open(path, &file), NVB_ERROR_IO, "nvb_gguf_open", path, refused[i].words);
    CHECK_FAILS(nvb_memory_write_snapshot(f.memory, path), NVB_ERROR_IO, "nvb_memory_write_snapshot", path,
                refused[i].words);
    check_tuning_file(path, refused[i].words);
  }
  CHECK_FAILS(nvb_gguf_open(in_folder("none"), &file), NVB_ERROR_IO, in_folder("none"), "No such file");
  CHECK_FAILS(nvb_gguf_open(in_folder("file"), &file), NVB_ERROR_INVALID_ARGUMENT, in_folder("file"));
  CHECK_FAILS(nvb_gguf_open("", &file), NVB_ERROR_IO, "No such file");
  CHECK(file == foreign_handle());
  check_tuning_file(in_folder("none"), NULL);
  CHECK_FAILS(nvb_memory_write_snapshot(f.memory, in_folder("none/file")), NVB_ERROR_IO, "none/file", "No such file");
  CHECK_EQUAL(files_in(folder), 4);

  // A snapshot makes a file or replaces one, also where the name leaves no room for another beside it.
  char name[NAME_MAX + 1];
  memset(name, 'n', NAME_MAX);
  name[NAME_MAX] = '\0';
  char path[PATH_MAX];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  for (int i = 0; i < 2; ++i) {
    CHECK_OK(nvb_memory_write_snapshot(f.memory, in_folder("file")));
    CHECK_OK(nvb_memory_write_snapshot(f.memory, path));
  }
  struct stat status;
  CHECK(stat(path, &status) == 0 && status.st_size > 100);
  CHECK_EQUAL(files_in(folder), 5);

  char command[300];
  snprintf(command, sizeof command, "rm -r %s", folder);
  CHECK_EQUAL(system(command), 0);
  close_fixture(&f);
  return test_result();
}
