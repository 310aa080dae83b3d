// A host that claims to be the version that the environment's FAKE_VERSION names, or that exports no functions of ggml
// when it is built with -DEXPORTS_NOTHING: loads the plug-in that is its argument and prints what its registration is.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#ifndef EXPORTS_NOTHING
const char* ggml_version(void) {
  return getenv("FAKE_VERSION");
}

// The plug-in must look at the version before it calls any of these.
#define NOT_CALLED(NAME) \
  void NAME(void);       \
  void NAME(void) {      \
    abort();             \
  }
NOT_CALLED(ggml_op_name)
NOT_CALLED(ggml_unary_op_name)
NOT_CALLED(ggml_glu_op_name)
NOT_CALLED(ggml_nbytes)
NOT_CALLED(ggml_blck_size)
NOT_CALLED(ggml_type_size)
NOT_CALLED(ggml_graph_n_nodes)
NOT_CALLED(ggml_graph_node)
NOT_CALLED(ggml_backend_buffer_init)
NOT_CALLED(ggml_init)
NOT_CALLED(ggml_free)
NOT_CALLED(ggml_new_tensor_4d)
NOT_CALLED(ggml_set_name)
NOT_CALLED(ggml_view_1d)
NOT_CALLED(ggml_rms_norm)
NOT_CALLED(ggml_new_graph)
NOT_CALLED(ggml_build_forward_expand)
#endif

int main(int count, char** arguments) {
  void* plugin = count > 1 ? dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL) : NULL;
  if (plugin == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    return 2;
  }
  void* (*init)(void) = (void* (*)(void))dlsym(plugin, "ggml_backend_init");
  if (init == NULL) return 2;
  void* registration = init();
  puts(registration == NULL ? "refused" : "accepted");
  return 0;
}
