// Damaged copies of the shipped GGUF file, and what the program gemma must say about each.
#ifndef GEMMA_TEST_HOSTILE_GGUF_H
#define GEMMA_TEST_HOSTILE_GGUF_H

#include <string>
#include <vector>

namespace gemma_test {

struct HostileGguf {
  std::string name, bytes;
  std::string text;  // part of what the program must say
};

std::vector<HostileGguf> hostile_ggufs();

}  // namespace gemma_test

#endif  // GEMMA_TEST_HOSTILE_GGUF_H
