// One request for memory of the process fails, whichever: the call says so, and the process lives.
//
// The program's own malloc stands before the C library's and fails at the N-th call from the library under test. A
// child runs the workload for each N, as many of them as the time allows, spread over all. `test_process_memory N
// [COUNT]` runs one alone.
#define _GNU_SOURCE
#include <sys/wait.h>
#include <time.h>

#include "failing_malloc.h"
#include "workload.h"

#ifndef NVB_FAILING_MALLOC

int main(void) {
  printf("Nothing is tested: the program cannot take malloc's place beside AddressSanitizer, or without glibc\n");
  return 0;
}

#else

// What became of the children.
static long children, refused, died;

static void run_child(long from, long count, long at_least) {
  fflush(NULL);
  pid_t child = fork();
  if (child == 0) {
    smallest = at_least;
    first = from;
    last = from + count;
    alarm(30);
    workload_result result = workload();
    _exit(result.broken != 0 ? 2 : result.failed != 0);
  }
  int status = -1;
  if (child < 0 || waitpid(child, &status, 0) != child) {
    check_fail(__FILE__, __LINE__, "fork", strerror(errno));
    return;
  }
  ++children;
  if (WIFEXITED(status) && WEXITSTATUS(status) < 2) {
    refused += WEXITSTATUS(status);
    return;
  }
  ++died;
  if (died <= 40) {
    char why[160];
    snprintf(why, sizeof why, "requests %ld to %ld of at least %ld bytes fail: %s %d", from, from + count - 1, at_least,
             WIFSIGNALED(status) ? "killed by signal" : "exit code",
             WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
    check_fail(__FILE__, __LINE__, "a child", why);
  }
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

// Runs as many children as `seconds` allow, spread over the requests, with `count` failures in a row each.
static void sweep(const char* what, long total, long count, long at_least, double seconds) {
  children = refused = died = 0;
  double begin = now();
  // Neighbours take turns: a prime that is no divisor visits all before it comes back.
  const long step = 7919 % total == 0 ? 1 : 7919;
  long done = 0;
  for (long at = 0; done < total && now() - begin < seconds; ++done, at = (at + step) % total) {
    run_child(at, count, at_least);
  }
  printf("%s: %ld of %ld requests failed in turn, %ld workloads met an error, %ld ended the process\n", what, done,
         total, refused, died);
}

int main(int argc, char** argv) {
  if (!find_library()) return fprintf(stderr, "the library is not among the objects of this process\n"), 1;
  if (argc > 1) {
    first = atol(argv[1]);
    last = first + (argc > 2 ? atol(argv[2]) : 1);
    smallest = argc > 3 ? atol(argv[3]) : 0;
    workload_result result = workload();
    printf("%d calls, %d failed, %d broken: %s; %ld requests, %ld of more than 64 KiB\n", result.calls, result.failed,
           result.broken, result.first, requests, large_requests);
    return result.broken != 0;
  }
  // Counted in a child, so that none of those to come inherits a library in use.
  int channel[2];
  long totals[2] = {0, 0};
  if (pipe(channel) != 0) return 1;
  pid_t child = fork();
  if (child == 0) {
    workload_result result = workload();
    totals[0] = requests;
    totals[1] = large_requests;
    if (result.failed != 0) fprintf(stderr, "%s\n", result.first);
    _exit(write(channel[1], totals, sizeof totals) != sizeof totals || result.failed != 0);
  }
  int status = -1;
  CHECK(read(channel[0], totals, sizeof totals) == sizeof totals);
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  if (totals[0] == 0 || totals[1] == 0) return check_fail(__FILE__, __LINE__, "the workload", "asked for nothing"), 1;
  sweep("large", totals[1], 1, 65537, 20);
  sweep("any", totals[0], 1, 0, 8);
  sweep("a hundred in a row", totals[0], 100, 0, 4);
  return test_result();
}

#endif
