// A temporary folder of a test and the files in it. The program has a `folder` for mkdtemp, and removes it.
#ifndef NVBACKEND_TESTS_FOLDER_H
#define NVBACKEND_TESTS_FOLDER_H

#include "check.h"

static inline int files_in(const char* folder) {
  char command[300];
  snprintf(command, sizeof command, "ls -A %s | wc -l", folder);
  FILE* pipe = popen(command, "r");
  int count = -1;
  if (pipe == NULL || fscanf(pipe, "%d", &count) != 1) check_fail(__FILE__, __LINE__, command, "no answer");
  if (pipe != NULL) pclose(pipe);
  return count;
}

#endif  // NVBACKEND_TESTS_FOLDER_H
