// The smallest engine in C++: a call that fails reports why.
#include <nvbackend.h>

#include <cstdio>
#include <string>

int main() {
  nvb_backend_options options;
  nvb_backend_options_init(&options);
  options.device = "abacus";
  nvb_backend* backend = nullptr;
  const nvb_status status = nvb_backend_create(&options, &backend);
  std::string text(nvb_last_error_message(nullptr, 0), '\0');
  nvb_last_error_message(text.data(), text.size());
  const bool reported = status != NVB_OK && backend == nullptr && text.find("abacus") != std::string::npos;
  if (!reported) std::fprintf(stderr, "%s: %s\n", nvb_status_name(status), text.c_str());
  return reported ? 0 : 1;
}
