// Fibers and barriers of block.h.
#include "block.h"

#include <algorithm>

namespace emulated {
namespace {

constexpr size_t kStackBytes = 128 << 10;

void run_fiber() {
  (*block.body)();
  fiber().finished = true;
  swapcontext(&fiber().context, &block.scheduler);
}

// Copies the box and completes it on its barrier.
void land(const Copy& copy);

bool is_ready(const Fiber& one) {
  return !one.finished && (one.is_ready == nullptr || one.is_ready(one.argument));
}

void land_any() {
  const size_t which = block.random() % block.copies.size();
  const Copy landing = block.copies[which];
  block.copies.erase(block.copies.begin() + static_cast<std::ptrdiff_t>(which));
  land(landing);
}

uint32_t swizzled(uint32_t address) {
  return address ^ (address >> 3 & 0x70);
}

void complete(MBarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  ++barrier.phase;
  barrier.pending = barrier.expected;
}

MBarrier& find(const uint64_t* barrier) {
  const auto found = block.barriers.find(barrier);
  if (found == block.barriers.end()) fail("a barrier that was not made");
  return found->second;
}

void named_come(int number, int threads) {
  if (number < 0 || number > 15 || threads % kLanes != 0) fail("no such named barrier");
  NamedBarrier& barrier = block.named[number];
  if (barrier.expected != 0 && barrier.expected != threads) fail("a named barrier with two sizes");
  barrier.expected = threads;
  if (++barrier.arrived < threads) return;
  barrier.arrived = barrier.expected = 0;
  ++barrier.generation;
}

void land(const Copy& copy) {
  const TensorMap& map = copy.map;
  uint32_t rows = 1;
  for (uint32_t i = 1; i < map.rank; ++i) rows *= map.box[i];
  for (uint32_t row = 0; row < rows; ++row) {
    const uint8_t* source = map.data;
    bool inside = true;
    uint32_t rest = row;
    for (uint32_t i = 1; i < map.rank; ++i) {
      const int64_t at = int64_t{copy.coordinates[i]} + rest % map.box[i];
      rest /= map.box[i];
      const bool within = at >= 0 && at < static_cast<int64_t>(map.sizes[i]);
      inside = inside && (within || (options.faults.swallowed_end && i == 1));
      source += at * static_cast<int64_t>(map.strides[i]);
    }
    for (uint32_t byte = 0; byte < map.box[0]; byte += 16) {
      const int64_t at = int64_t{copy.coordinates[0]} + byte;
      uint8_t piece[16] = {};
      if (inside && at >= 0 && at < static_cast<int64_t>(map.sizes[0])) {
        const uint8_t* const from = source + at;
        const bool known = std::any_of(allowed.begin(), allowed.end(), [&](const auto& range) {
          return range.first <= from && from + 16 <= range.second;
        });
        if (!known) throw Failure("a copy from outside of the tensors");
        std::memcpy(piece, from, 16);
      }
      uint32_t to = swizzled(copy.shared + row * map.box[0] + byte);
      if (options.faults.wrong_swizzle) to ^= to >> 4 & 0x10;
      std::memcpy(shared_memory + to - kSharedStart, piece, 16);
      std::memcpy(asynchronous.data() + to - kSharedStart, piece, 16);
    }
  }
  MBarrier& barrier = block.barriers.at(copy.barrier);
  barrier.bytes -= static_cast<int64_t>(rows) * map.box[0];
  complete(barrier);
}

}  // namespace

[[noreturn]] void fail(const std::string& what) {
  block.failure = what;
  swapcontext(&fiber().context, &block.scheduler);
  std::abort();  // nobody comes back
}

void wait_until(bool (*ready)(const void*), const void* argument) {
  if (ready(argument)) return;
  Fiber& one = fiber();
  one.is_ready = ready;
  one.argument = argument;
  swapcontext(&one.context, &block.scheduler);
}

// Gives a value, waits for the warp's lanes, and returns what they gave.
const uint64_t* exchange(uint64_t value) {
  const size_t first = static_cast<size_t>(block.current / kLanes * kLanes);
  const unsigned mine = fiber().exchanges++;
  std::vector<uint64_t>& given = block.given[mine % 2];
  given[static_cast<size_t>(block.current)] = value;
  wait_until([&] {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      if (block.fibers[first + lane].exchanges <= mine) return false;
    }
    return true;
  });
  return given.data() + first;
}

void run_block(int threads, size_t bytes, const std::function<void()>& body) {
  // A block of one warp has no products.
  if ((threads != kLanes && threads % kWarpgroup != 0) || threads > 1024) throw Failure("a block of another kind");
  if (bytes > 227 * 1024 || bytes > shared_bytes) throw Failure("more shared memory than there is");
  const size_t count = static_cast<size_t>(threads);
  const int warps = threads / kLanes;
  block.body = &body;
  block.fibers.resize(std::max(block.fibers.size(), count));
  block.given[0].assign(count, 0);
  block.given[1].assign(count, 0);
  const int each = 65536 / threads / 8 * 8;
  block.registers.assign(static_cast<size_t>(warps), each);
  block.free_registers = 0;
  std::fill(std::begin(block.named), std::end(block.named), NamedBarrier{});
  block.barriers.clear();
  block.copies.clear();
  block.warpgroups.assign(count / kWarpgroup, Warpgroup{});
  block.failure.clear();
  block.random.seed(options.seed * 1000003 + blockIdx.x);
  std::memset(shared_memory, 0xff, shared_bytes);
  asynchronous.assign(shared_bytes, 0xff);
  for (size_t i = 0; i < count; ++i) {
    Fiber& one = block.fibers[i];
    if (one.stack == nullptr) one.stack.reset(new char[kStackBytes]);
    one.finished = false;
    one.is_ready = nullptr;
    one.exchanges = 0;
    one.issued = one.commits = one.waits = 0;
    one.fenced = false;
    getcontext(&one.context);
    one.context.uc_stack.ss_sp = one.stack.get();
    one.context.uc_stack.ss_size = kStackBytes;
    one.context.uc_link = nullptr;
    makecontext(&one.context, run_fiber, 0);
  }

  // With some seeds a warp runs for as long as it can, with others the turn goes around.
  const bool is_sticky = options.seed % 3 == 0;
  const unsigned copy_odds = options.seed % 2 == 0 ? 2 : 16;
  int warp = 0;
  for (size_t left = count; left > 0;) {
    if (!block.copies.empty() && block.random() % copy_odds == 0) land_any();
    if (!is_sticky) warp = static_cast<int>(block.random() % static_cast<unsigned>(warps));
    bool ran = false;
    for (int tried = 0; tried < warps && !ran; ++tried, warp = (warp + 1) % warps) {
      for (int lane = 0; lane < kLanes; ++lane) {
        block.current = warp * kLanes + lane;
        Fiber& one = fiber();
        if (!is_ready(one)) continue;
        ran = true;
        one.is_ready = nullptr;
        threadIdx = dim3(static_cast<unsigned>(block.current), 0, 0);
        swapcontext(&block.scheduler, &one.context);
        if (!block.failure.empty()) throw Failure(block.failure);
        left -= one.finished ? 1 : 0;
      }
      if (ran) break;
    }
    if (ran) continue;
    if (block.copies.empty() && left > 0) throw Failure("deadlock");
    if (!block.copies.empty()) land_any();
  }

  for (const NamedBarrier& barrier : block.named) {
    if (barrier.arrived != 0) throw Failure("a named barrier left half full");
  }
  if (!block.copies.empty()) throw Failure("a copy that nobody waited for");
  for (const Warpgroup& warpgroup : block.warpgroups) {
    if (warpgroup.executed != warpgroup.products.size()) throw Failure("a product that nobody waited for");
  }
}

void named_arrive(int number, int threads) {
  if (!options.faults.no_turn_arrival) named_come(number, threads);
}

void named_sync(int number, int threads) {
  if (options.faults.no_turn_wait && number != 0) return;
  const unsigned generation = block.named[number].generation;
  named_come(number, threads);
  wait_until([&] { return block.named[number].generation != generation; });
}

void trade_registers(int count, bool more) {
  if (count % 8 != 0 || count < 24 || count > 256) fail("no such number of registers");
  if (options.faults.kept_registers && !more) return;
  const size_t warp = static_cast<size_t>(block.current / kLanes);
  exchange(0);
  if (block.current % kLanes == 0) {
    const int need = (count - block.registers[warp]) * kLanes;
    if (more != (need >= 0)) fail("registers traded the wrong way");
    wait_until([&] { return block.free_registers >= need; });
    block.free_registers -= need;
    block.registers[warp] = count;
  }
  exchange(0);
}

void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  shared_address(barrier);
  const int number = static_cast<int>(block.barriers.size());
  if (!block.barriers.emplace(barrier, MBarrier{number, arrivals, arrivals, 0, 0}).second) fail("a barrier made twice");
}

void barrier_arrive(uint64_t* address, uint32_t bytes) {
  MBarrier& barrier = find(address);
  barrier.bytes += bytes;
  if (barrier.pending == 0) fail("more arrivals than a barrier was made for");
  --barrier.pending;
  complete(barrier);
}

void barrier_wait(uint64_t* address, uint32_t parity) {
  MBarrier& barrier = find(address);
  if (barrier.number == options.faults.unwaited_barrier) return;
  if (barrier.number == options.faults.wrong_parity) parity ^= 1;
  wait_until([&] { return (barrier.phase & 1) != parity; });
}

CUresult encode(CUtensorMap* to, CUtensorMapDataType type, cuuint32_t rank, void* data, const cuuint64_t* sizes,
                const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps,
                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                CUtensorMapFloatOOBfill fill) {
  if (type != CU_TENSOR_MAP_DATA_TYPE_UINT8 || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE ||
      swizzle != CU_TENSOR_MAP_SWIZZLE_128B || fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  if (rank < 2 || rank > 5 || data == nullptr || reinterpret_cast<uintptr_t>(data) % 16 != 0 || box[0] != 128) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  TensorMap map = {};
  map.data = static_cast<const uint8_t*>(data);
  map.rank = rank;
  for (uint32_t i = 0; i < rank; ++i) {
    map.sizes[i] = sizes[i];
    map.strides[i] = i == 0 ? 1 : strides[i - 1];
    map.box[i] = box[i];
    if (sizes[i] == 0 || sizes[i] > uint64_t{1} << 32 || box[i] == 0 || box[i] > 256 || steps[i] != 1 ||
        (i > 0 && (map.strides[i] % 16 != 0 || map.strides[i] >= uint64_t{1} << 40))) {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  if (map.sizes[0] % 16 != 0) return CUDA_ERROR_NOT_SUPPORTED;
  std::memcpy(static_cast<void*>(to), &map, sizeof map);
  return CUDA_SUCCESS;
}

void copy(void* shared, const CUtensorMap* map, std::initializer_list<int> coordinates, uint64_t* barrier) {
  Copy made = {};
  std::memcpy(&made.map, map, sizeof made.map);
  made.shared = shared_address(shared);
  made.barrier = barrier;
  if (made.shared % 1024 != 0) fail("a copy to an address that the swizzle does not start at");
  if (coordinates.size() != made.map.rank) fail("a copy with a map of another rank");
  std::copy(coordinates.begin(), coordinates.end(), made.coordinates);
  find(barrier);
  size_t bytes = 1;
  for (uint32_t i = 0; i < made.map.rank; ++i) bytes *= made.map.box[i];
  if (made.shared - kSharedStart + bytes > shared_bytes) fail("a copy past the end of shared memory");
  // The bytes may come at any time from here on.
  std::memset(shared, 0xff, bytes);
  std::memset(asynchronous.data() + made.shared - kSharedStart, 0xff, bytes);
  block.copies.push_back(made);
}

void proxy_fence() {
  if (!options.faults.no_proxy_fence) std::memcpy(asynchronous.data(), shared_memory, shared_bytes);
}

}  // namespace emulated
