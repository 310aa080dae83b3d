// Limits of the process: descriptors, threads, address space. Whatever the library lacks is an error of the call, or
// done without; the process lives and its handles are given back.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "workload.h"

static int set_limit(int resource, rlim_t limit) {
  struct rlimit limits;
  if (getrlimit(resource, &limits) != 0) return 0;
  limits.rlim_cur = limit;
  return setrlimit(resource, &limits) == 0;
}

// Runs `body` in a child, which ends with what it returns; 77: the system does not allow the test.
static int in_child(const char* what, int (*body)(rlim_t), rlim_t limit) {
  fflush(NULL);
  pid_t child = fork();
  if (child == 0) {
    alarm(60);
    _exit(body(limit));
  }
  int status = -1;
  if (child < 0 || waitpid(child, &status, 0) != child) return check_fail(__FILE__, __LINE__, what, strerror(errno)), 1;
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77) {
    printf("%s at %llu is not tested: the system does not set the limit\n", what, (unsigned long long)limit);
  } else if (!WIFEXITED(status) || WEXITSTATUS(status) > 1) {
    char why[128];
    snprintf(why, sizeof why, "at %llu: %s %d", (unsigned long long)limit,
             WIFSIGNALED(status) ? "killed by signal" : "exit code",
             WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
    check_fail(__FILE__, __LINE__, what, why);
    return -1;
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// 0: all calls succeeded, 1: some failed with an error of their own, 2: a bug.
static int outcome(workload_result result) {
  if (result.failed != 0 && getenv("NVB_TEST_VERBOSE") != NULL) fprintf(stderr, "%s\n", result.first);
  return result.broken != 0 ? 2 : result.failed != 0;
}

static int with_descriptors(rlim_t limit) {
  if (!set_limit(RLIMIT_NOFILE, limit)) return 77;
  return outcome(workload());
}

static int with_address_space(rlim_t limit) {
  if (!set_limit(RLIMIT_AS, limit)) return 77;
  return outcome(workload());
}

static int with_address_space_later(rlim_t more) {
  // Beside what a backend with its range of addresses has taken.
  nvb_backend_options options;
  nvb_backend_options_init(&options);
  options.device = "cpu";
  options.threads = 2;
  nvb_backend* backend = NULL;
  if (nvb_backend_create(&options, &backend) != NVB_OK) return 2;
  unsigned long long pages = 0;
  FILE* file = fopen("/proc/self/statm", "r");
  if (file == NULL || fscanf(file, "%llu", &pages) != 1) return 77;
  fclose(file);
  if (!set_limit(RLIMIT_AS, pages * (rlim_t)sysconf(_SC_PAGESIZE) + more)) return 77;
  int result = outcome(workload());
  return nvb_backend_destroy(backend) == NVB_OK ? result : 2;
}

static void* nothing(void* argument) {
  return argument;
}

// No thread can be started: with a stack larger than the address space has room for, glibc's default, the library's own
// threads still could, so their number is limited as well, which binds users other than root.
static int with_threads(rlim_t limit) {
  if (geteuid() == 0 && (setgid(65534) != 0 || setuid(65534) != 0)) return 77;
  if (!set_limit(RLIMIT_NPROC, limit)) return 77;
  pthread_t thread;
  int started = pthread_create(&thread, NULL, nothing, NULL) == 0;
  if (started) pthread_join(thread, NULL);
  if (limit == 0 && started) return 77;
  // The weights are converted and the products computed by this thread alone: nothing fails.
  workload_result result = workload();
  if (result.failed != 0) fprintf(stderr, "%s\n", result.first);
  return result.failed != 0 ? 2 : 0;
}

#ifdef __SANITIZE_ADDRESS__
enum { LIMITS_ADDRESS_SPACE = 0 };
#else
enum { LIMITS_ADDRESS_SPACE = 1 };
#endif

static void test_address_space(void) {
  if (!LIMITS_ADDRESS_SPACE) {
    printf("Address space is not limited: AddressSanitizer takes terabytes of it\n");
    return;
  }
  int failed = 0, steps = 0;
  for (rlim_t limit = (rlim_t)16 << 20; limit <= (rlim_t)8 << 30; limit += limit / 8) {
    failed += in_child("address space", with_address_space, limit) == 1;
    ++steps;
  }
  for (rlim_t more = 0; more <= (rlim_t)256 << 20; more += more / 4 + (64 << 10)) {
    failed += in_child("more address space", with_address_space_later, more) == 1;
    ++steps;
  }
  printf("%d limits of address space, %d of which made calls fail\n", steps, failed);
  CHECK(failed > 0 && failed < steps);
}

int main(void) {
  test_address_space();
  for (rlim_t limit = 0; limit <= 16; ++limit) in_child("descriptors", with_descriptors, limit);
  in_child("threads", with_threads, 0);
  in_child("threads", with_threads, 1);
  return test_result();
}
