#include "mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "error.h"
#include "regular_file.h"

namespace gemma {

MappedFile::MappedFile(const std::string& path) : path_(path) {
  struct stat status;
  const int descriptor = open_regular(path, O_RDONLY, &status);
  size_ = static_cast<size_t>(status.st_size);
  if (size_ > 0) {
    void* mapping = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, descriptor, 0);
    if (mapping == MAP_FAILED) {
      const int reason = errno;
      close(descriptor);
      fail(path, ": cannot be mapped: ", std::strerror(reason));
    }
    data_ = static_cast<const uint8_t*>(mapping);
  }
  close(descriptor);  // the mapping keeps the file
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(const_cast<uint8_t*>(data_), size_);
}

std::string read_text(const std::string& path, size_t limit) {
  const MappedFile file(path);
  if (file.size() > limit) fail(path, ": ", file.size(), " bytes; the limit is ", limit);
  return std::string(reinterpret_cast<const char*>(file.data()), file.size());
}

bool file_exists(const std::string& path) {
  return access(path.c_str(), F_OK) == 0;
}

}  // namespace gemma
