// Opens files that a user names.
#ifndef GEMMA_REGULAR_FILE_H
#define GEMMA_REGULAR_FILE_H

#include <sys/stat.h>

#include <string>

namespace gemma {

// A descriptor of a regular file, and what fstat says of it. `flags` are those of open; a file that O_CREAT makes has
// the permissions 0666 less the process's mask. Errors: what open refuses; pipes, devices, sockets and folders, at
// once.
int open_regular(const std::string& path, int flags, struct stat* status);

}  // namespace gemma

#endif  // GEMMA_REGULAR_FILE_H
