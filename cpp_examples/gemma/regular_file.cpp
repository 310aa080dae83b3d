#include "regular_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "error.h"

namespace gemma {

int open_regular(const std::string& path, int flags, struct stat* status) {
  // Without O_NONBLOCK a pipe waits for its other end. A regular file is read and written as if the flag were not
  // there.
  const int descriptor = open(path.c_str(), flags | O_CLOEXEC | O_NONBLOCK, 0666);
  // A pipe that nobody reads, a socket and a folder are refused by open itself when they are written to.
  const bool other = descriptor < 0 && (errno == ENXIO || errno == EISDIR);
  if (descriptor < 0 && !other) fail(path, ": ", std::strerror(errno));
  if (other || fstat(descriptor, status) != 0 || !S_ISREG(status->st_mode)) {
    if (descriptor >= 0) close(descriptor);
    fail(path, ": not a regular file");
  }
  return descriptor;
}

}  // namespace gemma
