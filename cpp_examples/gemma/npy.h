// Writes one array of numbers as a NumPy file, row by row. Format 1.0:
// https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
#ifndef GEMMA_NPY_H
#define GEMMA_NPY_H

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>

namespace gemma {

// A float32 array [rows, columns] in C order; the header goes out first, so both extents are known beforehand.
class NpyWriter {
 public:
  // Errors: a file that cannot be created; a pipe or a device.
  NpyWriter(const std::string& path, int64_t rows, int64_t columns);

  // Appends `count` rows. Errors: more rows than the header says; a full disk.
  void write(const float* rows, int64_t count);

  // Closes the file. Errors: rows that are missing; a full disk.
  void close();

 private:
  struct Closer {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };

  std::string path_;
  std::unique_ptr<std::FILE, Closer> file_;
  int64_t columns_;
  int64_t missing_;
};

}  // namespace gemma

#endif  // GEMMA_NPY_H
