// Samples that alternate between the sides, ratios of those of one round, so that a change of the machine's speed meets
// all sides alike, and the rows that are printed.
#pragma once
#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "allocator.h"

struct Options {
  const char* device = "auto";
  bool quick = false;
  double soak_seconds = 0;
  std::vector<std::string> only;

  int samples() const { return quick ? 3 : 9; }
};

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Numbers that are the same in every run.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}
  uint64_t next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_;
  }
  // 0 to bound - 1.
  uint64_t below(uint64_t bound) { return static_cast<uint64_t>((static_cast<__uint128_t>(next()) * bound) >> 64); }

 private:
  uint64_t state_;
};

double median(std::vector<double> values);

// Medians of what the rounds gave, for each side in its order: of its values, and of its value over the first side's in
// the same round. A machine that changes between two speeds may show each median at another speed, the quotient of two
// medians then says nothing.
struct Medians {
  std::vector<double> values;
  std::vector<double> quotients;
  // Whether each round gave a quotient; else they are those of the medians.
  bool of_rounds = true;
};

// The medians of `samples` values of `sample` for each side, taken in turn after one round that is thrown away.
Medians interleave(const std::vector<Allocator*>& sides, int samples, const std::function<double(Allocator&)>& sample);

enum class Better { kLower, kHigher };

// A row for each peer, of values in the order of `sides`, the first of which is ours: one line of JSON on standard
// output and one of text on standard error.
void print_rows(const char* operation, const std::string& what, const std::vector<Allocator*>& sides,
                const std::vector<double>& values, const char* unit, Better better);
void print_rows(const char* operation, const std::string& what, const std::vector<Allocator*>& sides,
                const Medians& medians, const char* unit, Better better);

void bench_pair(const Options& options, Allocator& ours, const Peers& peers);
void bench_threads(const Options& options, Allocator& ours, const Peers& peers);
void bench_random_allocations(const Options& options, const Device& device, Allocator& ours, const Peers& peers);
void bench_fragmentation(const Options& options, Allocator& ours, const Peers& peers);
// Whether all was well.
bool soak(const Device& device, double seconds);
