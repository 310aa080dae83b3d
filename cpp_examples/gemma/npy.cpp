#include "npy.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "error.h"
#include "regular_file.h"

namespace gemma {

NpyWriter::NpyWriter(const std::string& path, int64_t rows, int64_t columns)
    : path_(path), columns_(columns), missing_(rows) {
  struct stat status;
  const int descriptor = open_regular(path, O_WRONLY | O_CREAT | O_TRUNC, &status);
  file_.reset(fdopen(descriptor, "wb"));
  if (!file_) {
    const int reason = errno;
    ::close(descriptor);
    fail(path, ": ", std::strerror(reason));
  }
  std::string header = "{'descr': '<f4', 'fortran_order': False, 'shape': (" + std::to_string(rows) + ", " +
                       std::to_string(columns) + "), }";
  // Magic, version and length are 10 bytes; the data begins at a multiple of 64.
  header.append(63 - (10 + header.size()) % 64, ' ');
  header += '\n';
  const unsigned char prefix[10] = {0x93,
                                    'N',
                                    'U',
                                    'M',
                                    'P',
                                    'Y',
                                    1,
                                    0,
                                    static_cast<unsigned char>(header.size() & 255),
                                    static_cast<unsigned char>(header.size() >> 8)};
  std::fwrite(prefix, 1, sizeof prefix, file_.get());
  std::fwrite(header.data(), 1, header.size(), file_.get());
}

void NpyWriter::write(const float* rows, int64_t count) {
  if (count > missing_) fail(path_, ": ", count, " rows to write where ", missing_, " are missing");
  missing_ -= count;
  std::fwrite(rows, sizeof(float) * static_cast<size_t>(columns_), static_cast<size_t>(count), file_.get());
  if (std::ferror(file_.get()) != 0) fail(path_, ": cannot be written: ", std::strerror(errno));
}

void NpyWriter::close() {
  if (missing_ != 0) fail(path_, ": ", missing_, " rows are missing");
  const bool failed = std::fflush(file_.get()) != 0 || std::ferror(file_.get()) != 0;
  file_.reset();
  if (failed) fail(path_, ": cannot be written: ", std::strerror(errno));
}

}  // namespace gemma
