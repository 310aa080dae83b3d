// Reads the container of gemma.cpp's model files: named blobs in one file, in either of its layouts. docs/engines.md
// describes them.
//
// A model file comes from anywhere, so nothing in it is believed: counts, offsets and sizes are checked against each
// other and against the file's length, with arithmetic that cannot overflow, before any blob is handed out.
#ifndef GEMMA_SBS_BLOB_STORE_H
#define GEMMA_SBS_BLOB_STORE_H

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "mapped_file.h"

namespace gemma {

struct Blob {
  const uint8_t* data = nullptr;  // at a multiple of 256 in the file
  size_t bytes = 0;               // never 0
};

// Owns the mapped file that its blobs point into.
class BlobStore {
 public:
  // Errors: a file that is missing, no blob store, cut short or contradicts itself.
  explicit BlobStore(const std::string& path);

  const std::string& path() const { return file_.path(); }

  // NULL if there is no such blob.
  const Blob* find(const std::string& name) const;

  // Errors: no such blob.
  const Blob& at(const std::string& name) const;

 private:
  void read_directory(uint64_t directory, uint64_t count, uint64_t first, uint64_t end);

  MappedFile file_;
  std::map<std::string, Blob> blobs_;
};

}  // namespace gemma

#endif  // GEMMA_SBS_BLOB_STORE_H
