// The tensors of gemma.cpp's model files: what the blob "toc" says of them, and their numbers.
#ifndef GEMMA_SBS_TENSORS_H
#define GEMMA_SBS_TENSORS_H

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "sbs_blob_store.h"
#include "tensor_map.h"

namespace gemma {

// gemma.cpp's numbers of types. Others can be named, not read.
enum class SbsType : uint32_t { F32 = 1, BF16 = 2, SFP = 3, NUQ = 4, I8 = 8 };

// "SFP"; "of type 77" for a number that is not known.
std::string sbs_type_name(SbsType type);

// A row-major matrix; a vector is one row. Elements of I8 are groups of 128 that pay no heed to rows.
struct SbsMatrix {
  std::string name;  // in the file, for errors
  SbsType type = SbsType::F32;
  int64_t rows = 0;
  int64_t columns = 0;
  float scale = 1;  // multiplies each element
  const uint8_t* data = nullptr;
  size_t bytes = 0;
};

// Whether it is one of F32, BF16, SFP and I8.
bool is_read(SbsType type);

// The bytes of `elements` in a type that is read.
size_t sbs_bytes(SbsType type, uint64_t elements);

// Whether BF16 holds the values as gemma.cpp multiplies by them: those of SFP exactly, of I8 rounded.
bool fits_bf16(const SbsMatrix& matrix);

// Whether a matrix of I8 is one of INT8 with a scale for each 128 elements of a row: rows of whole groups whose zeros
// are all 0.
bool is_int8(const SbsMatrix& matrix);

// The tensors by name, views of the file. Errors: an entry that has no blob, contradicts itself or does not fit its
// blob, which of types that are not read is not looked at.
std::map<std::string, SbsMatrix> read_sbs_tensors(const BlobStore& file);

// Memory of matrices that the engine needs in another order than the file has them.
class SbsMemory {
 public:
  // Runs of rows of a matrix, one run behind the other: each element of `first` is the first row of `count` rows.
  // Costs a copy unless it is one run. Where groups of I8 cross rows the result is decoded.
  SbsMatrix rows(const SbsMatrix& from, const std::vector<int64_t>& first, int64_t count);

  // A matrix [heads · rows, columns] as [rows, heads · columns]: row n is those of all heads, in a row.
  SbsMatrix join_heads(const SbsMatrix& from, int64_t heads);

  // The values in BF16 or F32, of I8 in BF16 as gemma.cpp rounds them. Errors: the SFP byte 0x80, which is reserved,
  // and groups of I8 whose scale or zero is not finite, with their place.
  SbsMatrix decode(const SbsMatrix& from, SbsType to);

 private:
  uint8_t* allocate(size_t bytes);
  SbsMatrix copy(const SbsMatrix& from, const std::vector<int64_t>& order, int64_t rows, int64_t columns);

  std::vector<std::unique_ptr<uint8_t[]>> buffers_;
};

}  // namespace gemma

#endif  // GEMMA_SBS_TENSORS_H
