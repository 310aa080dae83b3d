// What the C tests of operations share: each operation as a call of the test's own, and what all of them refuse.
//
// A test has a struct `bench` whose first member is the fixture; the checks stand in functions whose parameter `b`
// points to one. `args` is a copy of the good call `good`, wrong in one place at a time.
#ifndef NVBACKEND_TESTS_OPERATION_H
#define NVBACKEND_TESTS_OPERATION_H

#include "check.h"

#define OPERATION(name)                                     \
  static nvb_status call_##name(void* value, void* bench) { \
    const fixture* f = *(fixture* const*)bench;             \
    return nvb_##name(f->backend, value, f->stream);        \
  }

// What every operation has in common: its struct and its handles.
#define CHECK_OPERATION(name, good)                                                                                \
  do {                                                                                                             \
    CHECK_STRUCT(good, call_##name, b);                                                                            \
    CHECK_FAILS(nvb_##name(NULL, &(good), NULL), NVB_ERROR_INVALID_ARGUMENT, "nvb_" #name, "backend", "NULL");     \
    CHECK_FAILS(nvb_##name(foreign_handle(), &(good), NULL), NVB_ERROR_INVALID_ARGUMENT, "not a backend");         \
    CHECK_FAILS(nvb_##name(b->f->backend, &(good), foreign_handle()), NVB_ERROR_INVALID_ARGUMENT, "not a stream"); \
  } while (0)

#define REFUSED(name, ...)                                                                              \
  CHECK_FAILS(nvb_##name(b->f->backend, &args, b->f->stream), NVB_ERROR_INVALID_ARGUMENT, __VA_ARGS__); \
  args = good

// A tensor of a good call, given with wrong contents.
#define CHECK_TENSOR(name, good, field)                                                 \
  do {                                                                                  \
    nvb_##name##_args wrong = (good);                                                   \
    check_tensor(__LINE__, #field, &wrong, &wrong.field, (good).field, call_##name, b); \
  } while (0)

static inline void check_tensor(int line, const char* name, void* args, nvb_tensor* tensor, nvb_tensor good,
                                struct_call call, void* bench) {
  const char* words[3] = {name, NULL, NULL};
  float host = 0;
#define TENSOR_REFUSED(word)                                                               \
  words[1] = (word);                                                                       \
  check_fails(__FILE__, line, name, call(args, bench), NVB_ERROR_INVALID_ARGUMENT, words); \
  *tensor = good
  tensor->dtype = 77;
  TENSOR_REFUSED("dtype 77");
  tensor->rank = 0;
  TENSOR_REFUSED("rank 0");
  tensor->rank = 5;
  TENSOR_REFUSED("rank 5");
  tensor->data = NULL;
  TENSOR_REFUSED("NULL");
  tensor->data = (char*)tensor->data + 1;
  TENSOR_REFUSED("aligned");
  tensor->shape[0] = -1;
  TENSOR_REFUSED("-1");
  tensor->shape[0] = INT64_MAX;
  TENSOR_REFUSED("overflow");
  tensor->shape[0] = 1000000;
  TENSOR_REFUSED("past the end");
  for (uint32_t axis = 0; axis < good.rank; ++axis) tensor->strides[axis] = INT64_MIN;
  TENSOR_REFUSED("stride of");
  if (good.shape[good.rank - 1] > 1) {
    for (uint32_t axis = 0; axis < good.rank; ++axis) tensor->strides[axis] = 2;
    TENSOR_REFUSED("innermost stride is 2");
  }
  if (!test_on_cpu()) {
    tensor->data = &host;
    TENSOR_REFUSED("not memory of");
  }
#undef TENSOR_REFUSED
}

// The end of a test that has released all it allocated.
static inline int operation_test_result(fixture* f) {
  CHECK_EQUAL(statistics_of(f->memory).blocks, 0);
  close_fixture(f);
  return test_result();
}

#endif  // NVBACKEND_TESTS_OPERATION_H
