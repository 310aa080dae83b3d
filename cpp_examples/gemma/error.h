// How this program reports what is wrong with its input: an exception with a text that names the value and the limit.
#ifndef GEMMA_ERROR_H
#define GEMMA_ERROR_H

#include <sstream>
#include <stdexcept>
#include <string>

namespace gemma {

// A file, an option or a token that this program cannot work with.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Throws Error with the parts written one after the other.
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw Error(text.str());
}

}  // namespace gemma

#endif  // GEMMA_ERROR_H
