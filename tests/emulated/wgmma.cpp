// The products of block.h: wgmma of 16-bit floats, m64nNk16, and of FP8, m64nNk32, with operands as the PTX ISA lays
// them out; and ldmatrix and stmatrix.
#include <algorithm>

#include "block.h"

namespace emulated {
namespace {

constexpr int kRows = 64, kMostDepth = 32;

// An operand in shared memory by its descriptor (PTX ISA, "Matrix Descriptor Format"), rows of 128 bytes whose 16-byte
// pieces the hardware finds by address: bits 4 to 6 are exchanged by bits 7 to 9.
struct Descriptor {
  uint32_t start, leading, stride;

  explicit Descriptor(uint64_t bits) {
    start = static_cast<uint32_t>(bits & 0x3fff) << 4;
    leading = static_cast<uint32_t>(bits >> 16 & 0x3fff) << 4;
    stride = static_cast<uint32_t>(bits >> 32 & 0x3fff) << 4;
    if (bits >> 62 != 1 || (bits >> 49 & 7) != 0) fail("a descriptor of another swizzle");
  }

  uint16_t at(uint32_t offset, uint32_t bytes) const {
    uint32_t address = start + offset;
    address ^= address >> 3 & 0x70;
    if (address < kSharedStart || address - kSharedStart + bytes > shared_bytes)
      fail("an operand outside of shared memory");
    uint16_t bits = 0;
    std::memcpy(&bits, asynchronous.data() + address - kSharedStart, bytes);
    return bits;
  }

  // k along rows: eight rows are contiguous, the next eight lie `stride` on.
  uint16_t along_rows(int row, int k, int bytes) const {
    return at(static_cast<uint32_t>(row / 8) * stride + static_cast<uint32_t>(row % 8) * 128 +
                  static_cast<uint32_t>(k * bytes),
              static_cast<uint32_t>(bytes));
  }

  // k down rows: 64 columns are a row, the next 64 lie `leading` on; the next eight rows of k lie `stride` on.
  uint16_t down_rows(int column, int k) const {
    const uint32_t next = options.faults.wrong_next_columns ? 1024 : leading;
    return at(static_cast<uint32_t>(column / 64) * next + static_cast<uint32_t>(k / 8) * stride +
                  static_cast<uint32_t>(k % 8) * 128 + static_cast<uint32_t>(column % 64) * 2,
              2);
  }
};

void execute(const Product& product) {
  static float a[kRows][kMostDepth], b[kMostDepth][256], sums[256];
  const int columns = product.columns, bytes = product.elements.bytes, depth = 32 / bytes;
  if (product.registers.empty()) {
    const Descriptor descriptor(product.a);
    for (int row = 0; row < kRows; ++row) {
      for (int k = 0; k < depth; ++k) a[row][k] = product.elements.first(descriptor.along_rows(row, k, bytes));
    }
  } else {
    for (int thread = 0; thread < kWarpgroup; ++thread) {
      // A register has two or four neighbours, and the four threads of a row stand side by side.
      const int together = 4 / bytes;
      const int first_row = thread / 32 * 16 + thread % 32 / 4, first_k = thread % 4 * together;
      for (int i = 0; i < 4; ++i) {
        const int place = options.faults.wrong_fragment && (i == 1 || i == 2) ? 3 - i : i;
        const uint32_t word = product.registers[static_cast<size_t>(thread)][i];
        float* const to = &a[first_row + place % 2 * 8][first_k + place / 2 * 4 * together];
        for (int one = 0; one < together; ++one) {
          const uint32_t bits = word >> 8 * bytes * one;
          to[one] = product.elements.first(static_cast<uint16_t>(bytes == 1 ? bits & 0xff : bits));
        }
      }
    }
  }
  const Descriptor descriptor(product.b);
  for (int k = 0; k < depth; ++k) {
    for (int column = 0; column < columns; ++column) {
      b[k][column] = product.elements.second(product.transposed ? descriptor.down_rows(column, k)
                                                                : descriptor.along_rows(column, k, bytes));
    }
  }
  for (int row = 0; row < kRows; ++row) {
    // Four threads have a row, a pair of every eight columns each.
    const size_t first_thread = static_cast<size_t>(row / 16 * 32 + row % 8 * 4);
    const int half = row % 16 / 8;
    const auto sum_of = [&](int column) -> float& {
      const size_t thread = first_thread + static_cast<size_t>(column % 8 / 2);
      return product.sums[thread][column / 8 * 4 + half * 2 + column % 2];
    };
    for (int column = 0; column < columns; ++column) sums[column] = product.accumulates ? sum_of(column) : 0.0f;
    for (int k = 0; k < depth; ++k) {
      const float factor = a[row][k];
      for (int column = 0; column < columns; ++column) sums[column] += factor * b[k][column];
    }
    for (int column = 0; column < columns; ++column) sum_of(column) = sums[column];
  }
}

Warpgroup& warpgroup() {
  return block.warpgroups[static_cast<size_t>(block.current / kWarpgroup)];
}

// Whether all threads of the warpgroup satisfy something.
template <typename Test>
bool all_of_warpgroup(const Test& test) {
  const auto first = block.fibers.begin() + block.current / kWarpgroup * kWarpgroup;
  return std::all_of(first, first + kWarpgroup, test);
}

}  // namespace

void product_fence() {
  if (!options.faults.no_product_fence) fiber().fenced = true;
}

void product(float* sums, const uint32_t* registers, uint64_t a, uint64_t b, int columns, bool transposed,
             bool accumulates, Elements elements) {
  if (!fiber().fenced) fail("a product without a fence before it");
  Warpgroup& group = warpgroup();
  const size_t mine = fiber().issued++;
  if (mine == group.products.size()) {
    group.products.push_back({std::vector<float*>(kWarpgroup),
                              std::vector<const uint32_t*>(registers == nullptr ? 0 : kWarpgroup), a, b, elements,
                              columns, 0, transposed, accumulates});
  }
  Product& one = group.products[mine];
  if (one.a != a || one.b != b || one.elements.bytes != elements.bytes || one.columns != columns ||
      one.accumulates != accumulates || one.registers.empty() != (registers == nullptr)) {
    fail("a warpgroup's threads issue different products");
  }
  const size_t thread = static_cast<size_t>(block.current % kWarpgroup);
  one.sums[thread] = sums;
  if (registers != nullptr) one.registers[thread] = registers;
  if (++one.issued == kWarpgroup && !options.late_products) {
    execute(one);
    ++group.executed;
  }
}

void product_commit() {
  Warpgroup& group = warpgroup();
  const size_t mine = fiber().commits++;
  if (mine == group.groups.size()) group.groups.push_back(fiber().issued);
  if (group.groups[mine] != fiber().issued) fail("a warpgroup's threads commit different groups");
}

// Until at most `pending` groups run. All threads of a warpgroup come to it, as to the products.
void product_wait(size_t pending) {
  Warpgroup& group = warpgroup();
  Fiber& self = fiber();
  self.fenced = false;
  if (options.faults.no_product_wait && pending == 1) return;
  const size_t mine = ++self.waits;
  const int current = block.current;
  const auto all_wait = [&] {
    const auto first = block.fibers.begin() + current / kWarpgroup * kWarpgroup;
    return std::all_of(first, first + kWarpgroup, [&](const Fiber& one) { return one.waits >= mine; });
  };
  const size_t ended = self.commits > pending ? group.groups[self.commits - pending - 1] : 0;
  wait_until(all_wait);
  for (; group.executed < ended; ++group.executed) execute(group.products[group.executed]);
}

// The rows at the addresses that the warp's lanes give, those of a matrix in eight different places of 128 bytes.
static std::vector<uint8_t*> matrix_rows(uint32_t row) {
  const uint64_t* const addresses = exchange(row);
  std::vector<uint8_t*> rows;
  for (int matrix = 0; matrix < 4; ++matrix) {
    unsigned places = 0;
    for (int i = 0; i < 8; ++i) {
      const uint64_t address = addresses[8 * matrix + i];
      if (address < kSharedStart || address + 16 > kSharedStart + shared_bytes) fail("a row outside of shared memory");
      if (address % 16 != 0) fail("a row of a matrix that is not aligned");
      places |= 1u << address / 16 % 8;
      rows.push_back(shared_memory + (address - kSharedStart));
    }
    if (places != 0xff) fail("rows of a matrix share banks");
  }
  return rows;
}

void load_matrices_transposed(uint32_t (&r)[4], uint32_t row) {
  const std::vector<uint8_t*> rows = matrix_rows(row);
  const size_t lane = static_cast<size_t>(block.current % kLanes);
  for (size_t matrix = 0; matrix < 4; ++matrix) {
    uint16_t pair[2];
    for (size_t i = 0; i < 2; ++i) std::memcpy(&pair[i], rows[8 * matrix + lane % 4 * 2 + i] + lane / 4 * 2, 2);
    std::memcpy(&r[matrix], pair, 4);
  }
}

void store_matrices(uint32_t row, const uint32_t (&r)[4]) {
  const std::vector<uint8_t*> rows = matrix_rows(row);
  const size_t lane = static_cast<size_t>(block.current % kLanes);
  for (size_t matrix = 0; matrix < 4; ++matrix) {
    std::memcpy(rows[8 * matrix + lane / 4] + lane % 4 * 4, &r[matrix], 4);
  }
}

}  // namespace emulated
