// What the tests of processes share: parts of a test that run in a child of their own, whose end is the answer.
#ifndef NVBACKEND_TESTS_PROCESS_H
#define NVBACKEND_TESTS_PROCESS_H

#include <signal.h>
#include <sys/wait.h>
#include <time.h>

#include "check.h"

// A child that hangs is ended after this time.
enum { CHILD_SECONDS = 60 };

// Waits for the child; 1 if it ended by itself with status 0. Says otherwise how it ended.
static inline int child_succeeds(pid_t child, const char* name) {
  int status = 0;
  for (int waited = 0; waitpid(child, &status, WNOHANG) == 0; ++waited) {
    if (waited == CHILD_SECONDS * 200) {
      fprintf(stderr, "%s: hangs\n", name);
      kill(child, SIGKILL);
      waitpid(child, &status, 0);
      return 0;
    }
    nanosleep(&(struct timespec){0, 5000000}, NULL);
  }
  if (WIFSIGNALED(status)) fprintf(stderr, "%s: ended by signal %d\n", name, WTERMSIG(status));
  if (WIFEXITED(status) && WEXITSTATUS(status) != 0) fprintf(stderr, "%s: status %d\n", name, WEXITSTATUS(status));
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// Runs `body` in a child, which exits with what it returns.
static inline int run_in_child(int (*body)(void), const char* name) {
  fflush(NULL);
  pid_t child = fork();
  if (child == 0) {
    check_failures = 0;
    exit(body());
  }
  CHECK(child > 0);
  return child > 0 && child_succeeds(child, name);
}

#endif  // NVBACKEND_TESTS_PROCESS_H
