// What the engine's tests share: checks, temporary folders, and model folders written from numbers.
#ifndef GEMMA_TEST_SUPPORT_H
#define GEMMA_TEST_SUPPORT_H

#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace gemma_test {

// Throws with the parts as its text where `condition` is false.
template <typename... Parts>
void require(bool condition, const Parts&... parts) {
  if (condition) return;
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

struct Test {
  std::string name;
  std::function<void()> run;
};

// Runs all tests, prints the failures, and returns main's exit code.
int run_tests(const std::vector<Test>& tests);

// NVB_TEST_DEVICE, "cpu" if it is not set.
std::string test_device();

// ‖a − b‖ / ‖b‖. Errors: different sizes; a value that is not finite.
double relative_error(const std::vector<float>& a, const std::vector<double>& b);

// An empty folder that is removed with all it holds.
class TemporaryFolder {
 public:
  TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder();
  std::string path(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::string read_file(const std::string& path);
void write_file(const std::string& path, const std::string& bytes);

// A tensor of a test model: the values as the file's dtype rounds them.
struct TestTensor {
  std::vector<int64_t> shape;
  std::vector<double> values;
};
using TestTensors = std::map<std::string, TestTensor>;

// Normal random numbers around `mean`, rounded to `dtype` ("F32", "F16", "BF16").
TestTensor random_tensor(const std::vector<int64_t>& shape, double mean, double deviation, const std::string& dtype,
                         uint64_t seed);

// The bytes of a safetensors file. `padding` spaces after the header move the data to another alignment.
std::string safetensors_bytes(const TestTensors& tensors, const std::string& dtype, size_t padding = 0);

// A header and data as they are, whatever they say.
std::string safetensors_bytes(const std::string& header, const std::string& data);

struct CommandResult {
  int code;  // the exit code; 128 + the signal that ended it
  std::string output;
  std::string errors;
};

// Runs a program with these arguments, standard input empty. Errors: a program that does not end within a minute.
CommandResult run_command(const std::vector<std::string>& arguments);

}  // namespace gemma_test

#endif  // GEMMA_TEST_SUPPORT_H
