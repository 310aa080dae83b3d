// What grouped_linear_wgmma.cuh supports.
#include "../../common/hopper.h"
#include "../../common/tensor_map.h"
#include "grouped_linear_wgmma.h"
#include "grouped_linear_wgmma_tiles.cuh"

bool nvb::grouped::supports_wgmma(const nvb_grouped_linear_params& p, const nvb_launch& launch) {
  // Coordinates of tensor maps are 32 bits, of which a box behind the last row takes some.
  constexpr int64_t kMost = (int64_t{1} << 31) - 256;
  // Rows that lie in one another are not described.
  const bool input = p.rows <= kMost && (p.rows == 1 || p.input_stride >= p.k);
  return is_hopper(launch) && launch.shared_bytes_per_block >= 227 * 1024 && p.weight_dtype != 0 && p.k > 0 &&
         p.k % 64 == 0 && p.k <= kMost && p.n % kGroupRows == 0 && p.experts <= kMostExperts &&
         p.n <= kMost / p.experts && p.weight_stride >= p.k && input && tensor_map_encoder() != nullptr;
}
