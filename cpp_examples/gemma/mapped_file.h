// A file mapped into memory, read-only, for as long as the object lives.
#ifndef GEMMA_MAPPED_FILE_H
#define GEMMA_MAPPED_FILE_H

#include <cstddef>
#include <cstdint>
#include <string>

namespace gemma {

class MappedFile {
 public:
  // Errors: a file that does not exist, cannot be read or is no regular file. An empty file maps to size() 0.
  explicit MappedFile(const std::string& path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&&) = delete;
  ~MappedFile();

  const std::string& path() const { return path_; }
  const uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  std::string path_;
  const uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

// A whole text file of at most `limit` bytes.
std::string read_text(const std::string& path, size_t limit);

bool file_exists(const std::string& path);

}  // namespace gemma

#endif  // GEMMA_MAPPED_FILE_H
