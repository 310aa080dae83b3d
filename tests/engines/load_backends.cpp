// Loads the back end that GGML_BACKEND_PATH names before main begins, for programs of llama.cpp that load none.
#include "ggml-backend.h"

namespace {

struct Loader {
  Loader() { ggml_backend_load_all(); }
};
const Loader loader;

}  // namespace
